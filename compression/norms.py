"""Squared L2 norms of float32 vectors, by tiles: quick on any device, right for values of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shoal.compression.range_reader import RangeReader
from shoal.compression.scratch import scratch

_TILE = 1 << 15
"""A tile of this size stays in the cache, and torch uses a single thread for it."""

_READ = 1 << 18
"""Values that are read at a time."""

_CPU = torch.device("cpu")

RELATIVE_ERROR = 2.0**-9
"""Bound on the relative error of a squared norm: that of a float32 sum over a tile, whatever its order."""

_SMALL, _LARGE = 2.0**-80, 2.0**120
"""Bounds of sums whose float32 squares neither overflow nor underflow so as to matter."""


def squared_norm(values: Tensor) -> float:
    """Return the squared norm of ``(n,) float32``; NaN or infinity when a value is."""
    return sum(_of_tile(values[start : start + _TILE]) for start in range(0, values.numel(), _TILE))


def norms_of(values: Tensor, ranges: Iterable[tuple[int, int]]) -> list[float]:
    """Return the L2 norm of each range ``start <= i < stop`` of ``(n,) float32``, never too small."""
    return [_bound(squared_norm(values[start:stop])) for start, stop in ranges]


def norms_of_reader(reader: RangeReader, ranges: Iterable[tuple[int, int]]) -> list[float]:
    """Return ``norms_of`` the values of a reader, of which 2**18 at a time are in memory."""
    return [_bound(math.fsum(_squares(reader, start, stop))) for start, stop in ranges]


def _bound(square: float) -> float:
    """Return a norm that is never too small, from its computed square."""
    return math.sqrt(square * (1.0 + RELATIVE_ERROR))


def _squares(reader: RangeReader, start: int, stop: int) -> Iterator[float]:
    for at in range(start, stop, _READ):
        values = scratch("norms", min(_READ, stop - at), _CPU)
        reader.read(at, at + values.numel(), values)
        yield squared_norm(values)


def _of_tile(values: Tensor) -> float:
    squares = float(torch.dot(values, values))
    if _SMALL < squares < _LARGE:
        return squares
    return float(values.double().square_().sum())
