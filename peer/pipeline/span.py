"""Span held by a pipeline's peer, on the training thread: layers, memberships, replicas of the state, engine."""

from __future__ import annotations

import logging
import random
import secrets
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.peer.checkpoints.manifest import StageAbout
from shoal.peer.folders import stage_folder
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.member import LocalMember, Progress
from shoal.peer.member.memberships import Memberships
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import NetworkThread
from shoal.peer.pipeline.capability_updates import SpeedEstimate
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, StageCompute
from shoal.peer.pipeline.mailbox import StageShapes
from shoal.peer.pipeline.runner import StageRunner
from shoal.peer.pipeline.sample_mixing import stage_mixes_samples
from shoal.peer.pipeline.tensor_io import Staging
from shoal.peer.pipeline.training import ComputeResult, SpanTraining, Task, TrainingSamples
from shoal.peer.pipeline.view_watch import SpanAssignment, is_held
from shoal.peer.pipeline.work_checks import CheckSettings, rounding_error
from shoal.peer.terminal.snapshot import Flow, Snapshot, held_stages, with_stages
from shoal.peer.training.compiling import compile_layers
from shoal.peer.training.data import DataAbout, take_batch
from shoal.peer.training.device import autocast
from shoal.peer.training.divergence import Divergence
from shoal.peer.training.layers import Layered, StageModel
from shoal.swarm.errors import LinkError, NotAdmitted
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan
from shoal.swarm.pipeline.engine.routing import Router
from shoal.swarm.pipeline.engine.work_checks import tolerance
from shoal.swarm.pipeline.planner.model import RECOMPUTE_TIME
from shoal.swarm.protocol.run_file import RunFile

if TYPE_CHECKING:  # torch.distributed is slow to import
    from shoal.peer.island.stages import StageLead, StageRanks

log = logging.getLogger(__name__)

_NUMBERS = 2**20
"""Distance between the first tensor numbers of engines, more than one engine offers; each engine begins at a random
multiple, so that an offer of the previous one is not taken for one of the next."""


@dataclass(frozen=True)
class SpanContext:
    """Everything that this peer needs to hold any span of the run.

    ``about``: description of the data for the run; ``layer_s``: measured seconds of each layer for a micro-batch,
    forward and backward; ``divergence``: outlives spans; ``island``: ranks that compute the stages together.
    """

    connection: RunConnection
    layered: Layered
    samples: TrainingSamples
    about: DataAbout
    recipe_config: dict[str, Any]
    staging: Staging
    layer_s: tuple[float, ...]
    divergence: Divergence = field(default_factory=Divergence)
    island: StageRanks | None = None

    @property
    def run(self) -> RunFile:
        return self.connection.run_file

    def drop_span(self) -> None:
        """Have the other ranks of an island drop the stages of a span that was left."""
        if self.island is not None:
            self.island.leave_span()


class HeldSpan:
    """Span of stages that this peer holds, from ``enter`` until ``leave``."""

    def __init__(
        self,
        network: NetworkThread[Any],
        members: Memberships,
        span: StageSpan,
        training: SpanTraining,
        runner: StageRunner,
        speed: SpeedEstimate,
    ) -> None:
        self.span = span
        self.speed = speed
        self.training = training
        self.runner = runner
        self._network = network
        self._members = members
        self._first: LocalMember = members.stages[span.first]
        self._running: futures.Future[None] | None = None

    @classmethod
    def enter(cls, work: SpanContext, place: SpanAssignment) -> HeldSpan:
        """Build the layers of an assigned span and join its stages.

        Raises ``NotAdmitted`` if the plan has given a stage to others, ``Interrupted``, and ``ModelMismatch`` for
        layers that are not the run's.
        """
        network, members = work.connection.network, work.connection.members
        boundaries, span = place.boundaries, place.span
        work.layered.check_boundaries(boundaries)
        stages = range(span.first, span.last + 1)
        is_last = span.last == place.stages - 1
        assert work.run.pipeline is not None
        batch = work.samples.data.batch([0])  # type: ignore[attr-defined]
        shapes = StageShapes.of(work.samples.recipe, work.layered, boundaries, batch, work.run.pipeline.micro_batch)
        held, replicas = [], {}
        progress = members.run.progress
        try:
            for stage in stages:
                is_ours = partial(is_held, peer=members.run.client.peer, stage=stage)
                if not is_ours(members.run.client.view):  # building the stage before may have taken long
                    raise NotAdmitted(f"the plan has given stage {stage} to another peer")
                build = partial(_initial_layers, work, boundaries[stage], boundaries[stage + 1])
                model = work.layered.build(boundaries[stage], boundaries[stage + 1])
                lead = _spread(work, shapes, boundaries, stage, model)
                if lead is None:
                    model = model.to(work.staging.device)
                if lead is None and work.run.inner.compile:
                    compile_layers(model, partial(_try_out, work, model, shapes.inputs[stage], stage=stage))
                member: LocalMember = network.call(members.enter(stage, is_ours), interruptible=True)
                about = StageAbout(number=stage, stages=place.stages)
                setup = TrainingSetup(
                    model,
                    data=work.about,
                    recipe_config=work.recipe_config,
                    stage=about,
                    build=build,
                    divergence=work.divergence,
                    island=lead,
                )
                folder, emit = stage_folder(work.connection.folder, stage), partial(work.connection.emit, stage=stage)
                replicas[stage] = work.connection.replica(member, setup, folder, emit)
                replicas[stage].register(work.about)
                progress.prepared = len(replicas) / len(stages)
                held.append(HeldStage(stage, boundaries[stage], model, replicas[stage].own_work))
        except BaseException:
            _reset_headway(progress)
            network.call(members.leave_all())
            raise
        settings = {stage: _compute_settings(work, shapes, stage, recompute=place.recomputes) for stage in stages}
        speed = SpeedEstimate(partial(_expected_s, work, place, is_last=is_last))
        make = StageCompute if work.island is None else work.island.begin_span(settings, is_last=is_last)
        training = SpanTraining(held, replicas, work.samples, settings, speed.add, is_last=is_last, make_compute=make)
        client = members.run.client
        engine = StageEngine(
            span,
            _engine_settings(work.run, place.stages, client.deadlines.heartbeat_s),
            Router(client.peer, client.deadlines.patience_s),
            first_number=secrets.randbelow(2**40) * _NUMBERS,
        )
        checks = CheckSettings(
            share=work.run.audit.share,
            tolerance=tolerance(work.run.inner.precision, rounding_error(work.staging.codec)),
            stages=place.stages,
            chance=random.SystemRandom(),
        )
        runner = StageRunner(members, engine, shapes, work.staging, checks)
        return cls(network, members, span, training, runner, speed)

    def begin_training(self) -> None:
        """Obtain the state of every stage and take part in the round. Raises ``Interrupted``."""
        self.training.sync_state()
        self._running = self._network.submit(self.runner.run())
        self._network.call(self.runner.open_round(self.training.round))

    def open_round(self, *, goes_on: bool) -> None:
        """Go on after a round. ``goes_on``: the round was reopened and its work counts on."""
        if not goes_on:
            self._network.call(self.runner.end_round())
        self._network.call(self.runner.open_round(self.training.round))

    def next_task(self, made: ComputeResult | None) -> Task:
        """Report the last result, if any, and wait for the next task. Raises ``Interrupted``."""
        task = self.runner.take_ready_task(made)
        if made is not None:
            self._network.post(self.runner.wake)
        if task is None:
            self.training.note_phase("waiting")
            task = self._network.call(self.runner.next_task(), interruptible=True)
        return task

    # Reports --------------------------------------------------------------------------------------------------

    def add_to_snapshot(self, run: Snapshot) -> Snapshot:
        """Add the stages held here to a snapshot of the run; from any thread."""
        settings, pipeline = self._first.client.run_file.pipeline, self._members.run.client.view.pipeline
        assert settings is not None
        if pipeline is None:
            return run
        flow = Flow(
            in_flight=self.runner.in_flight,
            max_in_flight=settings.in_flight,
            forwards=self.training.forwards,
            backwards=self.training.backwards,
        )
        return with_stages(run, self._first, held_stages(pipeline, (self.span.first, self.span.last), flow))

    def states(self) -> list[dict[str, Any]]:
        """Return stage, version and digest of each state held here, for events."""
        return [
            {"stage": stage, "anchor_version": replica.state.version, "digest": replica.state.digest.hex()}
            for stage, replica in self.training.replicas.items()
            if replica.state is not None
        ]

    def leave(self) -> None:
        """Save checkpoints, stop the engine and leave all stages; unfinished work is given to other peers."""
        _reset_headway(self._members.run.progress)  # before saving, which may take a while
        try:
            self.training.save_checkpoints()
        finally:
            if self._running is not None:
                self._network.post(self.runner.stop)
                self._network.wait_for(self._running)
            with suppress(LinkError):
                self._network.call(self._members.leave_all())


def _reset_headway(progress: Progress) -> None:
    """Reset the reported headway, which would otherwise be taken for that towards the next span."""
    progress.prepared, progress.has_work = 0.0, False


def _initial_layers(work: SpanContext, first: int, stop: int) -> StageModel:
    """Build layers ``first`` to ``stop`` - 1 with the values that they had at the run's start."""
    return work.samples.recipe.layers(work.run.run.seed).build(first, stop)


def _try_out(work: SpanContext, model: StageModel, shape: tuple[int, ...], *, stage: int) -> None:
    """Compute a micro-batch of zeros, without gradients as where a pass is repeated, then forward and backward.

    ``shape``: of one sample of the stage's input."""
    assert work.run.pipeline is not None
    samples, device = work.run.pipeline.micro_batch, work.staging.device
    if stage:
        given = torch.zeros(samples, *shape, device=device, requires_grad=True)
    else:
        given = work.samples.recipe.input_of(take_batch(work.samples.data, np.zeros(samples, np.int64))).to(device)
    with autocast(device, work.run.inner.precision)():
        with torch.no_grad():
            model(given)
        output = model(given)
    output.float().sum().backward()


def _spread(
    work: SpanContext, shapes: StageShapes, boundaries: tuple[int, ...], stage: int, model: StageModel
) -> StageLead | None:
    """Spread a stage's layers over the ranks of an island, if there is one."""
    if work.island is None:
        return None
    shape, is_last = shapes.inputs[stage] if stage else None, stage == len(boundaries) - 2
    mixes = stage_mixes_samples(work.samples.recipe, work.samples.data, model, shape, is_last=is_last)
    return work.island.enter_stage(stage, (boundaries[stage], boundaries[stage + 1]), model, mixes=mixes)


def _expected_s(work: SpanContext, place: SpanAssignment, from_stage: int, *, is_last: bool) -> float:
    """Return the profiled seconds of a micro-batch that enters at a stage, through the rest of the span.

    Stages that recompute their forward pass take longer; the last stage never does.
    """
    layers = slice(place.boundaries[from_stage], place.boundaries[place.span.last + 1])
    return sum(work.layer_s[layers]) * (RECOMPUTE_TIME if place.recomputes and not is_last else 1.0)


def _compute_settings(work: SpanContext, shapes: StageShapes, stage: int, *, recompute: bool) -> ComputeSettings:
    """Make the settings for micro-batches that enter at ``stage``."""
    assert work.run.pipeline is not None
    return ComputeSettings(
        device=work.staging.device,
        autocast=autocast(work.staging.device, work.run.inner.precision),
        max_in_flight=work.run.pipeline.in_flight,
        recompute=recompute,
        seed=work.run.run.seed,
        input_shape=shapes.inputs[stage] if stage else None,
        shares=None if work.island is None else work.island.shares(),
    )


def _engine_settings(run: RunFile, stages: int, heartbeat_s: float) -> EngineSettings:
    assert run.pipeline is not None
    return EngineSettings(
        stages=stages,
        micro_batch=run.pipeline.micro_batch,
        max_in_flight=run.pipeline.in_flight,
        retry_s=min(0.25, heartbeat_s / 4),
        patience_s=run.round.patience_s,
    )
