"""The search for the best cut with its assignment: seeds, then boundaries shifted, or all of them tried (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from math import comb
from typing import TypeAlias

import numpy as np

from shoal.swarm.pipeline.planner.assigning import LARGE, assign, in_pairs, prices
from shoal.swarm.pipeline.planner.covering import cover
from shoal.swarm.pipeline.planner.cutting import Ranges, neighbours
from shoal.swarm.pipeline.planner.exact import Budget, best_of
from shoal.swarm.pipeline.planner.span_rates import Indices, SpanTable, Swarm

Found: TypeAlias = tuple[SpanTable, Indices]

EXACT_CUTS = 300
"""Up to so many cuts, of up to so many peers, are searched for the certain optimum."""
EXACT_PEERS = 8
EXACT_LAYERS = 8
NUMBERS, NUMBERS_OF_LARGE = 6, 3
"""Of stages that are tried with "auto", besides some special ones: those that look best."""
REFINED, REFINED_OF_LARGE = 3, 1
"""Of those: the ones with the best seeds."""
EXACT_NODES = 4_000
"""Assignments, whole or begun, that it may look at for one number of stages."""
EFFORT = 300_000
"""For shifting boundaries at one number of stages: about as many microseconds. Counted and not timed, so that equal
inputs give equal plans."""


class Search:
    """Of one swarm, for any number of stages."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.ranges = Ranges(swarm)
        self.is_large = len(swarm.peers) >= LARGE
        self.is_small = len(swarm.peers) <= EXACT_PEERS and swarm.layers <= EXACT_LAYERS

    def numbers(self) -> list[int]:
        """Of stages to try: all in a small swarm, else those that look best when peers share their time."""
        peers, layers = len(self.swarm.peers), self.swarm.layers
        if self.is_small:
            return list(range(1, layers + 1))
        # The spans of so many peers begin and end at so many boundaries at most.
        most = min(layers, max(2 * peers - 1, 1))
        costs, _ = self.ranges.cuts(self.ranges.cost, most, add=True)
        ranked = [count for count in range(1, most + 1) if np.isfinite(costs[count - 1])]
        ranked.sort(key=lambda count: (float(costs[count - 1]), count))
        chosen = ranked[: NUMBERS_OF_LARGE if self.is_large else NUMBERS]
        if not self.is_large:
            # As many stages as peers, or nearly: where everybody can hold but a little, that is the only way.
            chosen += [count for count in (peers, peers - 1, peers // 2) if 1 <= count <= most]
        return sorted(set(chosen))

    def promising(self, rates: Mapping[int, float]) -> list[int]:
        """Of the numbers tried, with the rates of their seeds, those to refine."""
        if self.is_small:
            return sorted(rates)
        ranked = sorted(rates, key=lambda count: (-rates[count], count))
        return sorted(ranked[: REFINED_OF_LARGE if self.is_large else REFINED])

    def seed(self, stages: int) -> Found | None:
        """The best of a few cuts."""
        found: Found | None = None
        for cut, start in self._seeds(stages):
            found = self._better(cut, found, start)
        return found

    def refined(self, stages: int, found: Found | None, effort: int) -> Found | None:
        """The best there is in a small swarm, and as good as the effort allows in a large one."""
        cuts = comb(self.swarm.layers - 1, stages - 1)
        if found is not None:
            found = self._in_pairs(self._shifted(found, effort))
        if cuts <= EXACT_CUTS and 0 < len(self.swarm.peers) <= EXACT_PEERS:
            inner = combinations(range(1, self.swarm.layers), stages - 1)
            tables = (self.swarm.table((0, *cut, self.swarm.layers)) for cut in inner)
            found = best_of(tables, found, Budget(EXACT_NODES))
        return found

    def _seeds(self, stages: int) -> Iterable[tuple[tuple[int, ...], Indices | None]]:
        for cut, pieces in self.ranges.chains(stages):
            choice = np.full(len(self.swarm.peers), -1, dtype=np.int64)
            for row, start, stop in pieces:
                first, last = cut.index(start), cut.index(stop) - 1
                choice[row] = first * stages - first * (first - 1) // 2 + last - first
            yield cut, choice
        cuts: dict[tuple[int, ...], None] = {}
        kinds = [(self.ranges.cost, True), (self.ranges.least_bytes, False), (self.ranges.cost, False)]
        for costs, add in kinds if not self.is_large else kinds[:2]:
            if (cut_found := self.ranges.cuts(costs, stages, add=add)[1][-1]) is not None:
                cuts[cut_found] = None
        yield from cuts.items()

    def _better(self, cut: tuple[int, ...], found: Found | None, start: Indices | None = None) -> Found | None:
        """With this cut, if that is faster; what was found before otherwise."""
        table = self.swarm.table(cut)
        rate = found[0].rate(found[1]) if found else 0.0
        _, bound = prices(table, steps=5)
        if bound <= rate:
            return found
        if start is not None:
            # Spans keep their numbers when a boundary shifts, but may not fit any more.
            fits = (start >= 0) & (table.rates[np.arange(len(start)), start] > 0)
            start = np.where(fits, start, -1)
        choice = assign(table, start)
        if table.rate(choice) <= 0 and found is None and (covering := cover(table, choice)) is not None:
            choice = assign(table, covering)
        return (table, choice) if table.rate(choice) > rate else found

    def _in_pairs(self, found: Found) -> Found:
        table, choice = found
        return table, in_pairs(table, choice)

    def _shifted(self, found: Found, effort: int) -> Found:
        """Shift single boundaries, those of the slowest stage first, as long as that helps and effort is left."""
        table, choice = found
        each = 1_500 + len(self.swarm.peers) * (200 + table.rates.shape[1] // 2)
        improved = True
        while improved and effort >= each:
            improved = False
            for cut in _shifts(table, choice):
                if (effort := effort - each) < 0:
                    break
                better = self._better(cut, (table, choice), choice)
                if better is not None and better[0] is not table:
                    (table, choice), improved = better, True
                    break
        return table, choice


def _shifts(table: SpanTable, choice: Indices) -> Iterator[tuple[int, ...]]:
    load = table.load(choice)
    by_need = sorted(range(1, table.stages), key=lambda at: (min(load[at - 1], load[at]), at))
    for at in by_need:
        yield from neighbours(table.boundaries, at)
