"""The best plan of a small swarm for certain: branch and bound over all cuts and assignments (pure)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal.swarm.pipeline.planner.assigning import prices
from shoal.swarm.pipeline.planner.span_rates import Floats, Indices, SpanTable

MORE = 1 + 1e-9
"""Clearly faster: sums that are rounded differently are not."""


class Budget:
    """How many more nodes may be looked at; counted and not timed, so that equal inputs give equal plans."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def take(self) -> bool:
        """One; False if none is left."""
        self.nodes -= 1
        return self.nodes >= 0


def best_of(
    tables: Iterable[SpanTable], found: tuple[SpanTable, Indices] | None, budget: Budget
) -> tuple[SpanTable, Indices] | None:
    """The fastest assignment to any of the tables, or what was ``found`` before if none is clearly faster.

    It is the best there is if the budget has nodes left afterwards.
    """
    rate = found[0].rate(found[1]) if found else 0.0
    bounded = [(prices(table), table) for table in tables]
    for (weights, bound), table in sorted(bounded, key=lambda one: (-one[0][1], one[1].boundaries)):
        if bound <= rate * MORE:
            break
        choice = _Search(table, weights, rate, budget).run()
        if choice is not None:
            found, rate = (table, choice), table.rate(choice)
    return found


class _Search:
    """Depth first over peers, the strongest first, and each one's spans."""

    def __init__(self, table: SpanTable, weights: Floats, rate: float, budget: Budget) -> None:
        self._table, self._weights, self._budget = table, weights, budget
        self._rate = rate
        self._best: Indices | None = None
        self._order = [int(one) for one in np.argsort(-table.rates.max(axis=1), kind="stable")]
        worth = np.concatenate([[0.0], np.cumsum(weights)])
        values = table.rates * (worth[table.last + 1] - worth[table.first])
        stages = np.arange(table.stages)
        covers = (table.first[:, None] <= stages) & (stages <= table.last[:, None])
        by_stage = (table.rates[:, :, None] * covers).max(axis=1)
        # After the first n of the order: what the others can add to the priced sum, and to each stage, at most.
        self._values_left = _remaining(values.max(axis=1)[self._order])
        self._load_left = _remaining(by_stage[self._order])
        # Those that can hold nothing go on with "none".
        self._options = [np.flatnonzero(table.rates[peer] > 0) for peer in self._order]
        self._ranked = [
            [int(one) for one in options[np.argsort(-values[peer, options], kind="stable")]]
            for peer, options in zip(self._order, self._options, strict=True)
        ]

    def run(self) -> Indices | None:
        """An assignment that is clearly faster than the given rate; None if none was found."""
        self._descend(0, np.zeros(self._table.stages), np.full(len(self._order), -1, dtype=np.int64))
        return self._best

    def _descend(self, depth: int, load: Floats, choice: Indices) -> None:
        if depth == len(self._order):
            if (rate := float(load.min())) > self._rate * MORE:
                self._rate, self._best = rate, choice.copy()
            return
        peer = self._order[depth]
        for span in [*self._ranked[depth]] or [-1]:
            if not self._budget.take():
                return
            new = load
            if span >= 0:
                new = load.copy()
                new[self._table.first[span] : self._table.last[span] + 1] += self._table.rates[peer, span]
            priced = float(new @ self._weights) + self._values_left[depth + 1]
            each = float((new + self._load_left[depth + 1]).min())
            if min(priced, each) <= self._rate * MORE:
                continue
            choice[peer] = span
            self._descend(depth + 1, new, choice)
            choice[peer] = -1


def _remaining(values: Floats) -> Floats:
    """``(n + 1, ...)``: sums of what stands at and after each place."""
    summed = np.cumsum(values[::-1], axis=0)[::-1]
    return np.concatenate([summed, np.zeros((1, *values.shape[1:]))])
