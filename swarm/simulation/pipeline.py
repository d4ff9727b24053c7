"""A simulated run in stages: the real coordinator, planner, stage engines and routers on a virtual clock.

``PipelineRun`` decides as in a host, and its planner places stages on what the members report: memory, speed and link
of their machines. Members are ``StageMember``s. What they compute takes the time of their layers, what they send that
of both links (``links.Transfers``); rounds are exchanges among each stage's replicas. The planner itself takes no time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.swarm.averaging.norm_claims import pack, ranges
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.placement import planner_of
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import NotAdmitted, TryLater, UserError
from shoal.swarm.pipeline.engine.effects import Fetch
from shoal.swarm.pipeline.planner.model import Infeasible
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerView,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorShowCapability,
)
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address, AssignedSpan, DeviceInfo, LayerSize, Message, TensorSpec
from shoal.swarm.protocol.wire import Envelope, encode
from shoal.swarm.sample_ranges import Ranges
from shoal.swarm.simulation.costs import push_s
from shoal.swarm.simulation.event_queue import EventQueue
from shoal.swarm.simulation.exchange import ExchangeCourse, sizes_and_traffic
from shoal.swarm.simulation.links import PackedSizes, Transfers, on_links
from shoal.swarm.simulation.process import Attendance
from shoal.swarm.simulation.result import Model, PipelineCourse, Result, SimulatedRound
from shoal.swarm.simulation.stage_member import StageMember
from shoal.swarm.simulation.traces import Trace

_TICK_S, _MANY_TICK_S, _FEW = 0.1, 0.5, 64
_NO_LIMIT_BYTES = 2**50


@dataclass
class _Exchanges:
    """Exchanges of a round: by stage its course, and the member's index in its plan by peer."""

    courses: dict[int, ExchangeCourse]
    indices: dict[int, dict[str, int]]


class SimulatedPipeline:
    """One simulation; ``simulate`` runs it."""

    def __init__(self, run: RunFile, model: Model, trace: Trace, members: int, seed: int) -> None:
        """Raises ``UserError`` for a model whose layers are not known."""
        assert run.pipeline is not None
        if not model.layers:
            raise UserError(
                "a run with [pipeline] is simulated with the model's layers: say their number with --layers"
            )
        # Members need no invite here; in an open run the planner asks for two replicas of each stage, which stays so.
        self.planner = planner_of(run)
        self.run = run.model_copy(update={"access": run.access.model_copy(update={"admission": "open"})})
        self.clock = EventQueue()
        self.attendance = Attendance(self.clock)
        self.deadlines = Deadlines(run.round.patience_s)
        self.result = Result(members=members, pipeline=PipelineCourse())
        self.elements, self.tokens_per_sample = model.elements, model.tokens_per_sample
        self.micro_batch, self.in_flight = run.pipeline.micro_batch, run.pipeline.in_flight
        form = run.pipeline.activation_format
        self._shapes = model.layers
        self.layers = tuple(
            LayerSize(
                parameters_bytes=4 * one.elements,
                activation_bytes=form.packed_bytes(self.micro_batch * one.output_values),
                kept_bytes=self.micro_batch * one.kept_bytes,
            )
            for one in model.layers
        )
        self.relays = (Address(kind="relayed", host="192.0.2.2", control_port=7072, relay_key=bytes(32)),)
        host = Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"host %d" % seed).digest()))
        self.machine = PipelineRun(self.run, host.sign, 0.0, 1)
        self.machine.membership.places = max(self.machine.membership.places, members)
        self._tick_s = _TICK_S if members <= _FEW else _MANY_TICK_S
        self.retry_s = max(min(0.25, self.deadlines.heartbeat_s / 4), self._tick_s)
        self._trace = trace
        self._transfers = Transfers(trace.relay_bps)
        machines = trace.machines(members, seed)
        self.members = [StageMember(self, number, one, seed) for number, one in enumerate(machines)]
        self._by_peer = {one.peer: one for one in self.members}
        self._digests: dict[tuple[int, int], bytes] = {}
        self._told = self.machine.urgent_state
        self._exchanges: _Exchanges | None = None
        self._spans: tuple[int, dict[str, AssignedSpan]] = -1, {}
        self._holders: dict[int, dict[str, float | None]] = {}
        self._processes: tuple[int, dict[str, int]] = -1, {}
        self._waiting_drivers: list[Callable[[], None]] = []
        self._is_settling = self._settles_again = False
        self._fetching = 0
        self._joined: set[str] = set()
        self._planned_s = self._closes_s = 0.0
        self._view_bytes, self._spans_bytes, self._plan_bytes = 600.0, 0.0, 0.0
        self._stalled_from_s: float | None = None
        self._samples_by_round: dict[str, int] = {}
        self._say: Callable[[str], None] = lambda words: None

    @property
    def course(self) -> PipelineCourse:
        assert self.result.pipeline is not None
        return self.result.pipeline

    # The loop -----------------------------------------------------------------------------------------------

    def simulate(self, until_s: float, rounds: int | None, say: Callable[[str], None] | None = None) -> Result:
        """Run until the run's end, the moment ``until_s``, or so many verdicts."""
        for member in self.members:
            member.begin()
        self._say = say or self._say
        self.clock.after(self._tick_s, self._tick)
        self.clock.after(self.retry_s, self._tick_engines)
        self.clock.run(lambda: self._is_over(rounds), until_s)
        for member in self.members:
            member.end()
        return self._finish()

    def _is_over(self, rounds: int | None) -> bool:
        return self.machine.has_ended or (rounds is not None and len(self.result.rounds) >= rounds)

    def _tick(self) -> None:
        self.machine.tick(self.clock.now_s)
        self.settle()
        self.clock.after(self._tick_s, self._tick)

    def _tick_engines(self) -> None:
        for member in self.members:
            member.tick()
        self.clock.after(self.retry_s, self._tick_engines)

    def settle(self) -> None:
        """Ask the planner what there is to ask, and tell the members what was decided."""
        machine, now_s = self.machine, self.clock.now_s
        machine.log.take()
        while (asked := machine.plan_request(now_s)) is not None:
            plan = asked.plan(self.planner)
            if isinstance(plan, Infeasible):
                self.course.shortage = plan.reason
            elif asked.previous is not None:
                held = asked.previous.spans
                self.course.moves += sum(plan.spans.get(peer, span) != span for peer, span in held.items())
            machine.take_plan(asked, plan, now_s)
            machine.log.take()
        self._note_stall()
        if machine.is_assembled() and self._waiting_drivers:
            waiting, self._waiting_drivers = self._waiting_drivers, []
            for ask in waiting:
                ask()
        before, now = self._told, machine.urgent_state
        if now == before:
            return
        self._told = now
        if now[0] != before[0]:
            self._note_verdict()
        if now[1] == "closing":
            self._closes_s = now_s
        elif now[1] == "averaging" and before[1] != "averaging":
            self._begin_exchanges()
        self._announce(with_spans=now[2] != before[2])

    def _announce(self, *, with_spans: bool) -> None:
        """Push a view of the run and of each stage to the members that have to do with it, one after the other."""
        live = list(self.machine.membership.live)
        if with_spans:
            self._spans_bytes = float(self._encoded(self.machine.view(live[0], self.clock.now_s))) if live else 0.0
        at_s = self.clock.now_s
        for peer in live:
            member = self._by_peer[peer]
            views = 1 + len(self._stages_of(peer))
            size = self._view_bytes * views + (self._spans_bytes if with_spans else 0.0)
            size += self._plan_bytes * (views - 1) if self._told[1] == "averaging" else 0.0
            self.result.host.push(views, size / views)
            at_s += push_s(size, self._trace.host_bps)
            moment_s = at_s + member.machine.latency_s + 8 * size / member.machine.down_bps
            self.clock.at(moment_s, _Look(member))

    def _encoded(self, view: RunView) -> int:
        message = CoordinatorToPeerView(view=view)
        return len(encode(Envelope("notice", 0, message), _NO_LIMIT_BYTES))

    def _note_stall(self) -> None:
        """Count the time in which some stage has nobody with its state."""
        now_s = self.clock.now_s
        stands = bool(self.machine.boundaries) and not all(scope.working() for scope in self.machine.scopes)
        if stands and self._stalled_from_s is None:
            self._stalled_from_s = now_s
        elif not stands and self._stalled_from_s is not None:
            self.course.stalled_s += now_s - self._stalled_from_s
            self._stalled_from_s = None

    # What members see ---------------------------------------------------------------------------------------

    def _placed(self) -> dict[str, AssignedSpan]:
        if self._spans[0] != self.machine.version:
            view = self.machine.pipeline_view()
            self._spans = self.machine.version, {one.peer: one for one in view.spans} if view is not None else {}
            self._holders = {}
        return self._spans[1]

    def place_of(self, peer: str) -> AssignedSpan | None:
        """Return the span that the plan assigns to a member."""
        return self._placed().get(peer)

    def holders(self, stage: int) -> dict[str, float | None]:
        """Return the members that the plan assigns a stage to, with their planned micro-batches a second."""
        placed = self._placed()
        if stage not in self._holders:
            self._holders[stage] = {
                one.peer: one.rate or None for one in placed.values() if one.first <= stage <= one.last
            }
        return dict(self._holders[stage])

    def processes(self) -> dict[str, int]:
        """Return the processes on the roster; the same object until that changes."""
        version = self.machine.membership.roster_version
        if self._processes[0] != version:
            lives = {peer: self._by_peer[peer].life for peer in self.machine.membership.live}
            self._processes = version, lives
        return self._processes[1]

    def member(self, peer: str) -> StageMember:
        return self._by_peer[peer]

    def _stages_of(self, peer: str) -> range:
        place = self.place_of(peer)
        return range(0) if place is None else range(place.first, place.last + 1)

    def digest(self, stage: int, version: int) -> bytes:
        """Return the digest of a stage's state; a version that is made again after a return is another state."""
        if (stage, version) not in self._digests:
            undone = self.machine.scopes[stage].rounds_undone
            self._digests[stage, version] = hashlib.sha256(b"state %d %d %d" % (stage, version, undone)).digest()
        return self._digests[stage, version]

    # Sizes and times ----------------------------------------------------------------------------------------

    def layer_s(self, speed_tps: float) -> tuple[float, ...]:
        """Return the seconds of each layer for a micro-batch, on a machine that trains the whole model so fast."""
        seconds = self.micro_batch * self.tokens_per_sample / speed_tps
        return tuple(seconds * one.elements / self.elements for one in self._shapes)

    def layers_of(self, first: int, last: int) -> slice:
        """Return the layers of stages, the last one included."""
        return slice(self.machine.boundaries[first], self.machine.boundaries[last + 1])

    def elements_of(self, stages: Iterable[int]) -> int:
        return sum(self.machine.parameters_bytes(stage) // 4 for stage in stages)

    def state_bytes(self, stage: int) -> float:
        return float(self.machine.parameters_bytes(stage)) * (1 + self.run.outer.slots)

    def result_bytes(self, stage: int) -> float:
        elements = self.elements_of([stage])
        return PackedSizes.of(self.run.format_map(()), elements, 2).result * elements

    def norms(self, stage: int) -> bytes:
        return pack([1.0] * len(ranges(self.elements_of([stage]))))

    def one_way_s(self, one: StageMember, other: StageMember) -> float:
        return (one.machine.latency_s + other.machine.latency_s) / 2

    def tensor_bytes(self, fetch: Fetch) -> float:
        """Return the size of an activation or gradient, of a last micro-batch in proportion."""
        boundary = fetch.stage + (fetch.kind == "gradient")
        whole = self.layers[self.machine.boundaries[boundary] - 1].activation_bytes
        return whole * fetch.micro_batch.samples / self.micro_batch

    def transfer_end_s(self, source: StageMember, target: StageMember, size: float) -> float:
        """Return when a transfer that begins now ends."""
        sender, receiver = (source.peer, source.machine.up_bps), (target.peer, target.machine.down_bps)
        relayed = not (source.machine.reachable or target.machine.reachable)
        return self._transfers.end_s(self.clock.now_s, sender, receiver, size, relayed=relayed)

    def moved_tensor(self, source: StageMember, target: StageMember, fetch: Fetch) -> None:
        """Count a tensor that has arrived."""
        size, boundary = self.tensor_bytes(fetch), fetch.stage + (fetch.kind == "gradient")
        source.up_bytes += size
        target.down_bytes += size
        if not (source.machine.reachable or target.machine.reachable):
            source.relayed_bytes += size
            self.result.relayed_bytes += size
        sums = self.course.activation_bytes if fetch.kind == "activation" else self.course.gradient_bytes
        sums[boundary] = sums.get(boundary, 0.0) + size

    def fetch_s(self, member: StageMember, donors: Collection[str], size: float) -> float:
        """Return the seconds of a download from all that have it: their uplinks serve it beside micro-batches."""
        spare_bps = sum(self._by_peer[peer].machine.up_bps for peer in donors) / (self._fetching + 1)
        seconds = 8 * size / min(member.machine.down_bps, max(spare_bps, 1.0))
        member.down_bytes += size
        self.result.served_bytes += size
        self.course.state_bytes += size
        self._fetching += 1
        self.clock.after(seconds, self._fetched)
        return seconds

    def _fetched(self) -> None:
        self._fetching -= 1

    # Rounds -------------------------------------------------------------------------------------------------

    def _begin_exchanges(self) -> None:
        """Begin the exchanges of all stages at once: who holds several shares its link among them."""
        now_s, formats = self.clock.now_s, self.run.format_map(())
        plans = {stage: plan for stage, scope in enumerate(self.machine.scopes) if (plan := scope.round.plan)}
        sent: defaultdict[str, float] = defaultdict(float)
        mine: dict[tuple[int, str], float] = {}
        for stage, plan in plans.items():
            machines = [self._by_peer[one.peer].machine for one in plan.members]
            _, traffic = sizes_and_traffic(plan, machines, formats)
            for one, moved in zip(plan.members, traffic, strict=True):
                mine[stage, one.peer] = moved.sent + moved.received
                sent[one.peer] += moved.sent + moved.received
        some, plan = next(iter(plans.items()))
        view = self.machine.scopes[some].view(plan.members[0].peer, now_s, 0, None)
        bare = view.model_copy(update={"plan": None, "roster": None, "roster_delta": None, "verdict": None})
        only = view.model_copy(update={"roster": None, "roster_delta": None, "verdict": None})
        self._view_bytes = float(self._encoded(bare))
        self._plan_bytes = float(self._encoded(only)) - self._view_bytes
        self.result.largest_view_bytes = max(self.result.largest_view_bytes, self._encoded(view))
        pushed_s = len(sent) * push_s(self._view_bytes + self._plan_bytes, self._trace.host_bps)
        courses = {}
        for stage, plan in plans.items():
            machines = [self._by_peer[one.peer].machine for one in plan.members]
            shares = [mine[stage, one.peer] / (sent[one.peer] or 1.0) or 1.0 for one in plan.members]
            courses[stage] = ExchangeCourse(
                plan,
                machines,
                formats,
                self.deadlines,
                self._trace.relay_bps,
                now_s=now_s,
                begins_s=now_s + pushed_s + max(one.latency_s for one in machines),
                shares=shares,
            )
        self._planned_s = now_s
        indices = {stage: {one.peer: at for at, one in enumerate(plan.members)} for stage, plan in plans.items()}
        self._exchanges = _Exchanges(courses, indices)

    def exchanges_of(self, member: StageMember, stages: Iterable[int]) -> dict[int, tuple[ExchangeCourse, int]]:
        """Return the exchanges that a member takes part in, by stage, each with its index."""
        made = self._exchanges
        if made is None:
            return {}
        placed = {stage: made.indices[stage].get(member.peer) for stage in stages if stage in made.courses}
        return {stage: (made.courses[stage], index) for stage, index in placed.items() if index is not None}

    def was_planned(self, member: StageMember, stage: int) -> bool:
        """Whether a member was in a stage's last exchange."""
        return bool(self.exchanges_of(member, [stage]))

    def last_planned(self, stage: int) -> Collection[str]:
        return self._exchanges.indices.get(stage, {}) if self._exchanges is not None else ()

    def died_in_exchange(self, member: StageMember) -> None:
        """A member is gone in the midst of exchanges."""
        for course, index in self.exchanges_of(member, range(len(self.machine.scopes))).values():
            if course.died(index, self.clock.now_s):
                member.count_traffic(course.moved(index))

    def _note_verdict(self) -> None:
        verdict = self.machine.scopes[0].verdict
        if verdict is None:
            return
        courses = list(self._exchanges.courses.values()) if self._exchanges is not None and verdict.plan else []
        peers = {one.peer for course in courses for one in course.plan.members}
        before = self.result.rounds[-1].ended_s if self.result.rounds else 0.0
        one = SimulatedRound(
            number=verdict.round,
            committed=verdict.committed,
            opened_s=before,
            closes_s=self._closes_s,
            planned_s=self._planned_s if courses else self.clock.now_s,
            ended_s=self.clock.now_s,
            members=len(peers),
            rows=max((course.rows for course in courses), default=0),
            tokens=verdict.tokens,
            tokens_total=verdict.tokens_total,
            exchange_s=max((course.took_s for course in courses), default=0.0),
            members_sent_bytes=self._members_sent_bytes(),
            host_sent_bytes=self.result.host.sent_bytes,
        )
        self.result.rounds.append(one)
        if verdict.committed:
            self.result.relayed_bytes += sum(course.relayed_bytes for course in courses)
        what = f"{one.tokens:,} tokens" if verdict.committed else verdict.reason
        self._say(f"round {one.number}: {one.members} members, {what}, {one.ended_s - before:.1f} s")

    def _members_sent_bytes(self) -> float:
        sent = self.result.served_bytes + sum(one.up_bytes for one in self.members)
        received = sum(one.down_bytes for one in self.members)
        return on_links(sent + self.result.host.received_bytes, received + self.result.host.sent_bytes)

    # Requests -----------------------------------------------------------------------------------------------

    def join(self, member: StageMember) -> bool:
        """Let a machine join the run and show what it can do; False if the run has no place for it now."""
        now_s, machine = self.clock.now_s, member.machine
        entry, device = member.entry, DeviceInfo(kind="cuda", name=machine.device[:100], memory_bytes=0)
        try:
            with self.machine.admission.joining(entry.certificate, "trainer", machine.network, now_s):
                self.machine.admission.join(entry, device, now_s, machine.network)
        except (TryLater, NotAdmitted):
            self.result.refused_joins += 1
            self.result.host.count("join", lambda: 600, 300.0)
            return False
        self._joined.add(member.peer)
        shown = PeerToCoordinatorShowCapability(capability=member.capability, layers=self.layers)
        self.machine.show_capability(member.peer, shown, now_s)
        join = PeerToCoordinatorJoinRun(
            run=self.run.run.name,
            certificate=entry.certificate,
            name=entry.name,
            role="trainer",
            device=device,
            addresses=entry.addresses,
            token=b"",
        )
        roster = 420.0 * len(self.machine.membership.live)
        self.result.host.count("join", lambda: self._size(join), self._view_bytes + roster)
        self.result.host.count("capability", lambda: self._size(shown), 100.0)
        self.settle()
        return True

    def leave(self, member: StageMember) -> None:
        self.machine.admission.leave(member.peer, "left", self.clock.now_s)
        self.result.host.count("leave", lambda: 100, 100.0)
        self.machine.tick(self.clock.now_s)
        self.settle()

    def join_stage(self, member: StageMember, stage: int) -> None:
        """Raises ``NotAdmitted`` for a stage that went to another member."""
        device = DeviceInfo(kind="cuda", name=member.machine.device[:100], memory_bytes=0)
        self.machine.join_stage(stage, member.entry, device, self.clock.now_s)
        layout = (TensorSpec(name=f"stage{stage}", shape=(self.elements_of([stage]),)),)
        model = PeerToCoordinatorDescribeModel(
            layout=layout, corpus_digest=bytes(32), tokens_per_sample=self.tokens_per_sample
        )
        self.machine.describe_stage(stage, member.peer, model)
        self.result.host.count("join", lambda: 600, self._view_bytes)

    def leave_stage(self, member: StageMember, stage: int) -> None:
        if self._is_in(member, stage):
            self.machine.scopes[stage].admission.leave(member.peer, "left", self.clock.now_s)
            self.result.host.count("leave", lambda: 100, 100.0)

    def _is_in(self, member: StageMember, stage: int) -> bool:
        return member.peer in self.machine.scopes[stage].membership.live

    def heartbeat(self, member: StageMember) -> bool:
        """Take a heartbeat to the run; False if the member was removed."""
        if member.peer not in self.machine.membership.live:
            return False
        beat = member.run_heartbeat()
        self.machine.heartbeat(member.peer, beat, self.clock.now_s)
        version = self.machine.membership.roster_version
        news, member.roster_version = 420.0 * max(0, version - max(member.roster_version, 0)), version
        self.result.host.count("heartbeat", lambda: self._size(beat), self._view_bytes + min(news, 4200.0))
        return True

    def stage_heartbeat(self, member: StageMember, stage: int) -> bool:
        """Take a heartbeat to a stage; False if the member was removed from it."""
        if not self._is_in(member, stage):
            return False
        beat = member.stage_heartbeat(stage)
        self.machine.scopes[stage].heartbeat(member.peer, beat, self.clock.now_s)
        self.result.host.count("heartbeat", lambda: self._size(beat), self._view_bytes)
        if self.machine.stages[stage].is_batch_done():
            self.machine.tick(self.clock.now_s)
        return True

    def claim(self, member: StageMember, stage: int, claim: PeerToCoordinatorClaim) -> Ranges:
        self.result.host.count("claim", lambda: self._size(claim), 120.0)
        if not self._is_in(member, stage):
            return []
        granted = self.machine.stages[stage].claim(member.peer, claim, self.clock.now_s)
        self.machine.log.take()
        return granted

    def release(self, member: StageMember, stage: int, release: PeerToCoordinatorRelease) -> None:
        self.result.host.count("claim", lambda: self._size(release), 100.0)
        if self._is_in(member, stage):
            self.machine.stages[stage].release(member.peer, release, self.clock.now_s)
            self.machine.log.take()

    def drive(self, member: StageMember, ask: PeerToCoordinatorDrive, answer: Callable[[Ranges], None]) -> None:
        """Answer a driver; one that asks early when every stage is held."""
        life = member.life

        def again() -> None:
            if member.life == life:
                answer(self._micro_batches(member, ask))

        self.result.host.count("drive", lambda: self._size(ask), 200.0)
        granted = self._micro_batches(member, ask)
        if not granted and ask.round == self.machine.round_number and not self.machine.is_assembled():
            self._waiting_drivers.append(again)
        else:
            answer(granted)

    def _micro_batches(self, member: StageMember, ask: PeerToCoordinatorDrive) -> Ranges:
        if member.peer not in self.machine.membership.live:
            return []
        granted = self.machine.drive(member.peer, ask, self.clock.now_s)
        self.machine.log.take()
        return granted

    def ready(self, member: StageMember, stage: int, ready: PeerToCoordinatorRoundReady) -> None:
        """Take a contribution. Raises ``LinkError`` for one that is not wanted."""
        if not self._is_in(member, stage):
            raise NotAdmitted("not a member of this stage any more")
        scope = self.machine.scopes[stage]
        scope.ready(member.peer, ready, self.clock.now_s)
        self.result.host.count("ready", lambda: self._size(ready), self._view_bytes)
        if scope.is_complete():
            self.machine.tick(self.clock.now_s)

    def report(self, member: StageMember, stage: int, report: PeerToCoordinatorRoundReport) -> None:
        if self._is_in(member, stage):
            scope = self.machine.scopes[stage]
            scope.report(member.peer, report, self.clock.now_s)
            self.result.host.count("report", lambda: self._size(report), self._view_bytes)
            if scope.is_complete():
                self.machine.tick(self.clock.now_s)

    def _size(self, message: Message) -> int:
        return len(encode(Envelope("request", 1, message, run=self.run.run.name), _NO_LIMIT_BYTES))

    # Sums ---------------------------------------------------------------------------------------------------

    def _finish(self) -> Result:
        result, machine, course = self.result, self.machine, self.course
        result.duration_s = self.clock.now_s
        result.take_attendance(self.attendance)
        scope = machine.scopes[0] if machine.scopes else None
        result.tokens = scope.tokens_committed if scope is not None else 0
        result.never_admitted = sum(one.there_s > 0 and one.peer not in self._joined for one in self.members)
        for member in self.members:
            result.member_sent_bytes += member.up_bytes
            result.member_received_bytes += member.down_bytes
            for phase, seconds in member.spent_s.items():
                result.spent_s[phase] += seconds
            result.spent_s["waiting"] += max(0.0, member.there_s - sum(member.spent_s.values()))
        result.member_sent_bytes += result.served_bytes
        result.members_sent_bytes = self._members_sent_bytes()
        if self._stalled_from_s is not None:
            course.stalled_s += result.duration_s - self._stalled_from_s
        course.boundaries = machine.boundaries
        if machine.boundaries:
            course.shortage = ""
            stages = range(len(machine.scopes))
            course.replicas = tuple(len(machine.holders(stage)) for stage in stages)
            rates = [sum(rate or 0.0 for rate in self.holders(stage).values()) for stage in stages]
            course.planned_tokens_per_s = min(rates) * self.micro_batch * self.tokens_per_sample
            samples, committed = result.samples, result.tokens // self.tokens_per_sample
            samples.committed = committed
            samples.held = max(one.leases.outstanding() for one in machine.scopes)
            samples.lost = max(0, round(course.computed_samples / len(stages)) - committed - samples.held)
        result.ended = machine.has_ended
        result.calls = self.clock.calls
        return result


class _Look:
    """A view under way to a process, which may have ended by then."""

    __slots__ = ("_life", "_member")

    def __init__(self, member: StageMember) -> None:
        self._member, self._life = member, member.life

    def __call__(self) -> None:
        if self._member.life == self._life:
            self._member.look()
