"""Squared L2 norms of float32 vectors, by tiles: quick on any device, right for values of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_TILE = 1 << 15
"""A tile of this size stays in the cache, and torch uses a single thread for it."""

RELATIVE_ERROR = 2.0**-9
"""Bound on the relative error of a squared norm: that of a float32 sum over a tile, whatever its order."""

_SMALL, _LARGE = 2.0**-80, 2.0**120
"""Bounds of sums whose float32 squares neither overflow nor underflow so as to matter."""


def squared_norm(values: Tensor) -> float:
    """Return the squared norm of ``(n,) float32``; NaN or infinity when a value is."""
    return sum(_of_tile(values[start : start + _TILE]) for start in range(0, values.numel(), _TILE))


def norms_of(values: Tensor, ranges: Iterable[tuple[int, int]]) -> list[float]:
    """Return the L2 norm of each range ``start <= i < stop`` of ``(n,) float32``, never too small."""
    squares = [squared_norm(values[start:stop]) for start, stop in ranges]
    return [math.sqrt(square * (1.0 + RELATIVE_ERROR)) for square in squares]


def _of_tile(values: Tensor) -> float:
    squares = float(torch.dot(values, values))
    if _SMALL < squares < _LARGE:
        return squares
    return float(values.double().square_().sum())
