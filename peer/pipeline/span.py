"""Span held by a pipeline's peer, on the training thread: layers, memberships, replicas of the state, engine."""

from __future__ import annotations

import logging
import secrets
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.peer.checkpoints.manifest import StageAbout
from shoal.peer.folders import stage_folder
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.member import LocalMember, Progress
from shoal.peer.member.memberships import Memberships
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import NetworkThread
from shoal.peer.pipeline.capability_updates import SpeedEstimate
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage
from shoal.peer.pipeline.mailbox import StageShapes
from shoal.peer.pipeline.runner import StageRunner
from shoal.peer.pipeline.tasks import ComputeResult, Task
from shoal.peer.pipeline.tensor_io import Staging
from shoal.peer.pipeline.training import SpanTraining, TrainingSamples
from shoal.peer.pipeline.view_watch import AssignedSpan, is_held
from shoal.peer.terminal.snapshot import Flow, Snapshot, held_stages, with_stages
from shoal.peer.training.data import DataAbout
from shoal.peer.training.device import autocast
from shoal.peer.training.divergence import Divergence
from shoal.peer.training.layers import Layered, StageModel
from shoal.swarm.errors import LinkError, NotAdmitted
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan
from shoal.swarm.pipeline.engine.routing import Router
from shoal.swarm.pipeline.planner.model import RECOMPUTE_TIME
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)

_NUMBERS = 2**20
"""Tensors that one engine offers at most; the next one's numbers begin elsewhere, or an offer of the one before
could be taken for one of it."""


@dataclass(frozen=True)
class SpanContext:
    """Everything that this peer needs to hold any span of the run.

    ``layer_s``: each layer's measured seconds for a micro-batch, forward and backward.
    """

    connection: RunConnection
    layered: Layered
    samples: TrainingSamples
    about: DataAbout
    recipe_config: dict[str, Any]
    staging: Staging
    layer_s: tuple[float, ...]
    divergence: Divergence = field(default_factory=Divergence)

    @property
    def run(self) -> RunFile:
        return self.connection.run_file


class HeldSpan:
    """Held span of stages, made by ``enter`` and ended by ``leave``."""

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
    def enter(
        cls,
        work: SpanContext,
        place: AssignedSpan,
    ) -> HeldSpan:
        """Build the layers of these stages and join them. Raises ``NotAdmitted`` when they are not ours any more,
        ``Interrupted``, and what a model raises that is not the run's."""
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
                if not is_ours(members.run.client.view):  # a large model takes a while to build
                    raise NotAdmitted(f"stage {stage} is not this peer's any more")
                build = partial(_at_start, work, boundaries[stage], boundaries[stage + 1])
                model = work.layered.build(boundaries[stage], boundaries[stage + 1]).to(work.staging.device)
                member: LocalMember = network.call(members.enter(stage, is_ours), interruptible=True)
                about = StageAbout(number=stage, stages=place.stages)
                setup = TrainingSetup(
                    model,
                    data=work.about,
                    recipe_config=work.recipe_config,
                    stage=about,
                    build=build,
                    divergence=work.divergence,
                )
                folder, emit = stage_folder(work.connection.folder, stage), partial(work.connection.emit, stage=stage)
                replicas[stage] = work.connection.replica(member, setup, folder, emit)
                replicas[stage].register(work.about)
                progress.prepared = len(replicas) / len(stages)
                held.append(HeldStage(stage, boundaries[stage], model, replicas[stage].work))
        except BaseException:
            _nothing_is_ready(progress)
            network.call(members.leave_all())
            raise
        settings = {stage: _compute_settings(work, shapes, stage, recompute=place.recomputes) for stage in stages}
        speed = SpeedEstimate(partial(_expected_s, work, place, is_last=is_last))
        # Elsewhere computations are only begun when they return.
        took = speed.took if work.staging.device.type == "cpu" else lambda stage, seconds: None
        training = SpanTraining(held, replicas, work.samples, settings, took, is_last=is_last)
        client = members.run.client
        engine = StageEngine(
            span,
            _engine_settings(work.run, place.stages, client.deadlines.heartbeat_s),
            Router(client.peer, client.deadlines.patience_s),
            first_number=secrets.randbelow(2**40) * _NUMBERS,
        )
        runner = StageRunner(members, engine, shapes, work.staging)
        return cls(network, members, span, training, runner, speed)

    def begin_training(self) -> None:
        """With the state of every stage in place: take part in the round."""
        self.training.sync_state()
        self._running = self._network.submit(self.runner.run())
        self._network.call(self.runner.open_round(self.training.round))

    def open_round(self, *, goes_on: bool) -> None:
        """After the end of one; ``goes_on``: it is the same, with the work that was done."""
        if not goes_on:
            self._network.call(self.runner.end_round())
        self._network.call(self.runner.open_round(self.training.round))

    def next_task(self, made: ComputeResult | None) -> Task:
        """What is to be done after what was ``made``, as soon as there is something. Raises ``Interrupted``."""
        task = self.runner.next_at_once(made)
        if made is not None:
            self._network.post(self.runner.wake)
        return task or self._network.call(self.runner.next_task(), interruptible=True)

    # What others see ------------------------------------------------------------------------------------------

    def seen(self, run: Snapshot) -> Snapshot:
        """``run``, what the membership of the run says, with that of these stages. From any thread."""
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
        """Which state of each stage is held here, for events."""
        return [
            {"stage": stage, "anchor_version": replica.state.version, "digest": replica.state.digest.hex()}
            for stage, replica in self.training.replicas.items()
            if replica.state is not None
        ]

    def leave(self) -> None:
        """Give back what is not done, and go; others may hold these stages from now on."""
        _nothing_is_ready(self._members.run.progress)  # saving may take a while
        try:
            self.training.save_checkpoints()
        finally:
            if self._running is not None:
                self._network.post(self.runner.close)
                self._network.wait_for(self._running)
            with suppress(LinkError):
                self._network.call(self._members.leave_all())


def _nothing_is_ready(progress: Progress) -> None:
    """For whatever stages come next: what was so of others would be taken for the way to those."""
    progress.prepared, progress.has_work = 0.0, False


def _at_start(work: SpanContext, first: int, stop: int) -> StageModel:
    """Those layers as the run began with them, whatever was trained since."""
    return work.samples.recipe.layers(work.run.run.seed).build(first, stop)


def _expected_s(work: SpanContext, place: AssignedSpan, from_stage: int, *, is_last: bool) -> float:
    """Of a micro-batch that comes in at that stage, as planned: the last stage computes nothing twice."""
    layers = slice(place.boundaries[from_stage], place.boundaries[place.span.last + 1])
    return sum(work.layer_s[layers]) * (RECOMPUTE_TIME if place.recomputes and not is_last else 1.0)


def _compute_settings(work: SpanContext, shapes: StageShapes, stage: int, *, recompute: bool) -> ComputeSettings:
    """For what comes in at ``stage``."""
    assert work.run.pipeline is not None
    return ComputeSettings(
        device=work.staging.device,
        autocast=autocast(work.staging.device, work.run.inner.precision),
        max_in_flight=work.run.pipeline.in_flight,
        recompute=recompute,
        seed=work.run.run.seed,
        input_shape=shapes.inputs[stage] if stage else None,
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
