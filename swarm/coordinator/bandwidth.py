"""Estimates of each member's bandwidth: by what the others got from it, not by what it says itself."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from statistics import median_high, median_low
from types import MappingProxyType

from shoal.compression.formats import FormatMap
from shoal.swarm.averaging.traffic import Traffic
from shoal.swarm.coordinator.round_plan import FAST_BPS
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan

_ROUNDS = 3
_SLOW_START = 3.0
_FEWEST_BYTES = 2**20
"""Less says more about delays than about a link."""

_ALIKE = 1.3
"""Links whose figures differ by no more are taken to be equal: what rounds show is no more exact than that, and the
best shares of owners differ by several times as much as their links."""


class Bandwidths:
    """What rounds have shown of each member, by peer id; kept when it leaves, or it would come back unknown.

    One figure a round: what the middle one of those who collect got from it, over that one's share of all that it sent,
    as it serves everybody at the same time. Of two in the middle the faster one, as the other may be slow itself; but
    of two in all the slower one for a member that claims nothing, as nothing else bounds the other. Else only most of
    the members together can make one of them faster than it is. Taken is the median of its last three rounds, of two
    the lower one: one odd round changes little, and a link that has become slow is known for it after two.

    But no link is slower than what went over it in a round that nothing failed in (``sent_at_least``): who waits for a
    chunk cannot tell a slow link from a processor that is busy.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_ROUNDS))
        """Of each round the figure without a claim and the one with it."""
        self._least: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_ROUNDS))

    def learn(
        self,
        plan: RoundPlan,
        reports: Mapping[str, PeerToCoordinatorRoundReport],
        least_bps: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Take in the reports of a round, by peer id, and what ``sent_at_least`` says of it. One witness is not
        believed where there could have been two."""
        for planned in plan.members:  # a round that says nothing counts, too: what a link once carried it may have lost
            self._least[planned.peer].append(least_bps.get(planned.peer, 0.0))
        rates: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for witness, report in reports.items():
            for one in report.deliveries:
                rates[one.member][witness] = one.bps
        traffic = Traffic(plan)
        for member, by_witness in rates.items():
            shares = traffic.shares(member)
            served = {plan.members[one].peer: shares[one] for one in collectors(plan, member)}
            values = [bps / served[witness] for witness, bps in by_witness.items() if witness in served]
            if len(values) >= min(2, len(served)) > 0:
                unclaimed = min(values) if len(values) == 2 else median_high(values)
                self._seen[plan.members[member].peer].append((unclaimed, median_high(values)))

    def believed(self, claims_bps: Mapping[str, float], counting: Collection[str] | None = None) -> dict[str, float]:
        """Bits a second of each of these members; 0 for unknown.

        A member may claim less than the others have seen of it, never more. Of whom nobody has seen anything yet is
        believed at most what is usual here: for those who are ``counting``, all for None."""
        counted = claims_bps.keys() if counting is None else set(counting)
        seen = {
            peer: max(median_low(figures[claims_bps[peer] > 0] for figures in rounds), self._at_least(peer))
            for peer, rounds in self._seen.items()
            if peer in claims_bps
        }
        # A member's first round opens its links as well: a figure that this may explain is the usual one.
        first = [peer for peer in seen if len(self._seen[peer]) == 1]
        known = [figure for peer, figure in seen.items() if peer in counted] or list(seen.values())
        shown = median_low(known) if known else 0.0
        seen |= {peer: max(seen[peer], shown) for peer in first if seen[peer] > shown / _SLOW_START}
        figures = [one for peer, claim in claims_bps.items() if peer in counted and (one := seen.get(peer, claim)) > 0]
        usual = median_high(figures) if figures else 0.0
        return _levelled({peer: _capped(claim, seen.get(peer), usual) for peer, claim in claims_bps.items()})

    def _at_least(self, peer: str) -> float:
        """Of two rounds the better one: the first of all warms everything up."""
        return median_high(self._least[peer]) if peer in self._least else 0.0


def sent_at_least(
    plan: RoundPlan, reports: Mapping[str, PeerToCoordinatorRoundReport], format_map: FormatMap, took_s: float
) -> dict[str, float]:
    """What each member must have sent, in bits a second, by peer id, for all to have everything after ``took_s``: since
    the first of them was ready, as some of it goes out then. Nothing where anything is missing."""
    members = [member.peer for member in plan.members]
    if took_s <= 0.0 or len(members) < 2:
        return {}
    for peer in members:
        report = reports.get(peer)
        if report is None or None in report.digests or report.dropped or report.failed:
            return {}
    elements, traffic = plan.parts[-1].stop, Traffic(plan)
    formats = format_map.contribution(0, elements), format_map.result(0, elements, len(members))
    packed_bytes = min(one.packed_bytes(elements) for one in formats)
    sent_bytes = {peer: packed_bytes * traffic.elements(index) / elements for index, peer in enumerate(members)}
    return {peer: 8 * size / took_s for peer, size in sent_bytes.items() if size >= _FEWEST_BYTES}


def _levelled(figures: Mapping[str, float]) -> dict[str, float]:
    """Those that are alike get the lower middle one of their figures; the fastest one's come first, then the rest's.
    So are all that are too fast to tell: what they have shown says how much they had to do, and whoever were given more
    because of it would show more still."""
    levelled: dict[str, float] = {}
    left = sorted(figures, key=lambda peer: (-figures[peer], peer))
    while left:
        fastest = min(figures[left[0]], FAST_BPS)
        alike = [peer for peer in left if figures[peer] * _ALIKE >= fastest]
        levelled |= dict.fromkeys(alike, median_low(figures[peer] for peer in alike))
        left = left[len(alike) :]
    return levelled


def collectors(plan: RoundPlan, member: int) -> set[int]:
    """Who collects this member's contribution: all owners, in a grid the row reducers of its row."""
    row = plan.members[member].row
    collectors = [column[row] for column in plan.columns] or [part.owner for part in plan.parts]
    return set(collectors) - {member}


def _capped(claim_bps: float, seen_bps: float | None, usual_bps: float) -> float:
    if seen_bps is None:
        return min(claim_bps, usual_bps)
    return min(claim_bps or seen_bps, seen_bps)
