"""Placement of peers that cannot all meet: holders of adjacent stages pass tensors on, replicas average.

The solver knows nothing of this, as nearly all peers can meet nearly all others: what it proposes is rearranged, or
made again without some of the peers, until nobody has to meet somebody that it cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from shoal.swarm.pipeline.planner.model import Infeasible, PeerCapability, PlanningProblem, StagePlan

_MOST_REARRANGED = 24
"""Peers up to which a first plan is rearranged: the exchanges of any two of them are tried."""

_MOST_PLANS = 16
"""Plans that are made without ever more peers, until all that cannot meet everybody are left out."""

Span = tuple[int, int]


def can_meet(one: PeerCapability, other: PeerCapability) -> bool:
    """Whether one of two peers can dial the other, as far as is known, and has not failed to."""
    return (other.is_dialed and other.peer not in one.unmet) or (one.is_dialed and one.peer not in other.unmet)


def strangers(spans: Mapping[str, Span], peers: Iterable[PeerCapability]) -> list[tuple[str, str]]:
    """Return the pairs of peers that would have to meet in these spans and cannot: holders of adjacent stages, and
    replicas of a stage none of which can be dialed by the others."""
    by_peer = {one.peer: one for one in peers if one.peer in spans}
    limited = [one for one in by_peer.values() if not one.is_dialed or one.unmet]
    pairs = set()
    for one in limited:
        first, last = spans[one.peer]
        for other in by_peer.values():
            begin, end = spans[other.peer]
            if other is one or begin > last + 1 or end < first - 1 or can_meet(one, other):
                continue
            are_neighbours = begin - 1 <= last and first - 1 <= end and not (begin == first and end == last)
            shared = range(max(first, begin), min(last, end) + 1)
            if are_neighbours or any(not _has_dialed(by_peer, spans, stage) for stage in shared):
                pairs.add((min(one.peer, other.peer), max(one.peer, other.peer)))
    return sorted(pairs)


def _has_dialed(by_peer: Mapping[str, PeerCapability], spans: Mapping[str, Span], stage: int) -> bool:
    return any(one.is_dialed and spans[one.peer][0] <= stage <= spans[one.peer][1] for one in by_peer.values())


def rearrange(problem: PlanningProblem, plan: StagePlan) -> StagePlan:
    """Exchange the spans of peers, one pair after the other, as long as fewer of them cannot meet then; of several
    such exchanges the one with the fastest plan. For first plans, as nobody holds any state yet."""
    table = problem.table(plan.boundaries)
    row_of = {one.peer: row for row, one in enumerate(problem.peers)}
    spans, left = dict(plan.spans), strangers(plan.spans, problem.peers)
    if not left or len(problem.peers) > _MOST_REARRANGED:
        return plan

    def rate(spans: Mapping[str, Span]) -> float:
        load = [0.0] * plan.stages
        for peer, span in spans.items():
            its = float(table.rates[row_of[peer], table.index_of(span)])
            if not its:
                return 0.0
            for stage in range(span[0], span[1] + 1):
                load[stage] += its
        return min(load)

    while left:
        tried = [(strangers(one, problem.peers), one) for one in _exchanges(spans, sorted(row_of)) if rate(one) > 0]
        better = [(len(pairs), -rate(one), one) for pairs, one in tried if len(pairs) < len(left)]
        if not better:
            break
        _, _, spans = min(better, key=lambda one: one[:2])
        left = strangers(spans, problem.peers)
    again = {peer for peer, span in spans.items() if table.recomputes[row_of[peer], table.index_of(span)]}
    return StagePlan(plan.boundaries, spans, frozenset(again))


def _exchanges(spans: Mapping[str, Span], peers: Sequence[str]) -> Iterator[dict[str, Span]]:
    for one, other in combinations(peers, 2):
        if spans.get(one) != spans.get(other):
            exchanged = {peer: span for peer, span in spans.items() if peer not in (one, other)}
            exchanged |= {to: spans[of] for of, to in ((one, other), (other, one)) if of in spans}
            yield exchanged


def plan_acquainted(
    make: Callable[[Sequence[PeerCapability]], StagePlan | Infeasible],
    peers: Sequence[PeerCapability],
    previous: StagePlan | None,
) -> StagePlan | Infeasible:
    """Plan with all peers, or else without those that would have to meet somebody that they cannot.

    ``make``: makes a plan for some of the peers. Peers without a stage so far are left out first."""
    left, placed = list(peers), previous.spans if previous else {}
    without: list[str] = []
    for attempt in range(_MOST_PLANS):
        plan = make(left)
        pairs = [] if isinstance(plan, Infeasible) else strangers(plan.spans, left)
        if isinstance(plan, Infeasible) or not pairs:
            break
        times = Counter(peer for pair in pairs for peer in pair)
        limited = {one.peer for one in left if not one.is_dialed or one.unmet} & times.keys()
        out = {min(limited, key=lambda peer: (peer in placed, -times[peer], peer))}
        without += sorted(limited if attempt == _MOST_PLANS - 2 else out)
        left = [one for one in left if one.peer not in without]
    if isinstance(plan, Infeasible) and without:
        return Infeasible(
            f"{plan.reason}; {len(without)} peers cannot be placed beside others that they cannot reach and that "
            f"cannot reach them"
        )
    return plan
