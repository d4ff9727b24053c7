"""Who averages with whom when one group would be too large: rows that reduce by themselves, joined down columns.

A grid of R rows gives the exact mean over all N members in one round with about 2 sqrt(N) connections a member: each
row reduces every part at one of its members, the part's *relay* there; the relays of a part, one a row, add up their
rows' sums between them (each for its share of the part) and bring the means back. Each member moves the same bytes as
in one flat group, 2 (N - 1) / N of its contribution. After the 2D-torus all-reduce of Mikami et al. 2018, "Massively
Distributed SGD: ImageNet/ResNet-50 Training in a Flash" (arXiv:1811.05233), here with rows of unequal size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.swarm.averaging.partition import owner_shares, split


@dataclass(frozen=True)
class GridPart:
    """Elements ``start <= i < stop``: ``relays`` has a member for each row; ``owner``, one of them, makes the mean."""

    owner: int
    relays: tuple[int, ...]
    start: int
    stop: int


def plan_rows(members: int, group_size: int, seed: int) -> list[list[int]]:
    """The members, 0 .. n - 1, in rows of at most ``group_size``, whose sizes differ by at most one.

    One row where all fit. Else about as many rows as columns, filled from a permutation drawn from ``seed``: who shares
    a row changes from round to round, so that a slow or hostile neighbour is nobody's for long.
    """
    if members <= group_size:
        return [list(range(members))]
    rows = max(-(-members // group_size), math.isqrt(members))
    order = list(range(members))
    random.Random(seed).shuffle(order)
    return [sorted(order[row::rows]) for row in range(rows)]


def plan_parts(
    rows: Sequence[Sequence[int]],
    bandwidths_bps: Sequence[float | None],
    can_own: Sequence[bool],
    elements: int,
    chunk: int,
) -> list[GridPart]:
    """The parts of a round, in the order of their elements, on the grid of chunks.

    In each row the j-th fastest of those that can own is column j's, so that fast members meet fast ones; a row with
    fewer of them than there are columns takes some twice, one with none takes everybody. A column's share is that of
    its slowest member; within it each row's member makes the mean of an equal share.
    """
    fastest = []
    for row in rows:
        able = [member for member in row if can_own[member]] or list(row)
        fastest.append(sorted(able, key=lambda member: (-(bandwidths_bps[member] or 0.0), member)))
    columns = max(len(row) for row in fastest)
    of_column = [tuple(row[column % len(row)] for row in fastest) for column in range(columns)]
    slowest = [_slowest([bandwidths_bps[member] for member in column]) for column in of_column]
    parts = []
    for column, start, stop in split(elements, owner_shares(slowest, [True] * columns), chunk):
        relays = of_column[column]
        equal = [1 / len(relays)] * len(relays)
        for number, first, last in split(stop - start, equal, chunk):
            # Rotated, so that the remainders of all columns do not fall on the first row.
            owner = relays[(number + column) % len(relays)]
            parts.append(GridPart(owner, relays, start + first, start + last))
    return parts


def _slowest(bandwidths_bps: Sequence[float | None]) -> float | None:
    known = [bps for bps in bandwidths_bps if bps]
    return min(known) if known else None
