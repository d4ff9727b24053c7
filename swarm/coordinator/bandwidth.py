"""Estimates of the members' bandwidths, from what other members received from each, not from its own claim."""

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
"""Fewer bytes say more about delays than about a link."""

_ALIKE = 1.3
"""Links whose figures differ by no more than this factor count as equal: rounds show no more exact figures, and the
best shares of owners differ several times as much as their links."""


class Bandwidths:
    """Bandwidths that rounds have shown, by peer id. They are kept when a member leaves, as it may come back.

    Each round gives one figure for a member: the median, over those who collect from it, of the rate at which they
    received, divided by their share of all that the member sent, as it serves all of them at the same time. Of two
    values in the middle the faster one counts, as the slower receiver may have a slow link itself. Of two values in all
    the slower one counts for a member that claims nothing, as nothing else bounds the faster one. So only a majority of
    the members together can make a member look faster than it is. The estimate is the median of the last three rounds,
    and the lower of two: one odd round changes little, and a link that became slow is recognized after two rounds.

    No link is estimated slower than what it carried in a round without failures (``sent_at_least``), as a receiver
    cannot distinguish a slow link from a busy processor.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_ROUNDS))
        """Of each round: the figure for a member without a claim, and the one for a member with a claim."""
        self._least: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_ROUNDS))

    def learn(
        self,
        plan: RoundPlan,
        reports: Mapping[str, PeerToCoordinatorRoundReport],
        least_bps: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Learn from a round. ``reports``: by peer id; ``least_bps``: the result of ``sent_at_least``. A single witness
        is not believed where there could have been two."""
        for planned in plan.members:  # also in rounds without a figure, as a link may have become slower since
            self._least[planned.peer].append(least_bps.get(planned.peer, 0.0))
        traffic = Traffic(plan)
        for member, by_witness in delivered_bps(plan, reports).items():
            values = sending_bps(plan, traffic, member, by_witness)
            if len(values) >= min(2, len(collectors(plan, member))) > 0:
                unclaimed = min(values) if len(values) == 2 else median_high(values)
                self._seen[plan.members[member].peer].append((unclaimed, median_high(values)))

    def believed(self, claims_bps: Mapping[str, float], counting: Collection[str] | None = None) -> dict[str, float]:
        """Return the believed bandwidth of each member in bits a second; 0 if unknown. ``claims_bps``: own figures.

        A claim may be lower than what others have seen, and never counts for more. Of a member that nobody has seen
        sending, at most the usual figure is believed: that of the members in ``counting``; of all for None."""
        counted = claims_bps.keys() if counting is None else set(counting)
        seen = {
            peer: max(median_low(figures[claims_bps[peer] > 0] for figures in rounds), self._at_least(peer))
            for peer, rounds in self._seen.items()
            if peer in claims_bps
        }
        # In its first round a member also opens its links; a figure that this explains is raised to the usual one.
        first = [peer for peer in seen if len(self._seen[peer]) == 1]
        known = [figure for peer, figure in seen.items() if peer in counted] or list(seen.values())
        shown = median_low(known) if known else 0.0
        seen |= {peer: max(seen[peer], shown) for peer in first if seen[peer] > shown / _SLOW_START}
        figures = [one for peer, claim in claims_bps.items() if peer in counted and (one := seen.get(peer, claim)) > 0]
        usual = median_high(figures) if figures else 0.0
        return _levelled({peer: _capped(claim, seen.get(peer), usual) for peer, claim in claims_bps.items()})

    def _at_least(self, peer: str) -> float:
        """Return the median of the last rounds; of two the higher one, as the run's first round is slow."""
        return median_high(self._least[peer]) if peer in self._least else 0.0


def delivered_bps(plan: RoundPlan, reports: Mapping[str, PeerToCoordinatorRoundReport]) -> dict[int, dict[str, float]]:
    """Return the rates at which each member of the plan delivered, in bits a second, by the peer that received."""
    rates: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for witness, report in reports.items():
        for one in report.deliveries:
            rates[one.member][witness] = one.bps
    return dict(rates)


def sending_bps(plan: RoundPlan, traffic: Traffic, member: int, by_witness: Mapping[str, float]) -> list[float]:
    """Return the rate at which a member sent to all, as each of its collectors saw it: its own, by its share."""
    shares = traffic.shares(member)
    # A column of slow members may have no part, and nobody sends to those that would collect it.
    served = {plan.members[one].peer: shares[one] for one in collectors(plan, member) if shares.get(one)}
    return [bps / served[witness] for witness, bps in by_witness.items() if witness in served]


def sent_bytes(plan: RoundPlan, format_map: FormatMap) -> dict[str, float]:
    """Return how much each member sends in a round without failures, by peer id."""
    elements, traffic = plan.parts[-1].stop, Traffic(plan)
    formats = format_map.contribution(0, elements), format_map.result(0, elements, len(plan.members))
    packed_bytes = min(one.packed_bytes(elements) for one in formats)
    return {one.peer: packed_bytes * traffic.elements(index) / elements for index, one in enumerate(plan.members)}


def sent_at_least(
    plan: RoundPlan, reports: Mapping[str, PeerToCoordinatorRoundReport], format_map: FormatMap, took_s: float
) -> dict[str, float]:
    """Return the least rate at which each member must have sent, in bits a second by peer id, as all members had
    everything after ``took_s``, counted from when the first was ready. Empty if anything of the round is missing."""
    members = [member.peer for member in plan.members]
    if took_s <= 0.0 or len(members) < 2:
        return {}
    for peer in members:
        report = reports.get(peer)
        if report is None or None in report.digests or report.dropped or report.failed:
            return {}
    return {peer: 8 * size / took_s for peer, size in sent_bytes(plan, format_map).items() if size >= _FEWEST_BYTES}


def _levelled(figures: Mapping[str, float]) -> dict[str, float]:
    """Give members with similar figures the lower median of these figures, beginning with the fastest member's group.

    All members above ``FAST_BPS`` are one group: their figures only show how much they had to send, and members that
    were given more because of it would show even higher ones."""
    levelled: dict[str, float] = {}
    left = sorted(figures, key=lambda peer: (-figures[peer], peer))
    while left:
        fastest = min(figures[left[0]], FAST_BPS)
        alike = [peer for peer in left if figures[peer] * _ALIKE >= fastest]
        levelled |= dict.fromkeys(alike, median_low(figures[peer] for peer in alike))
        left = left[len(alike) :]
    return levelled


def collectors(plan: RoundPlan, member: int) -> set[int]:
    """Return the members that collect this one's contribution: all owners, in a grid the row reducers of its row."""
    row = plan.members[member].row
    collectors = [column[row] for column in plan.columns] or [part.owner for part in plan.parts]
    return set(collectors) - {member}


def _capped(claim_bps: float, seen_bps: float | None, usual_bps: float) -> float:
    if seen_bps is None:
        return min(claim_bps, usual_bps)
    return min(claim_bps or seen_bps, seen_bps)
