"""A simulated member of a pipeline: a real stage engine and router, whose effects let time pass instead of computing.

It holds the stages that the coordinator's plan gives it, fetches their states, and does with micro-batches and rounds
what a real peer does. A tensor is its size; what is kept is known by job and kind, so that a tensor that was dropped
cannot be fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import LinkError, NotAdmitted
from shoal.swarm.pipeline.engine.effects import (
    Answer,
    AskToDrive,
    Claim,
    Compute,
    ComputeBackward,
    ComputeForward,
    Drop,
    DropRound,
    Effect,
    Fetch,
    MicroBatchDone,
    PeerNote,
    Release,
    Reply,
    Send,
    TensorOffer,
)
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan
from shoal.swarm.pipeline.engine.routing import Router
from shoal.swarm.pipeline.planner.model import RECOMPUTE_TIME
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorClaim,
    PeerToCoordinatorDrive,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRoundReady,
)
from shoal.swarm.protocol.types import AssignedSpan, Capability, Headway, KeptState
from shoal.swarm.sample_ranges import Ranges, count, merge, overlap, subtract, to_wire
from shoal.swarm.simulation.costs import APPLY_S_PER_ELEMENT, PACK_S_PER_ELEMENT
from shoal.swarm.simulation.process import MachineProcess
from shoal.swarm.simulation.traces import Machine

if TYPE_CHECKING:
    from shoal.swarm.coordinator.round_scope import RoundScope
    from shoal.swarm.simulation.pipeline import SimulatedPipeline

FORWARD = 1 / 3
"""Of a micro-batch's time: backward takes twice as long (Chen et al. 2016, arXiv:1604.06174)."""

_NUMBERS = 2**20
"""Distance between the first tensor numbers of a machine's engines."""


class StageMember(MachineProcess):
    """One machine of a trace in a pipeline.

    ``disk``: by stage, version and digest of the newest state that was here."""

    def __init__(self, run: SimulatedPipeline, number: int, machine: Machine, seed: int) -> None:
        speed_tps, farewell_s = machine.speed(run.elements), run.deadlines.report_s
        super().__init__(run.clock, run.attendance, machine, speed_tps, number, seed, run.relays, farewell_s)
        self._run = run
        self.layer_s = run.layer_s(speed_tps)
        self.disk: dict[int, tuple[int, bytes]] = {}
        self._engines = 0
        self._turn = 0
        """Counts the spans that it has entered or left; what was begun in an earlier one is not gone on with."""
        self.reset()

    @property
    def capability(self) -> Capability:
        machine = self.machine
        return Capability(
            host_bytes=machine.host_bytes,
            device_bytes=machine.device_bytes,
            layer_s=self.layer_s,
            bandwidth_bps=min(machine.up_bps, machine.down_bps),
            rtt_s=2 * machine.latency_s,
        )

    # The process --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """See ``MachineProcess``."""
        self.computed = self._chunks_moved = 0
        self.roster_version = -1
        self._processes: dict[str, int] = {}
        self._leave_span()

    def _leave_span(self) -> None:
        self._turn += 1
        self.span: AssignedSpan | None = None
        self.versions: dict[int, int] = {}
        """By stage of the span, the version of the state that is here."""
        self.engine: StageEngine | None = None
        self.round = -1
        self._stages: range = range(0)
        self._kept: dict[int, set[str]] = {}
        self._done: dict[int, int] = {}
        """By stage, the samples of this round whose gradients are here."""
        self._running: Compute | None = None
        self._paused: Compute | None = None
        self._replicas: frozenset[str] | None = None
        self._driven_round, self._driven = -1, Ranges()
        self._offered = self._exchanging = self._holds_results = self._concluding = self._beats_soon = False
        self._fetching: tuple[int, float, float] | None = None
        """Stage whose state is being fetched, from when and until when."""

    def is_in_round(self) -> bool:
        """See ``MachineProcess``."""
        return self._offered

    def leave_run(self, *, says_goodbye: bool) -> None:
        """See ``MachineProcess``."""
        if self._exchanging:
            self._run.died_in_exchange(self)
        if says_goodbye and self.joined:
            self._run.leave(self)
        self._leave_span()

    def enter_run(self) -> bool:
        """See ``MachineProcess``."""
        if not self._run.join(self):
            return False
        self.joined = True
        self._beat()
        return True

    # Heartbeats ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beat_now()
        if self.joined:
            self.later(self._run.deadlines.heartbeat_s, self._beat)

    def _beat_now(self) -> None:
        """Report to the run and to all stages, and look at the answer."""
        if not self.joined:
            return
        if not self._run.heartbeat(self):
            self._leave_span()
            self.join_again()
            return
        for stage in self._stages:
            if not self._run.stage_heartbeat(self, stage):
                self._enter(self.span)  # the coordinator has given its claims to others
                return
        self._run.settle()
        self.later(2 * self.machine.latency_s, self.look)

    def _beat_soon(self) -> None:
        """Report at once, as the coordinator may wait for it; one report at a time."""
        if not self._beats_soon:
            self._beats_soon = True
            self.later(0.0, self._beat_as_asked)

    def _beat_as_asked(self) -> None:
        self._beats_soon = False
        self._beat_now()

    def run_heartbeat(self) -> PeerToCoordinatorHeartbeat:
        """Return what it reports to the run's own scope."""
        headway = Headway(
            prepared=1.0 if self.span is not None else 0.0,
            computed=self.computed,
            has_work=self._running is not None,
            plan_version=self._run.machine.version if self.span is not None else 0,
        )
        return self._heartbeat(None, None, 0, headway, ())

    def stage_heartbeat(self, stage: int) -> PeerToCoordinatorHeartbeat:
        """Return what it reports to a stage."""
        version, kept = self.versions.get(stage), self.disk.get(stage)
        digest = None if version is None else self._run.digest(stage, version)
        share = 1.0 if version is not None else self._share_fetched(stage)
        self._chunks_moved += self._exchanging
        states = () if version is not None or kept is None else (KeptState(anchor_version=kept[0], digest=kept[1]),)
        done = self._done.get(stage, 0) * self._run.tokens_per_sample
        return self._heartbeat(version, digest, done, Headway(prepared=share), states)

    def _share_fetched(self, stage: int) -> float:
        if self._fetching is None or self._fetching[0] != stage:
            return 0.0
        _, from_s, until_s = self._fetching
        return min(1.0, max(0.0, (self._clock.now_s - from_s) / max(until_s - from_s, 1e-9)))

    def _heartbeat(
        self, version: int | None, digest: bytes | None, done: int, headway: Headway, kept: tuple[KeptState, ...]
    ) -> PeerToCoordinatorHeartbeat:
        return PeerToCoordinatorHeartbeat(
            round=max(self.round, 0),
            activity="training" if self.engine is not None else "fetching",
            anchor_version=version,
            state_digest=digest,
            tokens_done=done,
            tokens_per_s=0.0,
            step_s=0.0,
            loss=None,
            chunks_moved=self._chunks_moved,
            bytes_sent=int(self.up_bytes),
            bytes_received=int(self.down_bytes),
            bandwidth_bps=min(self.machine.up_bps, self.machine.down_bps),
            roster_version=max(0, self.roster_version),
            headway=headway,
            kept=kept,
        )

    # Stages and their states --------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in the newest view."""
        if not self.joined:
            return
        place, machine = self._run.place_of(self.peer), self._run.machine
        if _span(place) != _span(self.span):
            self._enter(place)
        elif self.engine is None or self._concluding:
            return  # it looks again when it has the states
        elif machine.round_number != self.round:
            self._conclude()
        else:
            self._tell_of_others()
            self._follow()

    def _enter(self, place: AssignedSpan | None) -> None:
        """Hold other stages than before, or the same ones anew."""
        for stage in self._stages:
            self._run.leave_stage(self, stage)
        self._leave_span()
        if place is None:
            return
        self.span, self._stages = place, range(place.first, place.last + 1)
        try:
            for stage in self._stages:
                self._run.join_stage(self, stage)
        except NotAdmitted:
            self._leave_span()
            return
        self._obtain()

    def _scope(self, stage: int) -> RoundScope:
        return self._run.machine.scopes[stage]

    def _obtain(self) -> None:
        """Get the next state that is lacking; with all of them, begin to work."""
        run, turn = self._run, self._turn
        self._fetching = None
        for stage in self._stages:
            wanted = self._scope(stage).anchor_version
            if self.versions.get(stage) == wanted:
                continue
            self.versions.pop(stage, None)
            kept = self.disk.get(stage)
            if wanted == 0 or kept == (wanted, run.digest(stage, wanted)):
                self._hold(stage, wanted)
                continue
            donors = [peer for peer in self._scope(stage).synced() if run.member(peer).alive]
            if not donors:
                wait_s = run.deadlines.heartbeat_s
            else:
                size = run.state_bytes(stage)
                if kept is not None and kept[0] < wanted and kept[1] == run.digest(stage, kept[0]):
                    size = min(size, (wanted - kept[0]) * run.result_bytes(stage))
                wait_s = run.fetch_s(self, donors, size)
                self._fetching = stage, self._clock.now_s, self._clock.now_s + wait_s
                self.disk[stage] = wanted, run.digest(stage, wanted)
            self.later(wait_s, lambda: self._obtain() if self._turn == turn else None)
            return
        self._begin_work()

    def _hold(self, stage: int, version: int) -> None:
        self.versions[stage] = version
        self.disk[stage] = version, self._run.digest(stage, version)
        self._beat_soon()

    def _begin_work(self) -> None:
        assert self.span is not None
        run, now_s = self._run, self._clock.now_s
        self._engines += 1
        settings = EngineSettings(
            stages=len(run.machine.scopes),
            micro_batch=run.micro_batch,
            max_in_flight=run.in_flight,
            retry_s=run.retry_s,
            patience_s=run.deadlines.patience_s,
        )
        router, span = Router(self.peer, run.deadlines.patience_s), StageSpan(self.span.first, self.span.last)
        self.engine = StageEngine(span, settings, router, first_number=self._engines * _NUMBERS)
        self._processes, self._replicas = {}, None
        self._tell_of_others()
        self._open_round(now_s)

    # Rounds -------------------------------------------------------------------------------------------------

    def _open_round(self, now_s: float) -> None:
        """Work for the run's open round from its anchor on."""
        if self.is_leaving:
            self.go()
            return
        assert self.engine is not None
        self._do(self.engine.round_over(now_s))
        self._offered = self._exchanging = self._holds_results = self._concluding = False
        self._done = {}
        self.round = self._run.machine.round_number
        self._do(self.engine.round_opened(self.round, now_s))
        self._beat_soon()

    def _follow(self) -> None:
        """Act on the phase of the round that it works for."""
        assert self.engine is not None
        phase, now_s = self._run.machine.phase, self._clock.now_s
        if phase in ("closing", "averaging") and not self._offered:
            self._do(self.engine.round_closing(now_s))
            if phase == "closing":
                self._close()
        elif phase == "averaging" and not (self._exchanging or self._holds_results):
            self._exchange()
        elif phase in ("training", "waiting") and self._offered:  # samples of the batch were lost
            self._offered = False
            self._do(self.engine.round_opened(self.round, now_s))
            paused, self._paused = self._paused, None
            if paused is not None:
                self._compute(paused)

    def _close(self) -> None:
        """Offer the work of all stages, once the present computation has ended."""
        if self._running is not None or self._offered:
            return
        self._offered = True
        pack_s = PACK_S_PER_ELEMENT * self._run.elements_of(self._stages)
        self.spent_s["packing"] += pack_s
        turn, number = self._turn, self.round

        def ready() -> None:
            if (self._turn, self.round, self._offered) == (turn, number, True):
                self._ready()

        self.later(pack_s + self.machine.latency_s, ready)

    def _ready(self) -> None:
        run, engine = self._run, self.engine
        assert engine is not None
        try:
            for stage in self._stages:
                ranges = engine.counted(stage)
                if not ranges:
                    continue
                is_last = stage == len(run.machine.scopes) - 1
                run.ready(
                    self,
                    stage,
                    PeerToCoordinatorRoundReady(
                        round=self.round,
                        anchor_version=self.versions[stage],
                        state_digest=run.digest(stage, self.versions[stage]),
                        weight_tokens=count(ranges) * run.tokens_per_sample,
                        ranges=to_wire(ranges),
                        loss=1.0 if is_last else None,
                        norms=run.norms(stage),
                    ),
                )
        except LinkError:  # its samples were given to others
            self._enter(self.span)
            return
        run.settle()
        self.later(2 * self.machine.latency_s, self.look)

    def _exchange(self) -> None:
        """Take part in the exchanges of all stages that have its work."""
        run, turn, number = self._run, self._turn, self.round
        mine = run.exchanges_of(self, self._stages)
        if not mine:
            return
        self._exchanging = True
        from_s = self._clock.now_s

        def look() -> None:
            if (self._turn, self.round) != (turn, number) or run.machine.round_number != number:
                return
            left_s = max(course.ends_s for course, _ in mine.values()) - self._clock.now_s
            if left_s > 1e-9:
                self.later(left_s, look)
                return
            self._exchanging, self._holds_results = False, True
            self.spent_s["exchange"] += self._clock.now_s - from_s
            for course, index in mine.values():
                self.count_traffic(course.moved(index))
            self.later(self.machine.latency_s, report)

        def report() -> None:
            if (self._turn, self.round) != (turn, number):
                return
            for stage, (course, index) in mine.items():
                run.report(self, stage, course.report(index))
            run.settle()
            self.later(self.machine.latency_s, self.look)

        look()

    def count_traffic(self, moved: tuple[float, float, float]) -> None:
        sent, received, relayed = moved
        self.up_bytes += sent
        self.down_bytes += received
        self.relayed_bytes += relayed

    def _conclude(self) -> None:
        """The verdict is here: apply the means of all stages, or begin the round anew."""
        run, turn = self._run, self._turn
        wanted = {stage: self._scope(stage).anchor_version for stage in self._stages}
        if any(wanted[stage] not in (version, version + 1) for stage, version in self.versions.items()):
            self._enter(self.span)  # it has missed more than one round, or the run went back
            return
        behind = [stage for stage, version in self.versions.items() if version < wanted[stage]]
        if not behind:
            self._open_round(self._clock.now_s)
            return
        self._concluding = True
        seconds = APPLY_S_PER_ELEMENT * run.elements_of(behind)
        self.spent_s["applying"] += seconds
        for stage in behind:
            if not run.was_planned(self, stage):  # the results are fetched from those that made them
                seconds += run.fetch_s(self, run.last_planned(stage), run.result_bytes(stage))

        def applied() -> None:
            if self._turn != turn:
                return
            self._concluding = False
            if any(self._scope(stage).anchor_version != wanted[stage] for stage in self._stages):
                self._enter(self.span)
                return
            for stage in behind:
                self._hold(stage, wanted[stage])
            self._open_round(self._clock.now_s)
            self.look()

        self.later(seconds, applied)

    # The engine ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Have the engine look at the time."""
        engine = self.engine
        if engine is not None and (engine.kept_activations or engine.span.first == 0):
            self._do(engine.tick(self._clock.now_s))

    def _tell_of_others(self) -> None:
        """Tell the engine who is gone, and who holds the next stage."""
        engine, now_s = self.engine, self._clock.now_s
        assert engine is not None
        processes = self._run.processes()
        if processes is not self._processes:
            before, self._processes = self._processes, processes
            for peer in [one for one, life in before.items() if processes.get(one) != life]:
                if self._replicas is not None and peer in self._replicas:
                    self._replicas = None
                self._do(engine.replica_gone(peer, now_s))
        if not engine.is_last:
            rates = {peer: rate for peer, rate in self._run.holders(engine.span.last + 1).items() if peer in processes}
            rates.pop(self.peer, None)
            if rates.keys() != self._replicas:
                self._replicas = frozenset(rates)
                self._do(engine.replicas_changed(engine.span.last + 1, rates, now_s))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case PeerNote():
                    self._note(effect)
                case Fetch():
                    self._fetch(effect)
                case Claim():
                    self._claim(effect)
                case Release():
                    self._release(effect)
                case ComputeForward() | ComputeBackward():
                    self._compute(effect)
                case Drop():
                    self._kept.pop(effect.job, None)
                case DropRound():
                    self._drop_round()
                case AskToDrive():
                    self._drive(effect)
                case MicroBatchDone():
                    self._run.course.driven += 1
                case Reply():
                    raise AssertionError("only an offer has a reply")

    def _drop_round(self) -> None:
        self._kept.clear()
        paused, self._paused = self._paused, None
        if paused is not None:  # the engine has one computation out at a time, and waits for its end
            assert self.engine is not None
            self._do(self.engine.computed(paused, self._clock.now_s))

    def _compute(self, compute: Compute) -> None:
        assert self.span is not None
        if self._offered:
            self._paused = compute
            return
        self._running = compute
        self._kept.setdefault(compute.job, set())
        layers = self._run.layers_of(compute.from_stage, self.span.last)
        seconds = sum(self.layer_s[layers])
        engine = self.engine
        assert engine is not None
        repeats = RECOMPUTE_TIME - 1.0 if self.span.recomputes and not engine.is_last else 0.0
        seconds *= FORWARD if isinstance(compute, ComputeForward) else 1.0 - FORWARD + repeats
        self.spent_s["compute"] += seconds

        def done() -> None:
            if self.engine is engine:
                self._computed(compute)

        self.later(seconds, done)

    def _computed(self, compute: Compute) -> None:
        engine, course = self.engine, self._run.course
        assert engine is not None
        self._running = None
        self.computed += 1
        is_wanted = compute.job in self._kept and compute.micro_batch.round == self.round
        if isinstance(compute, ComputeBackward):
            samples = compute.micro_batch.samples
            course.computed_samples += samples * len(compute.accumulate)
            for stage in compute.accumulate if is_wanted else ():
                self._done[stage] = self._done.get(stage, 0) + samples
        if is_wanted:
            self._kept[compute.job] = {"activation" if isinstance(compute, ComputeForward) else "gradient"}
        self._do(engine.computed(compute, self._clock.now_s))
        if engine.is_settled:  # if this was the batch's last micro-batch, the coordinator waits for the report
            self._beat_soon()
        if self._run.machine.phase == "closing" and self._run.machine.round_number == self.round:
            self._close()

    # Other members ------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        other, engine, run = self._run.member(send.peer), self.engine, self._run
        offer = TensorOffer(send.kind, self.peer, send.micro_batch, send.stage, send.attempt, send.number)
        way_s = run.one_way_s(self, other)

        def arrive() -> None:
            answer = other.take_offer(offer)
            if answer is None:
                self.later(run.deadlines.request_s, failed)
            elif answer != "accepted":
                self.later(way_s, lambda: refused(answer))

        def failed() -> None:
            if engine is not None and self.engine is engine:
                self._do(engine.send_failed(send, self._clock.now_s))

        def refused(answer: Answer) -> None:
            if engine is not None and self.engine is engine:
                self._do(engine.refused(send, answer, self._clock.now_s))

        self.later(way_s, arrive)

    def take_offer(self, offer: TensorOffer) -> Answer | None:
        """Answer another member's offer; None if there is nobody to answer."""
        if not self.joined:
            return None
        if self.engine is None:
            return "busy"
        effects = self.engine.offered(offer, self._clock.now_s)
        reply = effects[0]
        assert isinstance(reply, Reply)
        self._do(effects[1:])
        return reply.answer

    def _note(self, note: PeerNote) -> None:
        other = self._run.member(note.peer)
        arriving = PeerNote(note.kind, self.peer, note.micro_batch, note.stage, note.attempt)
        self.later(self._run.one_way_s(self, other), lambda: other.take_note(arriving))

    def take_note(self, note: PeerNote) -> None:
        """Take another member's note."""
        if self.engine is not None and self.joined:
            self._do(self.engine.noted(note, self._clock.now_s))

    def gives(self, fetch: Fetch) -> bool:
        """Whether it has the tensor that another member fetches."""
        return fetch.kind in self._kept.get(fetch.number, ())

    def _fetch(self, fetch: Fetch) -> None:
        """Fetch a tensor: the request goes there, the bytes come when both links have served those before them."""
        run, engine, source = self._run, self.engine, self._run.member(fetch.peer)
        life, way_s = source.life, run.one_way_s(self, source)
        assert engine is not None

        def serve() -> None:
            if source.life != life:
                self.later(run.deadlines.request_s, failed)
            elif not source.gives(fetch):
                self.later(way_s, failed)
            else:
                ends_s = run.transfer_end_s(source, self, run.tensor_bytes(fetch))
                self.later(ends_s + way_s - self._clock.now_s, arrived)

        def arrived() -> None:
            if source.life != life:  # it died meanwhile
                self.later(run.deadlines.request_s, failed)
                return
            run.moved_tensor(source, self, fetch)
            if self.engine is engine:
                self._do(engine.tensor_arrived(fetch, self._clock.now_s))

        def failed() -> None:
            if self.engine is engine:
                self._do(engine.fetch_failed(fetch, self._clock.now_s))

        self.later(way_s, serve)

    # The coordinator ----------------------------------------------------------------------------------------

    def _claim(self, claim: Claim) -> None:
        engine, wanted = self.engine, [(claim.micro_batch.start, claim.micro_batch.stop)]
        assert engine is not None
        message = PeerToCoordinatorClaim(round=claim.micro_batch.round, ranges=to_wire(wanted))

        def ask() -> None:
            granted = self._run.claim(self, claim.stage, message)
            self.later(self.machine.latency_s, lambda: answered(granted))

        def answered(granted: Ranges) -> None:
            if self.engine is engine:
                self._do(engine.claim_answered(claim, overlap(wanted, merge(granted)), self._clock.now_s))

        self.later(self.machine.latency_s, ask)

    def _release(self, release: Release) -> None:
        message = PeerToCoordinatorRelease(round=release.round, ranges=to_wire(merge(release.ranges)))
        self.later(self.machine.latency_s, lambda: self._run.release(self, release.stage, message))

    def _drive(self, ask: AskToDrive) -> None:
        """Ask for samples to drive, with those that are under way; the engine gets only the new ones."""
        engine = self.engine
        assert engine is not None
        if ask.round != self._driven_round:
            self._driven_round, self._driven = ask.round, []
        under_way = subtract(self._driven, merge(ask.done))
        samples = ask.samples + count(under_way)
        message = PeerToCoordinatorDrive(round=ask.round, samples=samples, done=to_wire(merge(ask.done)))

        def send() -> None:
            self._run.drive(self, message, lambda ranges: self.later(self.machine.latency_s, lambda: take(ranges)))

        def take(ranges: Sequence[tuple[int, int]]) -> None:
            if self.engine is not engine:
                return
            if ask.round == self._driven_round:
                self._driven = merge(ranges)
            self._do(engine.driving_granted(ask, subtract(merge(ranges), under_way), self._clock.now_s))

        self.later(self.machine.latency_s, send)


def _span(place: AssignedSpan | None) -> tuple[int, int] | None:
    return None if place is None else (place.first, place.last)
