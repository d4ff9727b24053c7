"""The life of a round as decisions: when it closes, how long to wait, how it ends. Pure functions on plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shoal.swarm.coordinator.leases import Ranges
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.messages import PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport, Phase, RoundPlan
from shoal.swarm.run_file import RunSection


@dataclass
class Round:
    """The one open round. Moments are on the coordinator's clock. ``ranges``: the samples behind the plan's
    members; ``orphans``: those of them that were lost since, back or not. ``moves_left``: how often chunks that
    were moved can still put the verdict off. ``expected``: the plan that was announced with the closing, until one of
    its members leaves or another plan is made."""

    number: int
    phase: Phase = "waiting"
    opened_s: float = 0.0
    closes_s: float = 0.0
    ready: dict[str, PeerToCoordinatorRoundReady] = field(default_factory=dict)
    ready_s: float = math.inf
    plan: RoundPlan | None = None
    expected: RoundPlan | None = None
    ranges: dict[str, Ranges] = field(default_factory=dict)
    loss: float | None = None
    median_loss: float | None = None
    reports: dict[str, PeerToCoordinatorRoundReport] = field(default_factory=dict)
    progress_s: float = 0.0
    reported_s: float = 0.0
    moves_left: int = 0
    orphans: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Goal:
    """When a round has enough: ``tokens`` reached or ``max_s`` passed. ``exact``: not one token more."""

    tokens: int
    max_s: float
    exact: bool


def is_over(ends: RunSection, tokens_committed: int, rounds_committed: int, elapsed_s: float) -> bool:
    """Whether the run has all that its file asks for."""
    return (
        (ends.tokens is not None and tokens_committed >= ends.tokens)
        or (ends.rounds is not None and rounds_committed >= ends.rounds)
        or (ends.max_s is not None and elapsed_s >= ends.max_s)
    )


@dataclass(frozen=True)
class Work:
    """One member's uncommitted work as it says, believed as far as its leases cover it."""

    done_tokens: int
    tokens_per_s: float
    step_s: float
    heard_s: float
    leased_tokens: int

    @property
    def tokens(self) -> int:
        return min(self.done_tokens, self.leased_tokens)

    def tokens_at(self, now_s: float, opened_s: float) -> float:
        """Extrapolated from the last heartbeat; before the round was opened, nobody trained for it."""
        passed_s = min(now_s - max(self.heard_s, opened_s), 5.0)
        return min(self.done_tokens + self.tokens_per_s * passed_s, self.leased_tokens)

    def speed(self, lease_s: float) -> float:
        """Tokens a second; whoever is fast has asked for leases that last."""
        return min(self.tokens_per_s, self.leased_tokens / lease_s)


def closing_moment(
    opened_s: float, goal: Goal, works: Collection[Work], now_s: float, deadlines: Deadlines
) -> float | None:
    """The moment to announce, or None while it is too early to tell.

    Announced about ``announce_s`` ahead, or the slowest member's step, so that everybody can finish a step.
    """
    at_limit = opened_s + goal.max_s
    slowest_s = max((work.step_s for work in works), default=0.0)
    ahead_s = min(max(deadlines.announce_s, slowest_s), deadlines.patience_s)
    if goal.exact:
        if sum(work.tokens for work in works) >= goal.tokens:
            return now_s
        return max(now_s, at_limit) if at_limit <= now_s + ahead_s else None
    speed = sum(work.speed(deadlines.lease_s) for work in works)
    missing = goal.tokens - sum(work.tokens_at(now_s, opened_s) for work in works)
    at_goal = now_s + missing / speed if speed else (now_s if missing <= 0 else at_limit)
    moment = min(at_goal, at_limit)
    return max(moment, now_s + deadlines.announce_s / 2) if moment <= now_s + ahead_s else None


def weighted_mean(values: Collection[tuple[float, int]]) -> float | None:
    """Of (value, weight); never outside the values, whatever the rounding; None of none."""
    total = sum(weight for _, weight in values)
    if not total:
        return None
    known = [value for value, _ in values]
    return min(max(sum(value * (weight / total) for value, weight in values), min(known)), max(known))


def lost_work(ended: Round, digests: tuple[bytes | None, ...]) -> tuple[str, ...]:
    """Dead members whose contribution did not get into every chunk: others train on their samples again.

    Of a part that is void, what the living offered is offered again; what the dead did is gone."""
    if ended.plan is not None and None in digests:
        return tuple(sorted(ended.orphans))
    return tuple(peer for peer in left_out(ended, digests) if peer in ended.orphans)


def left_out(ended: Round, digests: tuple[bytes | None, ...]) -> tuple[str, ...]:
    """Members whose contribution did not get into every chunk of a round without void parts, in the plan's order.

    Who is missing in the committed bytes is known to those that hold them all, of whom two have to say so; where there
    is nobody, all are believed, for samples are better trained on twice than never."""
    if ended.plan is None:
        return ()
    reports = ended.reports.values()
    holders = [report for report in reports if report.digests == digests]
    said = Counter(index for report in holders or reports for index in set(report.dropped))
    needed = min(2, max(1, len(holders)))
    return tuple(ended.plan.members[index].peer for index in sorted(said) if said[index] >= needed)


@dataclass(frozen=True)
class Judgement:
    """How the round ends: with digests when committed (None: a void part), with a reason when aborted. ``failed``: the
    owners and relays that others did not get from what they had to."""

    digests: tuple[bytes | None, ...] = ()
    reason: str = ""
    failed: tuple[str, ...] = ()

    @property
    def committed(self) -> bool:
        return bool(self.digests)


def judge(
    plan: RoundPlan,
    reports: Mapping[str, PeerToCoordinatorRoundReport],
    live: Collection[str],
    *,
    overdue: bool,
    enough: bool,
    whole: bool = False,
) -> Judgement | None:
    """The verdict, or None while it is worth waiting.

    Of each part those bytes are committed that most live members hold, if two of them do (one, if it is the last), so
    that the next death does not take committed bytes away; a part without such bytes is void. Committed when any part
    is, or, of a ``whole`` round, when all are. Waits for all live members of the plan, or until ``overdue``; those who
    only lack what others hold can fetch it later: ``enough`` (time for the others' sake) ends the wait for them.
    """
    heard = {peer: report for peer, report in reports.items() if peer in live}
    present = [member.peer for member in plan.members if member.peer in live]
    can_wait = len(heard) < len(present) and not overdue
    if can_wait and not enough:
        return None  # whatever the reports say: counting a thousand of them takes a while
    digests: list[bytes | None] = []
    failed: list[str] = []
    for index, part in enumerate(plan.parts):
        held = Counter(one for one in (report.digests[index] for report in heard.values()) if one is not None)
        # Of equally many the smallest, so that any two judges agree.
        digest, holders = min(held.items(), key=lambda one: (-one[1], one[0]), default=(None, 0))
        kept = digest if holders >= min(2, len(present)) else None
        if can_wait and kept is None:
            return None
        digests.append(kept)
        # One that holds other bytes than the rest may have made them up; of two the owner is the likelier source.
        if kept is None or held.total() - holders >= 2:
            failed.append(plan.members[part.owner].peer)
    # One that fails one member may have a bad link with it; one that fails two is slow or cut off itself.
    accused = Counter(owner for report in heard.values() for owner in set(report.failed))
    failed += [plan.members[owner].peer for owner in sorted(accused) if accused[owner] >= min(2, len(present) - 1)]
    void = digests.count(None)
    if void < len(digests) and not (void and whole):
        return Judgement(digests=tuple(digests), failed=tuple(dict.fromkeys(failed)))
    troubles = sorted({report.trouble for report in heard.values() if report.trouble})
    why = f"; {troubles[0]}" if troubles else ""
    reason = f"{void} of {len(plan.parts)} parts did not arrive{why}"
    return Judgement(reason=reason, failed=tuple(dict.fromkeys(failed)))
