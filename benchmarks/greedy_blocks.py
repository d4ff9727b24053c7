"""Petals' rule for the placement of blocks, on the planner's inputs, to compare the plan with.

Borzunov et al. 2022, arXiv:2209.01188: a server that joins takes as many consecutive blocks as it has memory for, where
the sorted throughputs of the blocks are least; servers move likewise once the swarm has got unbalanced. Here a block is
a stage, and its throughput the sum of what its replicas give, by the planner's own rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.swarm.pipeline.planner.model import SpanTable

MOST_ROUNDS = 10
"""Of moves, each of all servers in turn. Petals goes on until nobody moves; that need not come to an end."""


def greedy(table: SpanTable, order: Sequence[int], most_blocks: int | None = None) -> NDArray[np.int64]:
    """``(peers,)`` indices of spans, -1 for a server without memory for any block.

    ``order``: in which they join. ``most_blocks``: that many at most, instead of as many as the memory allows.
    """
    choice = np.full(len(table.rates), -1, dtype=np.int64)
    load = np.zeros(table.stages)
    best, best_rate = choice.copy(), 0.0
    for rounds in range(MOST_ROUNDS):
        moved = False
        for peer in order:
            old = int(choice[peer])
            if old >= 0:
                load[table.first[old] : table.last[old] + 1] -= table.rates[peer, old]
            new = where_least(table, load, peer, most_blocks)
            moved, choice[peer] = moved or new != old, new
            if new >= 0:
                load[table.first[new] : table.last[new] + 1] += table.rates[peer, new]
        # A move is only made if the whole is no slower for it.
        if rounds == 0 or table.rate(choice) > best_rate:
            best, best_rate = choice.copy(), table.rate(choice)
        if not moved:
            break
    return best


def where_least(table: SpanTable, load: NDArray[np.float64], peer: int, most_blocks: int | None) -> int:
    """Index of the span that this server takes, given the others' load; -1 if none fits."""
    lengths = table.last - table.first + 1
    fits = table.rates[peer] > 0
    if most_blocks is not None:
        fits &= lengths <= most_blocks
    if not fits.any():
        return -1
    spans = np.flatnonzero(fits & (lengths == lengths[fits].max()))
    # Rounded: sums in another order must not decide.
    windows = [tuple(np.sort(load[table.first[one] : table.last[one] + 1]).round(9)) for one in spans]
    return int(spans[min(range(len(spans)), key=lambda at: (windows[at], at))])
