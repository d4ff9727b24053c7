"""Where to cut the layers into stages: candidates by dynamic programs over all ranges of layers (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from shoal.swarm.pipeline.planner.span_rates import Floats, Indices, Swarm

Piece: TypeAlias = tuple[int, int, int]
"""A peer's row, and the layers [start, stop) that it holds."""

CHAIN_PEERS = 48
"""Up to so many peers are tried as a chain in which each holds a piece of its own; more make replicas anyway."""


class Ranges:
    """All ranges of layers, and how fast every peer would be as the holder of one."""

    def __init__(self, swarm: Swarm) -> None:
        self.layers = swarm.layers
        starts, stops = np.triu_indices(swarm.layers + 1, k=1)
        self.starts, self.stops = starts.astype(np.int64), stops.astype(np.int64)
        self.rates, _ = swarm.stages(self.starts, self.stops)
        self.least_bytes = swarm.least_bytes(self.starts, self.stops)
        total = self.rates.sum(axis=0)
        # If peers shared their time among the stages, these fractions of it would add up to 1 / the plan's rate.
        self.cost = np.divide(1.0, total, out=np.full(len(total), np.inf), where=total > 0)

    def square(self, values: Floats, missing: float) -> Floats:
        """``(layers + 1, layers + 1)``: by start and stop."""
        made = np.full((self.layers + 1, self.layers + 1), missing)
        made[self.starts, self.stops] = values
        return made

    def cuts(self, costs: Floats, most: int, *, add: bool) -> tuple[Floats, list[tuple[int, ...] | None]]:
        """The cheapest cut into 1 to ``most`` stages, by the sum (``add``) or the largest of the stages' costs.

        Costs ``(most,)``, infinite where there is no cut; cuts as boundaries.
        """
        square = self.square(costs, np.inf)
        reached = square[0].copy()
        origins: list[Indices] = []
        totals = np.full(most, np.inf)
        found: list[tuple[int, ...] | None] = [None] * most
        for count in range(1, most + 1):
            if count > 1:
                both = reached[:, None] + square if add else np.maximum(reached[:, None], square)
                origins.append(both.argmin(axis=0).astype(np.int64))
                reached = both.min(axis=0)
            totals[count - 1] = reached[self.layers]
            if np.isfinite(reached[self.layers]):
                found[count - 1] = _backwards(self.layers, origins)
        return totals, found

    def chains(self, stages: int) -> Iterator[tuple[tuple[int, ...], list[Piece]]]:
        """Cuts for peers that stand in a row, in several orders, each with a piece of its own or none.

        Fewer pieces than stages: boundaries are added in the middle of the longest.
        """
        peers = len(self.rates)
        if not 0 < peers <= CHAIN_PEERS:
            return
        squares = [self.square(rates, 0.0) for rates in self.rates]
        reach = (self.rates > 0).sum(axis=1)
        whole = self.rates.max(axis=1)
        orders = [np.argsort(-reach, kind="stable"), np.argsort(-whole, kind="stable")]
        for order in [*orders, *(one[::-1] for one in orders), np.arange(peers)]:
            pieces = self._chain([int(one) for one in order], squares, stages)
            if pieces:
                yield _halved([0, *(stop for _, _, stop in pieces)], stages), pieces

    def _chain(self, order: Sequence[int], squares: Sequence[Floats], stages: int) -> list[Piece]:
        """The best chain of at most so many pieces; none if there is no chain."""
        size = self.layers + 1
        pieces = min(stages, len(order))
        rates = np.zeros((pieces + 1, size))
        rates[0, 0] = np.inf
        origins = np.full((len(order), pieces + 1, size), -1, dtype=np.int64)
        for place, peer in enumerate(order):
            both = np.minimum(rates[:-1, :, None], squares[peer])
            with_it = both.max(axis=1)
            better = with_it > rates[1:]
            origins[place, 1:][better] = both.argmax(axis=1)[better]
            rates[1:] = np.where(better, with_it, rates[1:])
        count, at = int(rates[:, -1].argmax()), self.layers
        chain: list[Piece] = []
        if rates[count, -1] <= 0:
            return chain
        for place in range(len(order) - 1, -1, -1):
            if count and (origin := int(origins[place, count, at])) >= 0:
                chain.append((order[place], origin, at))
                at, count = origin, count - 1
        return chain[::-1]


def _halved(cut: list[int], stages: int) -> tuple[int, ...]:
    while len(cut) - 1 < stages:
        longest = max(range(len(cut) - 1), key=lambda at: cut[at + 1] - cut[at])
        cut.insert(longest + 1, (cut[longest] + cut[longest + 1]) // 2)
    return tuple(cut)


def _backwards(layers: int, origins: Sequence[Indices]) -> tuple[int, ...]:
    cut = [layers]
    for origin in reversed(origins):
        cut.append(int(origin[cut[-1]]))
    return (0, *reversed(cut))


def neighbours(cut: tuple[int, ...], at: int) -> Iterator[tuple[int, ...]]:
    """The cuts in which one boundary, not the first nor the last, lies elsewhere; near ones first."""
    low, high = cut[at - 1] + 1, cut[at + 1] - 1
    for place in sorted(range(low, high + 1), key=lambda one: (abs(one - cut[at]), one)):
        if place != cut[at]:
            yield (*cut[:at], place, *cut[at + 1 :])
