"""Second replicas: a plan in which two members, of two networks if possible, hold each stage.

A stage's only replica is checked by nobody. Open runs, whose members do not know each other, have every stage held
twice before peers are spread for speed alone, as far as memory allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from shoal.swarm.pipeline.planner.model import Flags, Indices, SpanTable
from shoal.swarm.pipeline.planner.solver import assign

_EMPTY, _ALONE, _ONE_NETWORK = 10_000, 100, 1
"""Cost of a stage without a replica, with one, and with several of one network only."""

_COMPARED = 64
"""Changes of equal cost whose rates are compared."""


class SecondReplicas:
    """Cost of assignments by what their stages lack, and changes that lower it.

    ``networks``: ``(peers,)``; "" for one that is not known, which counts as the same as any other unknown one."""

    def __init__(self, table: SpanTable, networks: Sequence[str]) -> None:
        self._table = table
        names = sorted(set(networks))
        self._network = np.array([names.index(one) for one in networks], dtype=np.int64)
        self._networks = len(names)
        stages = np.arange(table.stages)
        self._covers = (table.first[:, None] <= stages) & (stages <= table.last[:, None])

    def cost(self, choice: Indices) -> int:
        """Cost of what the stages lack under ``choice``, ``(peers,)``; 0 if each has replicas of two networks."""
        holders, by_network = self._held(choice)
        return int(_cost(holders, (by_network > 0).sum(axis=0)).sum())

    def spread(self, movable: Flags) -> Indices:
        """Assign two groups of peers, of different networks, each to all stages by itself."""
        groups: list[list[int]] = [[], []]
        strength = self._table.rates.max(axis=1, initial=0.0)
        by_network: dict[int, list[int]] = defaultdict(list)
        for peer in np.argsort(-strength, kind="stable"):
            by_network[int(self._network[peer])].append(int(peer))
        units = list(by_network.values()) if len(by_network) > 1 else [[one] for one in by_network.get(0, [])]
        for unit in sorted(units, key=lambda one: -float(strength[one].sum())):
            min(groups, key=lambda group: float(strength[group].sum())).extend(unit)
        choice = np.full(len(strength), -1, dtype=np.int64)
        for group in groups:
            mask = np.zeros(len(strength), dtype=np.bool_)
            mask[group] = True
            part = assign(self._table, None, mask & movable)
            choice[group] = part[group]
        return choice

    def improved(self, choice: Indices, movable: Flags, most: int | None = None) -> Indices:
        """Change the spans of ``movable`` peers, one after the other, as long as that lowers the cost.

        ``most``: the most changes. Of equally good ones the first is made that leaves the plan fastest."""
        choice = choice.copy()
        for _ in range(2 * len(choice) if most is None else most):
            change = self._best_change(choice, movable)
            if change is None:
                break
            peer, span = change
            choice[peer] = span
        return choice

    def _best_change(self, choice: Indices, movable: Flags) -> tuple[int, int] | None:
        holders, by_network = self._held(choice)
        best = now = int(_cost(holders, (by_network > 0).sum(axis=0)).sum())
        found: list[tuple[int, int]] = []
        for peer in np.flatnonzero(movable):
            network, others, theirs = self._network[peer], holders, by_network
            if choice[peer] >= 0:
                own = self._covers[choice[peer]]
                others, theirs = holders - own, by_network.copy()
                theirs[network] -= own
            present = (theirs > 0).sum(axis=0)
            without = _cost(others, present)
            gain = without - _cost(others + 1, present + (theirs[network] == 0))
            after = without.sum() - self._covers @ gain
            after[self._table.rates[peer] <= 0] = np.iinfo(np.int64).max
            least = int(after.min())
            if least < best:
                best, found = least, []
            if least == best and least < now:
                found += [(int(peer), int(span)) for span in np.flatnonzero(after == least)]
        if not found:
            return None
        return max(found[:_COMPARED], key=lambda change: self._rate_after(choice, change))

    def _rate_after(self, choice: Indices, change: tuple[int, int]) -> float:
        after = choice.copy()
        after[change[0]] = change[1]
        return self._table.rate(after)

    def _held(self, choice: Indices) -> tuple[Indices, Indices]:
        """Number of replicas, ``(stages,)``, and the same by network, ``(networks, stages)``."""
        by_network = np.zeros((self._networks, self._table.stages), dtype=np.int64)
        placed = np.flatnonzero(choice >= 0)
        np.add.at(by_network, self._network[placed], self._covers[choice[placed]])
        return by_network.sum(axis=0), by_network


def _cost(holders: Indices, networks: Indices) -> Indices:
    """``(stages,)``: cost of stages with so many replicas in so many networks."""
    costs: Indices = np.where(
        holders == 0, _EMPTY, np.where(holders == 1, _ALONE, np.where(networks == 1, _ONE_NETWORK, 0))
    ).astype(np.int64)
    return costs
