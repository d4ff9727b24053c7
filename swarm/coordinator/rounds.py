"""The life of a round as decisions: when it closes, who averages, how it ends. Pure functions on plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal.swarm.averaging.partition import chunk_elements, owner_shares, split
from shoal.swarm.coordinator.leases import Ranges
from shoal.swarm.coordinator.membership import Member, majority
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.messages import (
    Part,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    Phase,
    PlanMember,
    RoundPlan,
)


@dataclass
class Round:
    """The one open round. Moments are on the coordinator's clock. ``ranges``: the samples behind the plan's
    members; ``orphans``: those of them that were lost since."""

    number: int
    phase: Phase = "waiting"
    opened_s: float = 0.0
    closes_s: float = 0.0
    ready: dict[str, PeerToCoordinatorRoundReady] = field(default_factory=dict)
    plan: RoundPlan | None = None
    ranges: dict[str, Ranges] = field(default_factory=dict)
    loss: float | None = None
    reports: dict[str, PeerToCoordinatorRoundReport] = field(default_factory=dict)
    progress_s: float = 0.0
    orphans: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Goal:
    """When a round has enough: ``tokens`` reached or ``max_s`` passed. ``exact``: not one token more."""

    tokens: int
    max_s: float
    exact: bool


def tokens_now(members: Collection[Member], now_s: float) -> float:
    """Tokens of the members' uncommitted work, extrapolated from their last heartbeats by their speed."""
    return sum(member.tokens_done + member.tokens_per_s * min(now_s - member.heard_s, 5.0) for member in members)


def closing_moment(
    opened_s: float, goal: Goal, members: Collection[Member], now_s: float, deadlines: Deadlines
) -> float | None:
    """The moment to announce, or None while it is too early to tell.

    Announced about ``announce_s`` ahead, or the slowest member's step, so that everybody can finish a step.
    """
    at_limit = opened_s + goal.max_s
    slowest_s = max((member.step_s for member in members), default=0.0)
    ahead_s = min(max(deadlines.announce_s, slowest_s), deadlines.patience_s)
    if goal.exact:
        if sum(member.tokens_done for member in members) >= goal.tokens:
            return now_s
        return max(now_s, at_limit) if at_limit <= now_s + ahead_s else None
    speed = sum(member.tokens_per_s for member in members)
    missing = goal.tokens - tokens_now(members, now_s)
    at_goal = now_s + missing / speed if speed else (now_s if missing <= 0 else at_limit)
    moment = min(at_goal, at_limit)
    return max(moment, now_s + deadlines.announce_s / 2) if moment <= now_s + ahead_s else None


def plan_round(
    number: int,
    anchor_version: int,
    elements: int,
    ready: Mapping[str, PeerToCoordinatorRoundReady],
    members: Mapping[str, Member],
) -> RoundPlan | None:
    """One group of everybody who has work on the common state; None when nobody has.

    Members are ordered by peer id, which fixes the order of summation.
    """
    digest = majority(one.state_digest for one in ready.values())
    peers = sorted(
        peer for peer, one in ready.items() if one.weight_tokens and one.state_digest == digest and peer in members
    )
    if not peers or digest is None:
        return None
    chunk = chunk_elements(elements, len(peers))
    shares = owner_shares(
        [members[peer].bandwidth_bps or None for peer in peers],
        [members[peer].entry.reachable for peer in peers],
    )
    parts = split(elements, shares, chunk)
    return RoundPlan(
        round=number,
        anchor_version=anchor_version,
        state_digest=digest,
        chunk_elements=chunk,
        members=tuple(PlanMember(peer=peer, weight_tokens=ready[peer].weight_tokens) for peer in peers),
        parts=tuple(Part(owner=owner, start=start, stop=stop) for owner, start, stop in parts),
    )


@dataclass(frozen=True)
class Judgement:
    """How the round ends: with digests when committed, with a reason when aborted."""

    digests: tuple[bytes, ...] = ()
    reason: str = ""

    @property
    def committed(self) -> bool:
        return bool(self.digests)


def judge(
    plan: RoundPlan,
    reports: Mapping[str, PeerToCoordinatorRoundReport],
    live: Collection[str],
    *,
    overdue: bool,
) -> Judgement | None:
    """The verdict, or None while it is worth waiting.

    Committed when a live member holds every part and no two members hold different bytes of the same part. Waits
    for all live members of the plan, or until ``overdue``.
    """
    heard = {peer: report for peer, report in reports.items() if peer in live}
    awaited = [member.peer for member in plan.members if member.peer in live and member.peer not in heard]
    digests: list[bytes] = []
    for index, part in enumerate(plan.parts):
        seen = {report.digests[index] for report in heard.values()} - {None}
        if len(seen) > 1:
            owner = plan.members[part.owner].peer
            return Judgement(reason=f"{owner} sent different results of its part to different members")
        digests += [digest for digest in seen if digest is not None]
    if awaited and not overdue:
        return None
    if len(digests) == len(plan.parts):
        return Judgement(digests=tuple(digests))
    missing = len(plan.parts) - len(digests)
    troubles = sorted({report.trouble for report in heard.values() if report.trouble})
    why = f"; {troubles[0]}" if troubles else ""
    return Judgement(reason=f"{missing} of {len(plan.parts)} parts arrived nowhere{why}")
