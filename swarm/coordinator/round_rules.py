"""Rules of a round, on plain values: when it closes, how long to wait, and how it ends."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shoal.swarm.coordinator.bandwidth import collectors
from shoal.swarm.coordinator.trust import outvotes
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import PartMaker, RoundPlan
from shoal.swarm.protocol.run_file import RunSection
from shoal.swarm.protocol.types import Phase
from shoal.swarm.sample_ranges import Ranges
from shoal.swarm.secure.board import SecureBoard


@dataclass
class Round:
    """State of the open round. Moments are on the coordinator's clock.

    ``ranges``: by member of the plan, its samples; ``orphans``: those members that have left since, whether they
    rejoined or not. ``reported_digests``: one copy of those that reports have. ``moves_left``: how often a member's
    moved chunks can still put off the verdict. ``expected``: the plan that was announced with the closing, until one of
    its members leaves or another plan is made. ``began_s``: when the round before had ended; ``worked_s``,
    ``readied_s``, ``reports_s``: by member, when it last got on with its work, and when its contribution and its report
    came, or the others went on without; ``planned_s``: when the plan was made. ``board``: of a
    secure round that is averaged."""

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
    reported_digests: dict[tuple[bytes | None, ...], tuple[bytes | None, ...]] = field(default_factory=dict)
    progress_s: float = 0.0
    reported_s: float = 0.0
    moves_left: dict[str, int] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)
    began_s: float = field(default=0.0, compare=False)
    planned_s: float | None = field(default=None, compare=False)
    worked_s: dict[str, float] = field(default_factory=dict, compare=False)
    readied_s: dict[str, float] = field(default_factory=dict, compare=False)
    reports_s: dict[str, float] = field(default_factory=dict, compare=False)
    board: SecureBoard | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Goal:
    """Goal of a round: ``tokens`` reached or ``max_s`` passed.

    ``exact``: no more than these tokens; ``everybody``: as many members that have done anything, however much one says
    that it has done, so nobody needs time for a last step."""

    tokens: int
    max_s: float
    exact: bool
    everybody: bool = False


def is_over(ends: RunSection, tokens_committed: int, rounds_committed: int, elapsed_s: float) -> bool:
    """Whether the run has all that its file asks for."""
    return (
        (ends.tokens is not None and tokens_committed >= ends.tokens)
        or (ends.rounds is not None and rounds_committed >= ends.rounds)
        or (ends.max_s is not None and elapsed_s >= ends.max_s)
    )


@dataclass(frozen=True)
class Work:
    """One member's uncommitted work as it reports it, believed as far as its leases cover it."""

    done_tokens: int
    tokens_per_s: float
    step_s: float
    heard_s: float
    leased_tokens: int

    @property
    def tokens(self) -> int:
        return min(self.done_tokens, self.leased_tokens)

    def tokens_at(self, now_s: float, opened_s: float) -> float:
        """Return the tokens extrapolated from the last heartbeat, for at most 5 s and not from before the round."""
        passed_s = min(now_s - max(self.heard_s, opened_s), 5.0)
        return min(self.done_tokens + self.tokens_per_s * passed_s, self.leased_tokens)

    def speed(self, lease_s: float) -> float:
        """Return the tokens a second, believed as far as the leases last for ``lease_s``."""
        return min(self.tokens_per_s, self.leased_tokens / lease_s)


def closing_moment(
    opened_s: float, goal: Goal, works: Collection[Work], now_s: float, deadlines: Deadlines
) -> float | None:
    """Return the closing moment to announce, or None while it is too early to tell.

    It is announced about ``announce_s`` ahead, or the slowest member's step, so that every member can finish a step.
    """
    at_limit = opened_s + goal.max_s
    slowest_s = max((work.step_s for work in works), default=0.0)
    ahead_s = min(max(deadlines.announce_s, slowest_s), deadlines.patience_s)
    done = sum(work.tokens > 0 if goal.everybody else work.tokens for work in works)
    if (goal.exact or goal.everybody) and done >= goal.tokens:
        return now_s
    if goal.exact or goal.everybody:
        return max(now_s, at_limit) if at_limit <= now_s + ahead_s else None
    moment = expected_closing_s(opened_s, goal, works, now_s, deadlines)
    return max(moment, now_s + deadlines.announce_s / 2) if moment <= now_s + ahead_s else None


def expected_closing_s(
    opened_s: float, goal: Goal, works: Collection[Work], now_s: float, deadlines: Deadlines
) -> float:
    """Return when a round that need not be exact has enough, if all go on as fast as they are."""
    at_limit = opened_s + goal.max_s
    speed = sum(work.speed(deadlines.lease_s) for work in works)
    missing = goal.tokens - sum(work.tokens_at(now_s, opened_s) for work in works)
    at_goal = now_s + missing / speed if speed else (now_s if missing <= 0 else at_limit)
    return min(at_goal, at_limit)


def weighted_mean(values: Collection[tuple[float, int]]) -> float | None:
    """Return the mean of (value, weight), never outside the values whatever the rounding; None of none."""
    total = sum(weight for _, weight in values)
    if not total:
        return None
    known = [value for value, _ in values]
    return min(max(sum(value * (weight / total) for value, weight in values), min(known)), max(known))


def lost_work(
    ended: Round, digests: tuple[bytes | None, ...], work: Mapping[str, int] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return members that left and whose contribution is not in every chunk: others train on their samples again.

    Live members offer their contribution to a void part again; that of a member that left is gone."""
    if ended.plan is not None and None in digests:
        return tuple(sorted(ended.orphans))
    return tuple(peer for peer in left_out(ended, digests, work) if peer in ended.orphans)


def left_out(
    ended: Round, digests: tuple[bytes | None, ...], work: Mapping[str, int] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return members whose contribution is not in every chunk of a round without void parts, in the plan's order.

    Members that hold all committed bytes know who is missing in them. Most of them have to report it, or, where any has
    credit (``work``), those with more than half of the credit. If nobody holds them all, every report is believed, for
    samples are better trained on twice than never."""
    if ended.plan is None:
        return ()
    holders = {peer: report for peer, report in ended.reports.items() if report.digests == digests}
    credited = {peer: work[peer] for peer in holders if peer in work}
    said = Counter[int]()
    for peer, report in (holders or ended.reports).items():
        for index in set(report.dropped):
            said[index] += credited.get(peer, 0) if credited else 1
    needed = (sum(credited.values()) if credited else len(holders)) // 2 + 1
    return tuple(ended.plan.members[index].peer for index in sorted(said) if said[index] >= needed)


@dataclass(frozen=True)
class Judgement:
    """End of a round: with digests when committed (None: a void part), with a reason when aborted.

    ``failed``: the owners and row reducers that did not deliver to others; ``missing``: the members whose contributions
    did not come; ``accused_by``: by member, the owners and row reducers that it accuses of that."""

    digests: tuple[bytes | None, ...] = ()
    reason: str = ""
    failed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    accused_by: Mapping[str, Collection[str]] = field(default_factory=dict)

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
    work: Mapping[str, int] = MappingProxyType({}),
) -> Judgement | None:
    """Return the verdict, or None while it is worth waiting.

    Of each part those bytes are committed that most live members hold, if two of them do (one, if it is the last), so
    that the next death does not take committed bytes away; a part without such bytes is void. ``work``: the credit of
    those members that have any. Where any of them is here, it is they who decide: those bytes are kept that members
    with more than half of their credit hold, whoever has reported yet; two members again, unless one alone has credit.

    Committed when any part
    is, or, of a ``whole`` round, when all are. Waits for all live members of the plan, or until ``overdue``; those who
    only lack what others hold can fetch it later: ``enough`` (time for the others' sake) ends the wait for them.
    Owners are put out of office, and members counted as missing, by that credit as well (``trust.outvotes``);
    missing is also who was here and did not report until the round was overdue.
    """
    heard = {peer: report for peer, report in reports.items() if peer in live}
    present = [member.peer for member in plan.members if member.peer in live]
    can_wait = len(heard) < len(present) and not overdue
    if can_wait and not enough:
        return None  # without looking at the reports: counting a thousand of them takes a while
    credited = work.keys() & set(present)
    all_work = sum(work[peer] for peer in credited)
    digests: list[bytes | None] = []
    accusers: defaultdict[str, set[str]] = defaultdict(set)
    # Nearly all reports have the same digests, which are counted once for all of them.
    alike: dict[tuple[bytes | None, ...], list[str]] = {}
    for peer, report in heard.items():
        alike.setdefault(report.digests, []).append(peer)
    weights = {said: sum(work.get(peer, 0) for peer in peers) for said, peers in alike.items()} if credited else {}
    for index, part in enumerate(plan.parts):
        held, worked = Counter[bytes](), Counter[bytes]()
        for said, peers in alike.items():
            if (part_digest := said[index]) is not None:
                held[part_digest] += len(peers)
                worked[part_digest] += weights.get(said, 0)
        # Of equals the smallest digest, so that any two judges agree.
        ranked = sorted(held.items(), key=lambda one: (-worked.get(one[0], 0), -one[1], one[0]))
        digest, holders = ranked[0] if ranked else (None, 0)
        if credited and digest is not None:
            is_kept = 2 * worked.get(digest, 0) > all_work and holders >= min(2, len(credited))
        else:
            is_kept = holders >= min(2, len(present))
        kept = digest if is_kept else None
        if can_wait and kept is None:
            return None
        digests.append(kept)
        owner = plan.members[part.owner].peer
        if kept is None:
            accusers[owner].update(peer for peer, report in heard.items() if report.digests[index] != digest)
            accusers[owner].update(heard if digest is None else ())
        elif len(held) > 1:
            others = {peer for peer, report in heard.items() if report.digests[index] not in (None, kept)}
            accusers[owner].update(heard.keys() - others if owner in others else others)
    void = digests.count(None)
    accused_by = {
        peer: {plan.members[index].peer for index in report.failed} for peer, report in heard.items() if report.failed
    }
    for peer, accused in accused_by.items():
        for one in accused:
            accusers[one].add(peer)
    index_of = {member.peer: index for index, member in enumerate(plan.members)}
    failed = {
        peer
        for peer, by in accusers.items()
        if any(outvotes(by, peer, judges, work) for judges in _judges(plan, index_of[peer], present, credited))
    }
    undelivered = set(_missing(plan, heard, work))
    ended = Judgement(
        failed=tuple(sorted(failed)),
        missing=tuple(peer for peer in present if peer in undelivered or (overdue and peer not in heard)),
        accused_by=accused_by,
    )
    if void < len(digests) and not (void and whole):
        return replace(ended, digests=tuple(digests))
    troubles = sorted({report.trouble for report in heard.values() if report.trouble})
    why = f"; {troubles[0]}" if troubles else ""
    return replace(ended, reason=f"{void} of {len(plan.parts)} parts did not arrive{why}")


def _judges(plan: RoundPlan, member: int, present: list[str], credited: Collection[str]) -> list[list[str]]:
    """Return the groups of which each can put an owner or row reducer out of office: all, by their credit.

    While nobody has credit they are counted: in a grid then the members of its row, and those of its columns, as the
    others get nothing from it."""
    if credited or not plan.columns:
        return [present]
    here = set(present)
    row = [one.peer for one in plan.members if one.row == plan.members[member].row]
    columns = {plan.members[one].peer for column in plan.columns if member in column for one in column}
    return [[peer for peer in group if peer in here] for group in (row, sorted(columns))]


def makers_of(
    plan: RoundPlan, reports: Mapping[str, PeerToCoordinatorRoundReport], digests: tuple[bytes | None, ...]
) -> tuple[PartMaker | None, ...]:
    """Return who has signed for the committed bytes of each part: the owner, else the first stand-in that has.

    None for void parts, and where the maker was gone before it could report."""
    index_of = {member.peer: index for index, member in enumerate(plan.members)}
    signed: dict[int, dict[int, PartMaker]] = defaultdict(dict)
    for peer, report in reports.items():
        for made in report.made:
            if digests[made.part] is not None and report.digests[made.part] == digests[made.part]:
                member = index_of[peer]
                maker = PartMaker(member=member, chunks=made.chunks, signature=made.signature)
                signed[made.part][member] = maker
    return tuple(
        next((signed[number][one] for one in (part.owner, *part.stand_ins) if one in signed[number]), None)
        for number, part in enumerate(plan.parts)
    )


def _missing(plan: RoundPlan, heard: Mapping[str, PeerToCoordinatorRoundReport], work: Mapping[str, int]) -> list[str]:
    """Return members whose contributions did not come, as most of those report that had to collect them."""
    said: defaultdict[int, set[str]] = defaultdict(set)
    for peer, report in heard.items():
        for index in report.undelivered:
            said[index].add(peer)
    missing = []
    for index in sorted(said):
        collecting = {plan.members[one].peer for one in collectors(plan, index)}
        peer, saying = plan.members[index].peer, said[index] & collecting
        # Of a single collector the word counts while nobody has credit, or a whole batch would wait for ever.
        is_most = 2 * len(saying) > len(collecting)
        if is_most and (not work or outvotes(saying, peer, collecting, work)):
            missing.append(peer)
    return missing
