"""Peer of a pipeline run: reports its capability, is assigned stages, and trains them until the run ends.

It runs on the training thread and leaves everything asynchronous to the network thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from shoal.compression.registry import codec_of
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.memberships import Memberships
from shoal.peer.member.round_deadline import Attention
from shoal.peer.network_thread import Interrupted
from shoal.peer.pipeline.capability_updates import CapabilityUpdates
from shoal.peer.pipeline.profile import ModelProfile, profile_model
from shoal.peer.pipeline.span import HeldSpan, SpanContext
from shoal.peer.pipeline.tensor_io import Staging
from shoal.peer.pipeline.training import ComputeResult, TrainingSamples
from shoal.peer.pipeline.view_watch import SpanAssignment, assigned_span
from shoal.peer.recipes import Recipe, layered_recipe
from shoal.peer.recipes.model_memory import check_layers_fit
from shoal.peer.terminal.snapshot import Snapshot, take_snapshot
from shoal.peer.training.data import DataAbout, run_order
from shoal.peer.training.device import MemoryBytes, MemoryLimits, usable_memory
from shoal.swarm.errors import NotAdmitted, RunEnded, UserError
from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.model import PeerCapability, PlanningProblem
from shoal.swarm.pipeline.planner.planner import explain_no_place
from shoal.swarm.protocol.messages import Acknowledged, PeerToCoordinatorShowCapability
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.types import Capability, LayerSize

if TYPE_CHECKING:  # torch.distributed is slow to import
    from shoal.peer.island.stages import StageRanks

log = logging.getLogger(__name__)

_USUAL_BPS = 1e8
"""Bandwidth assumed until there is another peer to measure it with."""

_CHECK_S = 15.0
"""Interval between checks of this machine's capability."""


class PipelinePeer:
    """Peer of a pipeline run, as a context manager that leaves the run at its end.

    Call ``train`` inside. ``snapshot`` and ``request_stop`` may be called from any thread.
    """

    def __init__(self, connection: RunConnection, recipe: Recipe, device: torch.device, limits: MemoryLimits) -> None:
        """``limits``: the most memory that the stages may take.

        Raises ``UserError`` for a role that holds no stages.
        """
        self._connection = connection
        self._recipe = recipe
        self._device = device
        self._limits = limits
        self._memory: MemoryBytes
        self._network = connection.network
        self._members: Memberships = connection.members
        self._stopping = False
        self._held: HeldSpan | None = None
        self._left_with: list[dict[str, Any]] = []
        self._tokens_trained = 0
        self._measured: ModelProfile
        self._slowdown = 1.0
        self._updates = CapabilityUpdates()
        self._next_check_s = 0.0
        self._reporting: Future[None] | None = None
        self._last_warning = ""
        if connection.options.role == "validator":
            raise UserError(
                "the run has a [pipeline], and nobody scores work there: a validator would need all stages' states and "
                "whole contributions, which members do not show. Its stages compute each other's work again instead "
                "([audit] share): join it with --role trainer or contributor"
            )
        if connection.options.role not in ("trainer", "contributor"):
            raise UserError(
                "the run has a [pipeline], whose members all hold stages: join it with --role trainer or contributor"
            )

    # The run --------------------------------------------------------------------------------------------------

    def train(self, island: StageRanks | None = None) -> None:
        """Train assigned stages until the run ends or ``request_stop``. ``island``: ranks that this process leads.

        Raises ``RecipeError`` for a recipe that cannot be cut into stages, ``DeviceError`` if the device has not enough
        memory, ``ModelMismatch`` and ``CorpusError`` if model or data are not the run's, and ``Diverged``.
        """
        try:
            work = self._prepare(island)
            self._report_capability()
            with work.staging.computing():
                self._hold_spans(work)
        except Interrupted:
            log.info("stopped before this peer had anything to train")
        except RunEnded as error:  # the run ended while this peer was getting ready
            log.info("%s", error)

    def _prepare(self, island: StageRanks | None) -> SpanContext:
        run, connection, recipe = self._connection.run_file, self._connection, self._recipe
        assert run.pipeline is not None
        layers = layered_recipe(recipe, run)
        layered, data = layers.layers(run.run.seed), recipe.training_data()
        if self._members.run.start is not None:
            self._members.run.start.check(layered.layout, whole=True)
        if run.pins is not None:
            run.pins.check_layout(layered.layout)
            run.pins.check_data(recipe.tokens_per_sample, recipe.corpus_digest, len(data))
        self._members.run.progress.activity = "measuring"
        self._memory = usable_memory(self._device, self._limits)  # while no stage is in it
        for option, limit, usable in (
            ("--max-memory", self._limits.host_bytes, self._memory.host),
            ("--max-device-memory", self._limits.device_bytes, self._memory.device),
        ):
            if limit is not None and usable is not None and usable < limit:
                log.warning(
                    "only %.0f MB of the memory that %s allows are free: stages are planned for those",
                    usable / 1e6,
                    option,
                )
        check_layers_fit(run, recipe, self._memory.computing)
        self._measured = profile_model(run, recipe, self._device, time.time())
        if island is not None:
            self._measured = self._measured.shared_by(island.ranks)
            self._memory = island.memory(run, self._memory)
        return SpanContext(
            connection=connection,
            layered=layered,
            samples=TrainingSamples(layers, data, run_order(run, data, recipe.tokens_per_sample)),
            about=DataAbout(recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample, len(data)),
            recipe_config=recipe.config(),
            staging=Staging(self._device, codec_of(run.pipeline.activation_format)),
            layer_s=tuple(layer.seconds for layer in self._measured.layers),
            island=island,
        )

    # Capability -----------------------------------------------------------------------------------------------

    def _capability(self) -> tuple[PeerCapability, bool]:
        """Return this machine's present capability, and whether its bandwidth is a guess.

        Its memory is that which was free before any stage was in it.
        """
        node, peer = self._members.run.node, self._connection.peer
        probed_bps = node.meter.probed_bps
        # The traffic so far is a lower bound of what the link carries.
        carried_bps = max(node.meter.bandwidth_bps, probed_bps or _USUAL_BPS)
        bandwidth_bps = self._connection.options.limits.usable_bps(carried_bps)
        one = self._measured.capability(peer, self._memory, bandwidth_bps, node.round_trip_s)
        layer_s = tuple(seconds * self._slowdown for seconds in one.layer_s)
        return dataclasses.replace(one, layer_s=layer_s), not probed_bps

    def _report_capability(self) -> None:
        """Report this machine's capability to the coordinator, whose next views assign it a span."""
        self._members.run.rejoined = False
        self._network.call(self._send_capability(), interruptible=True)

    def _report_changed_capability(self) -> None:
        """Report the capability again once it has differed for some time; work goes on meanwhile."""
        now_s = time.monotonic()
        if now_s < self._next_check_s or (self._reporting is not None and not self._reporting.done()):
            return
        self._next_check_s = now_s + _CHECK_S
        if self._reporting is not None:
            self._network.wait_for(self._reporting)
            self._reporting = None
        one, is_guess = self._capability()
        if self._updates.is_due(one, now_s, is_guess=is_guess):
            log.info(
                "reporting a changed capability: %.3g s a micro-batch, %.0f Mbit/s, %.0f ms to the other peers",
                sum(one.layer_s),
                one.bandwidth_bps / 1e6,
                1000 * one.rtt_s,
            )
            self._reporting = self._network.submit(self._send_capability())

    async def _send_capability(self) -> None:
        one, is_guess = self._capability()
        self._updates.note_report(one, time.monotonic(), is_guess=is_guess)
        shown = PeerToCoordinatorShowCapability(
            capability=Capability(
                host_bytes=one.host_bytes,
                device_bytes=one.device_bytes,
                layer_s=one.layer_s,
                bandwidth_bps=one.bandwidth_bps,
                rtt_s=one.rtt_s,
            ),
            layers=tuple(
                LayerSize(
                    parameters_bytes=layer.cost.parameters_bytes,
                    activation_bytes=layer.cost.activation_bytes,
                    kept_bytes=layer.cost.kept_bytes,
                )
                for layer in self._measured.layers
            ),
        )
        try:
            await self._members.run.client.ask(shown, Acknowledged)
        except NotAdmitted as error:
            log.info("the coordinator did not take the capability, which is reported again after rejoining: %s", error)

    def _wait_for_span(self) -> SpanAssignment | None:
        """Wait for the assigned span; None when the run has ended or this peer stops."""
        client = self._members.run.client
        self._members.run.progress.activity = "waiting"

        def is_over(view: RunView) -> bool:
            return self._members.run.rejoined or view.phase == "ended" or assigned_span(view, client.peer) is not None

        while not self._stopping:
            view = self._network.call(client.wait_for(is_over, client.deadlines.heartbeat_s), interruptible=True)
            if self._members.run.rejoined:
                self._report_capability()
                continue
            if view.phase == "ended":
                return None
            if (place := assigned_span(view, client.peer)) is not None:
                return place
            if view.pipeline is not None:
                self._warn_why_it_waits(view.pipeline.boundaries)
            self._report_changed_capability()
        return None

    def _warn_why_it_waits(self, boundaries: tuple[int, ...]) -> None:
        """Warn why the plan has no span for this peer, once for each reason."""
        run = self._connection.run_file
        assert run.pipeline is not None
        costs = [layer.cost for layer in self._measured.layers]
        one, _ = self._capability()
        problem = PlanningProblem(costs, [one], run.pipeline.in_flight, account_of(run).demand())
        why = explain_no_place(problem, boundaries)
        if why != self._last_warning:
            self._last_warning = why
            log.warning("%s", why)

    # Stages ---------------------------------------------------------------------------------------------------

    def _hold_spans(self, work: SpanContext) -> None:
        """Hold one assigned span after the other, until the run ends."""
        while (place := self._wait_for_span()) is not None:
            try:
                held = HeldSpan.enter(work, place)
            except NotAdmitted as error:
                log.info("the assigned stages went to another peer before they were entered: %s", error)
                work.drop_span()
                continue
            try:
                self._held = held
                self._emit_span(held, place.boundaries)
                self._work_on(held)
            finally:
                self._leave(held)
            work.drop_span()

    def _work_on(self, held: HeldSpan) -> None:
        """Train a span until the plan moves this peer, the run ends, or this peer stops."""
        made: ComputeResult | None = None
        try:
            held.begin_training()
            while not self._stopping:
                self._connection.look_at_amendments()
                task = held.next_task(made)
                made = None
                if not isinstance(task, Attention):
                    made = held.training.execute(task)
                    self._members.run.progress.computed += made is not None
                    held.training.report_progress(self._members)
                    self._slowdown = held.speed.factor or self._slowdown
                    self._report_changed_capability()
                elif not self._settle(held, task):
                    return
            if any(member.client.view.phase == "closing" for member in self._members.stages.values()):
                self._settle(held, Attention.ROUND)  # the other peers wait for this one's contribution
        except NotAdmitted as error:
            log.info("the stages held here went to another peer: %s", error)

    def _settle(self, held: HeldSpan, attention: Attention) -> bool:
        """Do what goes before further computations; returns False if this span is at its end."""
        match attention:
            case Attention.ROUND:
                held.open_round(goes_on=held.training.close_round())
            case Attention.RESYNC:
                return self._resync(held)
            case Attention.DIVERGED:
                held.training.recover_from_divergence(held.runner.trouble)
                held.open_round(goes_on=False)
            case Attention.ENDED:
                # Other peers may still fetch the round's results from this one.
                run = self._members.run
                self._network.call(run.wait_for_change(run.client.deadlines.heartbeat_s))
                with suppress(Interrupted):
                    self._network.call(run.serve_after_end(), interruptible=True)
                return False
            case Attention.MOVED:
                return False
        return True

    def _resync(self, held: HeldSpan) -> bool:
        """Resync all stages, because the membership was lost or the state is not the run's; False if not possible."""
        if self._members.run.rejoined:
            self._report_capability()
            self._wait_for_span()
        place = assigned_span(self._members.run.client.view, self._members.run.client.peer)
        if place is None or place.span != held.span:
            return False
        held.training.resync("the coordinator had removed this peer, or its state is not the run's")
        held.open_round(goes_on=False)
        return True

    # Reports and the end --------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return this peer's present state; from any thread. Raises the error that ended the network thread."""
        run = self._members.run
        failure = self._network.failure
        if failure is not None:
            raise failure
        taken, held = take_snapshot(run, run.client.view, run.client.peer, str(self._device)), self._held
        taken = dataclasses.replace(taken, leaving=self._stopping)
        return held.add_to_snapshot(taken) if held is not None else taken

    def request_stop(self) -> None:
        """Leave the run soon; unfinished samples go to other peers. Safe in signal handlers."""
        self._stopping = True
        self._network.interrupt()

    def _emit_span(self, held: HeldSpan, boundaries: tuple[int, ...]) -> None:
        span = held.span
        first_layer, stop_layer = boundaries[span.first], boundaries[span.last + 1]
        layers = self._measured.layers[first_layer:stop_layer]
        self._connection.emit(
            "span",
            first=span.first,
            last=span.last,
            stages=len(boundaries) - 1,
            first_layer=first_layer,
            stop_layer=stop_layer,
            parameters_bytes=sum(layer.cost.parameters_bytes for layer in layers),
            anchor_version=self._members.run.client.view.anchor_version,
        )

    def _leave(self, held: HeldSpan) -> None:
        self._held = None
        self._left_with = held.states()
        self._tokens_trained += max(one.samples.tokens_trained for one in held.training.replicas.values())
        held.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        meter = self._members.run.node.meter
        self._connection.emit(
            "left",
            bytes_sent=meter.sent_bytes,
            bytes_received=meter.received_bytes,
            anchor_version=min((one["anchor_version"] for one in self._left_with), default=None),
            held=self._left_with,
            tokens_trained=self._tokens_trained,
        )
        self._connection.close(error)
