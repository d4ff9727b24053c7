"""Two-level all-reduce for groups that would be too large: rows that reduce by themselves, joined down columns.

A grid of R rows gives the exact mean over all N members in one round with about 2 sqrt(N) connections a member: each
row reduces every part at one of its members, the part's *row reducer* there; one of the row reducers of a part, its
owner, adds up the rows' sums and gives the mean back to them. Each member moves the same bytes as in one flat group, 2
(N - 1) / N of its contribution. After the 2D-torus all-reduce of Mikami et al. 2018, "Massively Distributed SGD:
ImageNet/ResNet-50 Training in a Flash" (arXiv:1811.05233), here with rows of unequal size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.swarm.coordinator.partition import owner_shares, split


@dataclass(frozen=True)
class GridPart:
    """Elements ``start <= i < stop``: ``owner``, one of its column's row reducers, makes the mean; ``stand_ins``, in
    this order, are the others."""

    owner: int
    stand_ins: tuple[int, ...]
    column: int
    start: int
    stop: int


@dataclass(frozen=True)
class Grid:
    """``columns``: of each, its row reducer in every row. ``parts``: in the order of their elements."""

    columns: tuple[tuple[int, ...], ...]
    parts: tuple[GridPart, ...]


def fewest_rows(members: int, group_size: int) -> int:
    """How many rows there are to be, if enough members can own parts."""
    return 1 if members <= group_size else max(-(-members // group_size), math.isqrt(members))


def plan_rows(can_own: Sequence[bool], group_size: int, seed: int) -> list[list[int]]:
    """The members, 0 .. n - 1, in rows of about ``group_size`` at most, whose sizes differ by at most one.

    One row where all fit. Else about as many rows as columns, filled from a permutation drawn from ``seed``: who shares
    a row changes from round to round, so that a slow or hostile neighbour is nobody's for long. Every row gets as many
    of those that can own parts as any other, and one at least: where they are few, rows are longer.
    """
    members = range(len(can_own))
    if len(members) <= group_size:
        return [list(members)]
    draw = random.Random(seed)
    able = draw.sample(members, len(members))
    able.sort(key=lambda member: not can_own[member])  # stable: drawn among those that can, and among the others
    rows = min(fewest_rows(len(members), group_size), sum(can_own) or len(members))
    return [sorted(able[row::rows]) for row in range(rows)]


def plan_parts(
    rows: Sequence[Sequence[int]],
    bandwidths_bps: Sequence[float | None],
    can_own: Sequence[bool],
    elements: int,
    chunk: int,
) -> Grid:
    """The columns and parts of a round; parts on the grid of chunks.

    In each row the j-th fastest of those that can own is column j's row reducer, so that fast members meet fast ones; a
    row with fewer of them than there are columns takes some twice, one with none takes everybody. A column's share is
    that of its slowest row reducer; within it each of those that can own makes the mean of an equal share.
    """
    fastest = []
    for row in rows:
        able = [member for member in row if can_own[member]] or list(row)
        fastest.append(sorted(able, key=lambda member: (-(bandwidths_bps[member] or 0.0), member)))
    of_column = [tuple(row[column % len(row)] for row in fastest) for column in range(max(map(len, fastest)))]
    slowest = [_slowest([bandwidths_bps[member] for member in column]) for column in of_column]
    parts = []
    for column, start, stop in split(elements, owner_shares(slowest, [True] * len(of_column)), chunk):
        owners = [row_reducer for row_reducer in of_column[column] if can_own[row_reducer]] or list(of_column[column])
        for number, first, last in split(stop - start, [1 / len(owners)] * len(owners), chunk):
            # Rotated, so that the remainders of all columns do not fall on the first row.
            at = (number + column) % len(owners)
            stand_ins = (*owners[at + 1 :], *owners[:at])
            parts.append(GridPart(owners[at], stand_ins, column, start + first, start + last))
    return Grid(tuple(of_column), tuple(parts))


def _slowest(bandwidths_bps: Sequence[float | None]) -> float | None:
    known = [bps for bps in bandwidths_bps if bps]
    return min(known) if known else None
