"""Every stage held by somebody, with as few peers moved as possible (pure)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.swarm.pipeline.planner.exact import Budget
from shoal.swarm.pipeline.planner.span_rates import Flags, Indices, SpanTable

NODES = 20_000
"""Moves that the search may try; small swarms need far fewer."""
MOST_WAYS = 200
"""Ways to do it with equally few moves, of which the fastest is taken."""


def cover(table: SpanTable, choice: Indices, tired: Flags | None = None) -> Indices | None:
    """``choice`` with the fewest peers that had a span moved such that no stage is empty.

    Among equally few moves: the fewest of the ``tired``, who have just moved; then the highest rate; then the first
    peers. None: there is no way, or none was found by a search that would have taken too long.
    """
    tired = np.zeros(len(choice), dtype=np.bool_) if tired is None else tired
    holders = np.zeros(table.stages, dtype=np.int64)
    for span in choice[choice >= 0]:
        holders[table.first[span] : table.last[span] + 1] += 1
    search = _Cover(table, choice, Budget(NODES))
    for moves in range(int((choice >= 0).sum()) + 1):
        if search.budget.nodes <= 0:
            break
        best, best_score = None, (-len(choice), -1.0)
        for count, way in enumerate(search.ways(moves, choice.copy(), holders)):
            changed = (choice >= 0) & (way != choice)
            score = (-int((changed & tired).sum()), table.rate(way))
            if score > best_score:
                best, best_score = way, score
            if count >= MOST_WAYS:
                break
        if best is not None:
            return best
    return None


class _Cover:
    """Depth first: the first empty stage gets each peer that can take it, then the next one that is empty."""

    def __init__(self, table: SpanTable, start: Indices, budget: Budget) -> None:
        self._table, self.budget = table, budget
        self._placed: Flags = start >= 0
        # By stage: who could cover it by which of the longest spans (shorter ones cover nothing more).
        fits = table.rates > 0
        self._options: list[list[tuple[int, int]]] = [[] for _ in range(table.stages)]
        for row in range(len(fits)):
            for span in _longest(table, np.flatnonzero(fits[row])):
                for stage in range(table.first[span], table.last[span] + 1):
                    self._options[stage].append((row, span))
        # Those without a place first, they cost no move; then those whose leaving leaves nothing empty.

    def ways(
        self, moves: int, choice: Indices, holders: Indices, touched: frozenset[int] = frozenset()
    ) -> Iterator[Indices]:
        """All that need at most so many more moves and touch no peer twice."""
        empty = np.flatnonzero(holders == 0)
        if not len(empty):
            yield choice.copy()
            return
        for row, span in self._in_order(int(empty[0]), choice, holders):
            if row in touched or moves < int(self._placed[row]):
                continue
            if not self.budget.take():
                return
            old = int(choice[row])
            after = holders.copy()
            if old >= 0:
                after[self._table.first[old] : self._table.last[old] + 1] -= 1
            after[self._table.first[span] : self._table.last[span] + 1] += 1
            choice[row] = span
            yield from self.ways(moves - int(self._placed[row]), choice, after, touched | {row})
            choice[row] = old

    def _in_order(self, stage: int, choice: Indices, holders: Indices) -> list[tuple[int, int]]:
        # Those without a place first, they cost no move; then those whose leaving leaves nothing empty.
        def harm(option: tuple[int, int]) -> tuple[int, int]:
            row = option[0]
            if not self._placed[row]:
                return 0, 0
            old = int(choice[row])
            left = int((holders[self._table.first[old] : self._table.last[old] + 1] == 1).sum()) if old >= 0 else 0
            return 1, left

        return sorted(self._options[stage], key=harm)


def _longest(table: SpanTable, spans: Indices) -> list[int]:
    """Those that lie in no other one."""
    made: list[int] = []
    for span in sorted((int(one) for one in spans), key=lambda one: (table.first[one], -table.last[one])):
        if not made or table.last[span] > table.last[made[-1]]:
            made.append(span)
    return made
