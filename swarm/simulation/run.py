"""A simulated run: the real coordinator on a virtual clock, between light members, and what comes of it.

The coordinator is ``PlainRun`` as it decides in a host: admission, leases, credit, plans, verdicts. Its journal takes
no time, and its messages take the time of the links and of its processor (``costs.py``). Members are ``LightMember``s,
exchanges those of ``links.py``. Same run file, trace and seed: same result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.swarm.averaging.norm_claims import pack, ranges
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import NotAdmitted, TryLater, UserError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address, DeviceInfo, Message, TensorSpec
from shoal.swarm.protocol.wire import Envelope, encode
from shoal.swarm.sample_ranges import Ranges, count
from shoal.swarm.simulation.costs import APPLY_S_PER_ELEMENT, PACK_S_PER_ELEMENT, push_s
from shoal.swarm.simulation.event_queue import EventQueue
from shoal.swarm.simulation.exchange import AuditTraffic, ExchangeCourse
from shoal.swarm.simulation.links import PackedSizes, acknowledgements, on_links
from shoal.swarm.simulation.member import LightMember, News
from shoal.swarm.simulation.pipeline import SimulatedPipeline
from shoal.swarm.simulation.process import Attendance
from shoal.swarm.simulation.result import Model, Result, SimulatedRound
from shoal.swarm.simulation.told_views import NO_LIMIT_BYTES, ToldViews, encoded_bytes
from shoal.swarm.simulation.traces import Trace

_TICK_S = 0.1
_TOLD_SHARE = 10
"""As of ``service.py``."""

_FEW, _MANY = 200, 2000
"""Members up to which the coordinator looks at the clock as often as a real one does, and from which on heartbeats and
leases are simulated in threes."""

_GONE_S = 0.5
"""Time after which others notice that a process has ended whose machine still runs."""


class SimulatedRun:
    """One simulation; ``simulate`` runs it."""

    def __init__(self, run: RunFile, model: Model, trace: Trace, members: int, seed: int) -> None:
        # Members need no invite here: who may join is no question of time.
        self.run = run.model_copy(update={"access": run.access.model_copy(update={"admission": "open"})})
        self.clock = EventQueue()
        self.attendance = Attendance(self.clock)
        self.result = Result(members=members)
        self.elements, self.tokens_per_sample = model.elements, model.tokens_per_sample
        self.deadlines = Deadlines(run.round.patience_s)
        self.sizes = PackedSizes.of(run.format_map(()), model.elements, 2)
        self.result_bytes = self.sizes.result * model.elements
        self.state_bytes = 4.0 * model.elements * (1 + run.outer.slots)
        self.pack_s = PACK_S_PER_ELEMENT * model.elements
        self.apply_s = APPLY_S_PER_ELEMENT * model.elements
        self.norms = pack([1.0] * len(ranges(model.elements)))
        self.relays = (Address(kind="relayed", host="192.0.2.2", control_port=7072, relay_key=bytes(32)),)
        host = Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"host %d" % seed).digest()))
        self.machine = PlainRun(self.run, host.sign, 0.0, 1)
        self.scope: RoundScope = self.machine.scope
        self.scope.membership.places = max(self.scope.membership.places, members)
        self.beats_at_once = 1.0 if members <= _MANY else 3.0
        self.beat_s = self.beats_at_once * self.deadlines.heartbeat_s
        self.lease_s = self.beats_at_once * self.deadlines.lease_s
        self._tick_s = _TICK_S if members <= _FEW else 5 * _TICK_S if members <= _MANY else 10 * _TICK_S
        self._trace = trace
        machines = trace.machines(members, seed)
        self.members = [LightMember(self, number, one, seed) for number, one in enumerate(machines)]
        self._by_peer = {one.peer: one for one in self.members}
        self._digests: dict[int, bytes] = {}
        self._told: tuple[int, str] = self.scope.urgent_state[:2]
        self._news: tuple[tuple[int, str, float], News] | None = None
        self._exchange: ExchangeCourse | None = None
        self._planned_s = 0.0
        self._joined: set[str] = set()
        self.views = ToldViews(self.scope)
        self._announced = -1
        self._push_free_s = 0.0
        self._audits = AuditTraffic(run.audit.share, seed)
        self._fetching = 0
        self._closes_s = 0.0
        self._say: Callable[[str], None] = lambda words: None

    # The loop -----------------------------------------------------------------------------------------------

    def simulate(self, until_s: float, rounds: int | None, say: Callable[[str], None] | None = None) -> Result:
        """Run until the run's end, the moment ``until_s``, or so many verdicts."""
        for member in self.members:
            member.begin()
        self.clock.after(self._tick_s, self._tick)
        self._say = say or self._say
        self.clock.run(lambda: self._is_over(rounds), until_s)
        for member in self.members:
            member.end()
        return self._finish()

    def _is_over(self, rounds: int | None) -> bool:
        return self.scope.has_ended or (rounds is not None and len(self.result.rounds) >= rounds)

    def _tick(self) -> None:
        self.machine.tick(self.clock.now_s)
        self._settle()
        self.clock.after(self._tick_s, self._tick)

    def _settle(self) -> None:
        """Tell the members what the coordinator has just decided."""
        self.scope.log.take()
        now = self.scope.urgent_state[:2]
        if now == self._told:
            self._push_changes()
            return
        before, self._told = self._told, now
        scope = self.scope
        if now[0] != before[0]:
            self._note_verdict()
        if now[1] == "closing":
            self._closes_s = scope.round.closes_s
        elif now[1] == "averaging":
            self._begin_exchange()
        self._announce()

    def _announce(self) -> None:
        """Push a view to each member, one after the other."""
        news, begins_s = self.news(), self.clock.now_s
        for member, at_s, size in self._push():
            delay_s = at_s - begins_s + member.machine.latency_s + 8 * size / member.machine.down_bps
            self.clock.after(delay_s, _Delivery(member, member.hear, news))

    def _push_changes(self) -> None:
        """Push what is not urgent, such as who has come, as often as takes a small part of the time."""
        if self.scope.log.announcements != self._announced and self.clock.now_s >= self._push_free_s:
            for _ in self._push():
                pass

    def _push(self) -> Iterator[tuple[LightMember, float, int]]:
        """Send all members a view, one after the other; yields each with the moment and the bytes."""
        at_s = begins_s = self.clock.now_s
        self._announced = self.scope.log.announcements
        for peer in list(self.scope.membership.live):
            size = self.views.tell(peer, begins_s, is_answer=False)
            self.result.host.push(1, size)
            self.result.largest_view_bytes = max(self.result.largest_view_bytes, size)
            at_s += push_s(size, self._trace.host_bps)
            yield self._by_peer[peer], at_s, size
        took_s = at_s - begins_s
        self._push_free_s = begins_s + min(_TOLD_SHARE * took_s, max(took_s, self.deadlines.heartbeat_s))

    def news(self) -> News:
        """Return what a view tells now."""
        one = self.scope.round
        key = (one.number, one.phase, one.closes_s)
        if self._news is None or self._news[0] != key:
            planned = {member.peer: index for index, member in enumerate(one.plan.members)} if one.plan else {}
            verdict = self.scope.verdict
            committed = verdict is not None and verdict.committed and verdict.round == one.number - 1
            version = self.scope.anchor_version
            chain = verdict.chain if verdict is not None else None
            digest = self.scope.plan_statement(one.plan).plan if one.plan is not None else None
            moment = one.number, one.phase, one.closes_s
            self._news = key, News(*moment, version, one.plan, planned, committed, chain, digest)
        return self._news[1]

    def digest(self, version: int) -> bytes:
        """Return the digest of the state that all honest members hold at this version."""
        if version not in self._digests:
            self._digests[version] = hashlib.sha256(b"state %d" % version).digest()
        return self._digests[version]

    # Rounds -------------------------------------------------------------------------------------------------

    def _begin_exchange(self) -> None:
        plan = self.scope.round.plan
        assert plan is not None
        machines = [self._by_peer[one.peer].machine for one in plan.members]
        now_s = self._planned_s = self.clock.now_s
        # The exchange begins for everybody when the last member has the plan.
        version, chain = self.scope.membership.roster_version, self.scope.verdict.chain if self.scope.verdict else None
        plan_bytes = encoded_bytes(self.scope.view(plan.members[0].peer, now_s, version, chain))
        last_s = push_s(plan_bytes, self._trace.host_bps) * len(self.scope.membership.live)
        slowest_s = max(one.latency_s + 8 * plan_bytes / one.down_bps for one in machines)
        self._exchange = ExchangeCourse(
            plan,
            machines,
            self.run.format_map(()),
            self.deadlines,
            self._trace.relay_bps,
            now_s=now_s,
            begins_s=now_s + last_s + slowest_s,
        )

    @property
    def exchange(self) -> ExchangeCourse:
        """The newest exchange, which is or was."""
        assert self._exchange is not None
        return self._exchange

    def died_in_exchange(self, member: LightMember) -> None:
        """A member is gone in the midst of an exchange, which counts as if it had died at its end."""
        index = self.news().planned.get(member.peer)
        if self.scope.round.plan is not None and index is not None and self.exchange.died(index, self.clock.now_s):
            member.count_traffic(index)

    def _note_verdict(self) -> None:
        verdict = self.scope.verdict
        if verdict is None:
            return
        plan, exchange = verdict.plan, self._exchange
        before = self.result.rounds[-1].ended_s if self.result.rounds else 0.0
        one = SimulatedRound(
            number=verdict.round,
            committed=verdict.committed,
            opened_s=before,
            closes_s=self._closes_s,
            planned_s=self._planned_s if plan is not None else self.clock.now_s,
            ended_s=self.clock.now_s,
            members=len(plan.members) if plan is not None else 0,
            rows=exchange.rows if plan is not None and exchange is not None else 0,
            tokens=verdict.tokens,
            tokens_total=verdict.tokens_total,
            exchange_s=exchange.took_s if exchange is not None and plan is not None else 0.0,
            members_sent_bytes=self._members_sent_bytes(),
            host_sent_bytes=self.result.host.sent_bytes,
        )
        self.result.rounds.append(one)
        if verdict.committed and plan is not None and exchange is not None:
            self.result.relayed_bytes += exchange.relayed_bytes
            for auditor, maker, size in self._audits.of(exchange):
                self._by_peer[maker].up_bytes += size
                self._by_peer[auditor].down_bytes += size
        self._say(f"round {one.number}: {one.members} members, {one.tokens:,} tokens, {one.ended_s - before:.1f} s")

    def _members_sent_bytes(self) -> float:
        host = self.result.host
        sent = self.result.served_bytes + sum(one.up_bytes for one in self.members)
        received = sum(one.down_bytes for one in self.members)
        return on_links(sent, received) + host.received_bytes + acknowledgements(host.messages["push"])

    # Requests -----------------------------------------------------------------------------------------------

    def join(self, member: LightMember) -> bool:
        """Let a machine join; False if the run has no place for it now."""
        now_s, scope, machine = self.clock.now_s, self.scope, member.machine
        entry = member.entry
        try:
            with scope.admission.joining(entry.certificate, "trainer", machine.network, now_s):
                device = DeviceInfo(kind="cuda", name=machine.device[:100], memory_bytes=0)
                scope.admission.join(entry, device, now_s, machine.network)
        except (TryLater, NotAdmitted):
            self.result.refused_joins += 1
            self.result.host.count("join", lambda: 600, 300.0)
            return False
        self._joined.add(member.peer)
        if scope.model is None:
            layout = (TensorSpec(name="model", shape=(self.elements,)),)
            model = PeerToCoordinatorDescribeModel(
                layout=layout, corpus_digest=bytes(32), tokens_per_sample=self.tokens_per_sample
            )
            scope.describe_model(member.peer, model)

        def size() -> int:
            device = DeviceInfo(kind="cuda", name=machine.device[:100], memory_bytes=0)
            return self._size(
                PeerToCoordinatorJoinRun(
                    run=self.run.run.name,
                    certificate=entry.certificate,
                    name=entry.name,
                    role="trainer",
                    device=device,
                    addresses=entry.addresses,
                    token=b"",
                )
            )

        self.views.joined(member.peer)
        self.result.host.count("join", size, self.views.tell(member.peer, now_s, is_answer=False))
        self._settle()
        return True

    def leave(self, member: LightMember) -> None:
        self.scope.admission.leave(member.peer, "left", self.clock.now_s)
        self.result.host.count("leave", lambda: 100, 100.0)
        self.machine.tick(self.clock.now_s)
        self._settle()

    def _is_here(self, member: LightMember) -> bool:
        return member.peer in self.scope.membership.live

    def heartbeat(self, member: LightMember, times: float) -> News | None:
        """Take a heartbeat; None if the member was removed."""
        if not self._is_here(member):
            return None
        beat = member.heartbeat()
        self.scope.heartbeat(member.peer, beat, self.clock.now_s)
        self.views.heard(member.peer, *member.named)
        self.result.host.count("heartbeat", lambda: self._size(beat), self._answer_bytes(member), times)
        self._settle()
        return self.news()

    def lease(self, member: LightMember, ask: PeerToCoordinatorRequestLease) -> Ranges:
        if not self._is_here(member):
            return []
        granted = self.scope.leasing.request(member.peer, ask, self.clock.now_s)
        self.result.host.count("lease", lambda: self._size(ask), 120.0, self.beats_at_once)
        self.scope.log.take()
        self.result.samples.leased += count(granted)
        return granted

    def ready(self, member: LightMember, ready: PeerToCoordinatorRoundReady) -> News:
        """Take a contribution. Raises ``LinkError`` for one that is not wanted."""
        if not self._is_here(member):
            raise NotAdmitted("not a member any more")
        self.scope.ready(member.peer, ready, self.clock.now_s)
        self.result.host.count("ready", lambda: self._size(ready), self._answer_bytes(member))
        if self.scope.is_complete():
            self.machine.tick(self.clock.now_s)
        self._settle()
        return self.news()

    def report(self, member: LightMember, report: PeerToCoordinatorRoundReport) -> News:
        if self._is_here(member):
            self.scope.report(member.peer, report, self.clock.now_s)
            self.views.heard(member.peer, *member.named)
            self.result.host.count("report", lambda: self._size(report), self._answer_bytes(member))
            if self.scope.is_complete():
                self.machine.tick(self.clock.now_s)
            self._settle()
        return self.news()

    def _answer_bytes(self, member: LightMember) -> float:
        """Return the size of the view in answer to a request."""
        return self.views.tell(member.peer, self.clock.now_s, is_answer=True)

    def _size(self, message: Message) -> int:
        return len(encode(Envelope("request", 1, message, run=self.run.run.name), NO_LIMIT_BYTES))

    # States -------------------------------------------------------------------------------------------------

    def is_without_state(self) -> bool:
        """Whether nobody holds the newest state."""
        return not self.scope.synced()

    def fetch_s(self, member: LightMember, size: float) -> float:
        """Return the seconds of a download from all that hold the state: their uplinks serve it beside rounds."""
        donors = self.scope.synced()
        spare_bps = sum(self._by_peer[peer].machine.up_bps for peer in donors) / max(1, self._fetching + 1)
        seconds = 8 * size / min(member.machine.down_bps, max(spare_bps, 1.0))
        self._fetching += 1
        self.clock.after(seconds, self._fetched)
        return seconds

    def _fetched(self) -> None:
        self._fetching -= 1

    def served(self, size: float) -> None:
        """Count bytes that donors send to one member."""
        self.result.served_bytes += size

    # Sums ---------------------------------------------------------------------------------------------------

    def _finish(self) -> Result:
        result, scope = self.result, self.scope
        result.duration_s = self.clock.now_s
        result.take_attendance(self.attendance)
        result.tokens = scope.tokens_committed
        result.never_admitted = sum(one.there_s > 0 and one.peer not in self._joined for one in self.members)
        for member in self.members:
            result.member_sent_bytes += member.up_bytes
            result.member_received_bytes += member.down_bytes
            for phase, seconds in member.spent_s.items():
                result.spent_s[phase] += seconds
        result.member_sent_bytes += result.served_bytes
        result.members_sent_bytes = self._members_sent_bytes()
        samples = result.samples
        samples.held = scope.leases.outstanding()
        samples.returned = count(scope.leases.pool)
        samples.fresh = scope.leases.fresh
        samples.committed = scope.tokens_committed // self.tokens_per_sample
        samples.lost = count(scope.retrained.lost)
        result.ended = scope.has_ended
        result.calls = self.clock.calls
        return result


class _Delivery:
    """A view under way to a process, which may have ended by then."""

    __slots__ = ("_call", "_life", "_member", "_news")

    def __init__(self, member: LightMember, call: Callable[[News], None], news: News) -> None:
        self._member, self._life, self._call, self._news = member, member.life, call, news

    def __call__(self) -> None:
        if self._member.life == self._life:
            self._call(self._news)


def simulate(
    run: RunFile,
    model: Model,
    trace: Trace,
    members: int,
    seed: int,
    until_s: float,
    rounds: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Simulate a run of so many machines of the trace until its end, ``until_s``, or so many verdicts.

    ``say`` gets a line for each verdict. Raises ``UserError`` for a run of another kind."""
    if run.collective is not None:
        raise UserError("[collective]: rounds of collectives are made by their callers, and are not simulated")
    if run.pipeline is not None:
        return SimulatedPipeline(run, model, trace, members, seed).simulate(until_s, rounds, say)
    return SimulatedRun(run, model, trace, members, seed).simulate(until_s, rounds, say)


def horizon_s(run: RunFile, limit_s: float | None) -> float:
    """Return the latest moment of a simulation: its limit, or that of the run file."""
    return min(limit_s or math.inf, run.run.max_s or math.inf)
