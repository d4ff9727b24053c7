"""Critical path of a round: for whom the others waited, in which phase, how long, and why.

Who and how long follows from what the coordinator has seen: when contributions and reports came, at what rate members'
links delivered by the word of those that received, who was silent. Only the cause of a member's lateness may be that
member's own word, and is marked so: nobody can put a delay on somebody else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high, median_low
from types import MappingProxyType

from shoal.compression.formats import FormatMap
from shoal.swarm.averaging.traffic import Traffic
from shoal.swarm.coordinator.bandwidth import delivered_bps, sending_bps, sent_bytes
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.timing import CriticalPath, MemberTimes, SlowCause
from shoal.swarm.protocol.types import MAX_RATE, PhaseTimes, WorkPhase

_LEAST_S, _LEAST_SHARE = 1.0, 0.03
"""Delay from which a member is named, and its least share of the round: machines that are alike differ by less."""

_SILENT_BEATS = 1.5
"""Heartbeats that a late member must have missed to count as stopped."""

_SLOW_RECEIVER = 2.0
"""How much slower than others a member must receive from the same senders, that its own link counts as slow."""

_BOTTLENECK = 1.4
"""How much longer than the next one the slowest replica of a pipeline computes, at least, to be its bottleneck."""

_OWN_CAUSES: Mapping[WorkPhase, SlowCause] = MappingProxyType(
    {
        "compute": "slow device",
        "data": "slow data",
        "packing": "slow packing",
        "applying": "slow applying",
        "checkpoint": "slow checkpoint",
    }
)
_BESIDE: tuple[WorkPhase, ...] = ("packing", "applying")


@dataclass(frozen=True)
class LinkSeen:
    """A member's link in a round: seconds to send and to receive all that it had to, at the rates that were seen.

    ``receives_slowly``: compared with how others received from the same senders. Zeros: unknown."""

    send_s: float = 0.0
    send_bps: float = 0.0
    receive_s: float = 0.0
    receive_bps: float = 0.0
    receives_slowly: bool = False


@dataclass(frozen=True)
class MemberSeen:
    """A member as the coordinator sees it at the end of a round. Moments are on the coordinator's clock.

    ``heard_s``: of its last heartbeat; ``phase``: what that said; ``is_relayed``: whether others reach it over a relay,
    by their word; ``times``: its own account of the round, if it has reported."""

    name: str
    heard_s: float
    joined_s: float
    phase: WorkPhase = "waiting"
    is_relayed: bool = False
    times: MemberTimes | None = None
    is_gone: bool = False


@dataclass(frozen=True)
class ScopeSeen:
    """A round in one scope as the coordinator has seen it, at its end.

    ``worked_s``: by member of a round that needs an exact batch, when it last got on with it; ``ready_s``: when its
    contribution was here; ``reported_s``: its report; in all three a member that was lost or waited for in vain has the
    moment at which the others went on without it. ``undelivered``: members that did not deliver what they had to, as
    those say that lacked it. ``usual_exchange_s``: of the last rounds, 0 if unknown;
    ``step_s``: of a usual member."""

    began_s: float
    closes_s: float
    planned_s: float | None
    ended_s: float
    heartbeat_s: float
    members: Mapping[str, MemberSeen]
    worked_s: Mapping[str, float] = field(default_factory=dict)
    ready_s: Mapping[str, float] = field(default_factory=dict)
    reported_s: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, LinkSeen] = field(default_factory=dict)
    undelivered: Collection[str] = ()
    stage: int | None = None
    usual_exchange_s: float = 0.0
    step_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the round's beginning to its end."""
        return max(0.0, self.ended_s - self.began_s)


@dataclass(frozen=True)
class _Delay:
    """A member that others may have waited for."""

    peer: str
    phase: WorkPhase
    extra_s: float
    cause: SlowCause
    bps: float = 0.0
    is_claimed: bool = False
    stage: int | None = None


def critical_path(number: int, scopes: Sequence[ScopeSeen]) -> CriticalPath | None:
    """Return for whom the others waited longest in a round of one or more scopes; None if for nobody in particular."""
    wall_s = max((scope.wall_s for scope in scopes), default=0.0)
    least_s = max(_LEAST_S, _LEAST_SHARE * wall_s)
    delays = [replace(one, stage=scope.stage) for scope in scopes for one in _delays(scope)]
    delays += _bottlenecks(scopes)
    delays = [replace(one, extra_s=min(one.extra_s, wall_s)) for one in delays if one.extra_s >= least_s]
    if not delays:
        return None
    worst = max(delays, key=lambda one: (one.extra_s, one.bps > 0, one.peer))
    names = {peer: one.name for scope in scopes for peer, one in scope.members.items()}
    return CriticalPath(
        peer=worst.peer,
        phase=worst.phase,
        extra_s=worst.extra_s,
        cause=worst.cause,
        bps=min(worst.bps, MAX_RATE),  # a sum of what members report
        stage=worst.stage,
        is_claimed=worst.is_claimed,
        text=_say(number, worst, names.get(worst.peer, "")),
    )


def _delays(seen: ScopeSeen) -> list[_Delay]:
    """Return who was late in each part of a round."""
    at_work = _late(seen, seen.worked_s, seen.began_s, "compute")
    grain_s = 2 * (seen.step_s + seen.heartbeat_s)  # members are not done with a batch in the same moment
    found = [
        at_work if at_work is not None and at_work.extra_s >= grain_s else None,
        _late(seen, seen.ready_s, seen.closes_s, "waiting"),
        *_exchange_delays(seen),
    ]
    return [one for one in found if one is not None]


def _late(seen: ScopeSeen, arrived_s: Mapping[str, float], from_s: float, phase: WorkPhase) -> _Delay | None:
    """Return the last to arrive, and how long after the usual one of the others, not counted before ``from_s``."""
    if len(arrived_s) < 2:
        return None
    last = max(arrived_s, key=lambda peer: (arrived_s[peer], peer))
    usual_s = median_low(max(moment_s, from_s) for peer, moment_s in arrived_s.items() if peer != last)
    extra_s = arrived_s[last] - usual_s
    member = seen.members.get(last)
    if extra_s <= 0.0 or member is None:
        return None
    if _has_stopped(seen, member, arrived_s[last]):
        return _Delay(last, phase, extra_s, "stopped")
    if member.joined_s > seen.began_s:
        return _Delay(last, phase, extra_s, "late join")
    said = _own_word(seen, last, extra_s)
    if said is not None:
        return _Delay(last, said, extra_s, _OWN_CAUSES[said], is_claimed=True)
    return _Delay(last, phase, extra_s, "slow device" if phase == "compute" else "unknown")


def _has_stopped(seen: ScopeSeen, member: MemberSeen, at_s: float) -> bool:
    return member.is_gone or at_s - member.heard_s > _SILENT_BEATS * seen.heartbeat_s


def _own_word(seen: ScopeSeen, late: str, extra_s: float) -> WorkPhase | None:
    """Return the phase that explains a member's lateness by its own account, else by its last heartbeat."""
    member = seen.members[late]
    if member.times is not None:
        others = [one.times.training for peer, one in seen.members.items() if peer != late and one.times is not None]
        excess_s = {
            phase: member.times.training.of(phase) - median_low([one.of(phase) for one in others] or [0.0])
            for phase in _OWN_CAUSES
        }
        phase = max(excess_s, key=lambda one: excess_s[one])
        if excess_s[phase] >= extra_s / 2:
            return phase
    return member.phase if member.phase in _OWN_CAUSES else None


def _exchange_delays(seen: ScopeSeen) -> list[_Delay]:
    """Return whose link, or whose end, the exchange waited for."""
    if seen.planned_s is None:
        return []
    lasted_s = seen.ended_s - seen.planned_s
    lost_s = max(0.0, lasted_s - seen.usual_exchange_s)
    found: list[_Delay] = []
    for peer in seen.undelivered:
        if peer in seen.members:
            stopped = _has_stopped(seen, seen.members[peer], seen.ended_s)
            found.append(_Delay(peer, "exchange", lost_s, "stopped" if stopped else "unreachable"))
    late = _late(seen, seen.reported_s, seen.planned_s, "exchange")
    if late is not None and late.cause == "stopped":
        found.append(replace(late, extra_s=max(late.extra_s, lost_s)))
    elif late is not None and late.peer not in seen.undelivered:
        found.append(_late_report(seen, late))
    send_s = _above_others({peer: link.send_s for peer, link in seen.links.items() if link.send_s})
    receive_s = _above_others({peer: link.receive_s for peer, link in seen.links.items() if link.receive_s})
    for peer, link in seen.links.items():
        relayed = peer in seen.members and seen.members[peer].is_relayed
        if extra_s := send_s.get(peer):
            cause: SlowCause = "relay" if relayed else "slow upload"
            found.append(_Delay(peer, "exchange", min(extra_s, lasted_s), cause, link.send_bps))
        if link.receives_slowly and (extra_s := receive_s.get(peer)):
            cause = "relay" if relayed else "slow download"
            found.append(_Delay(peer, "exchange", min(extra_s, lasted_s), cause, link.receive_bps))
    return found


def _late_report(seen: ScopeSeen, late: _Delay) -> _Delay:
    """Return why a member that is there was done with the exchange later than the others: its link, unless it says that
    it has spent the time on its own work."""
    member, link = seen.members[late.peer], seen.links.get(late.peer, LinkSeen())
    times = member.times.exchange if member.times is not None else PhaseTimes()
    others = [one.times.exchange for peer, one in seen.members.items() if peer != late.peer and one.times is not None]
    beside_s: dict[WorkPhase, float] = {
        phase: times.of(phase) - median_low([one.of(phase) for one in others] or [0.0]) for phase in _BESIDE
    }
    slowest: WorkPhase = max(beside_s, key=lambda one: beside_s[one])
    if beside_s[slowest] >= late.extra_s / 2:
        return replace(late, phase=slowest, cause=_OWN_CAUSES[slowest], is_claimed=True)
    cause: SlowCause = "relay" if member.is_relayed else "slow download"
    return replace(late, phase="exchange", cause=cause, bps=link.receive_bps, is_claimed=False)


def _above_others(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return how much longer than the usual one of the others each member takes; 0 of a single one."""
    ordered, middle = sorted(seconds.values()), (len(seconds) - 2) // 2
    if len(ordered) < 2:
        return dict.fromkeys(seconds, 0.0)
    # The median of the others: what is in the middle once a member's own time is taken out.
    return {
        peer: max(0.0, one - ordered[middle + (bisect_left(ordered, one) <= middle)]) for peer, one in seconds.items()
    }


def _bottlenecks(scopes: Sequence[ScopeSeen]) -> list[_Delay]:
    """Return the replica that computes while those of all other stages wait, in a pipeline."""
    if all(scope.stage is None for scope in scopes):
        return []
    computed_s: dict[str, float] = {}
    stages: dict[str, int | None] = {}
    for scope in scopes:
        for peer, member in scope.members.items():
            if member.times is not None:
                computed_s[peer], stages[peer] = member.times.training.compute, scope.stage
    if len(computed_s) < 2:
        return []
    slowest, next_one = sorted(computed_s, key=lambda peer: (-computed_s[peer], peer))[:2]
    if computed_s[slowest] < _BOTTLENECK * computed_s[next_one]:
        return []
    extra_s = computed_s[slowest] - computed_s[next_one]
    return [_Delay(slowest, "compute", extra_s, "slow device", is_claimed=True, stage=stages[slowest])]


# Links ------------------------------------------------------------------------------------------------------


def links_seen(
    plan: RoundPlan, reports: Mapping[str, PeerToCoordinatorRoundReport], format_map: FormatMap
) -> dict[str, LinkSeen]:
    """Return what the members' links carried in a round, as those report that received."""
    rates, traffic, sent = delivered_bps(plan, reports), Traffic(plan), sent_bytes(plan, format_map)
    peers = [member.peer for member in plan.members]
    links = {peer: LinkSeen() for peer in peers}
    received: dict[str, dict[int, float]] = {}
    """By receiver, the bytes from each sender whose rate it knows."""
    slowness: dict[str, list[float]] = {}
    for member, by_witness in rates.items():
        values = sending_bps(plan, traffic, member, by_witness)
        # One alone may put its own slow link on the sender; of two members it is anyhow one of them.
        if len(values) > 1 or (values and len(peers) == 2):
            bps = median_high(values)
            links[peers[member]] = replace(links[peers[member]], send_bps=bps, send_s=8 * sent[peers[member]] / bps)
        shares = traffic.shares(member)  # a report may name a member that sends nothing to its sender
        share_of = {peers[one]: share for one, share in shares.items() if share > 0.0}
        whole = {one: bps / share_of[one] for one, bps in by_witness.items() if one in share_of}
        for witness, bps in whole.items():
            received.setdefault(witness, {})[member] = sent[peers[member]] * share_of[witness]
            others = [one for other, one in whole.items() if other != witness]
            if others:
                slowness.setdefault(witness, []).append(median_low(others) / bps)
    for witness, by_sender in received.items():
        bps = sum(rates[member][witness] for member in by_sender)
        slow = slowness.get(witness, [])
        links[witness] = replace(
            links[witness],
            receive_bps=bps,
            receive_s=8 * sum(by_sender.values()) / bps,
            receives_slowly=len(slow) > 1 and median_low(slow) >= _SLOW_RECEIVER,
        )
    return {peer: link for peer, link in links.items() if link != LinkSeen()}


# Words ------------------------------------------------------------------------------------------------------


def _say(number: int, delay: _Delay, name: str) -> str:
    who = f"{name} ({delay.peer[:8]})" if name else delay.peer
    where = "" if delay.stage is None else f"in stage {delay.stage} "
    return f"round {number} took {_seconds(delay.extra_s)} longer because {where}{who} {_reason(delay)}"


def _reason(delay: _Delay) -> str:
    rate = f" at {_rate(delay.bps)}" if delay.bps else ""
    match delay.cause:
        case "slow upload":
            return f"sent{rate or ' slowly'}"
        case "slow download":
            return f"received{rate or ' slowly'}"
        case "relay":
            return f"is reached over a relay{rate}"
        case "slow device":
            return "computed slowly"
        case "slow data":
            return "waited for its data"
        case "slow packing":
            return "packed its contribution slowly"
        case "slow applying":
            return "applied the round before slowly"
        case "slow checkpoint":
            return "was writing a checkpoint"
        case "late join":
            return "joined late"
        case "stopped":
            return "did not answer"
        case "unreachable":
            return "did not deliver what the others needed"
        case "unknown":
            return "was ready late"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def _rate(bps: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bps >= size:
            return f"{bps / size:.3g} {unit}"
    return f"{bps:.0f} bit/s"
