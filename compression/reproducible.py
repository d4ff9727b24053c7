"""Linear algebra whose float32 results are the same bits on every machine, with any number of threads.

All sums are float64, of operations that round once each, in a fixed order. What would be a subnormal float32 counts
as zero, going in and coming out, so machines that flush subnormals agree with those that do not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
# Below this share of its length a column counts as dependent on those before it. Float32 values are known to 2**-24,
# so nothing is lost, and float64 keeps the other columns orthogonal to about 2**-22.
_DEPENDENT = 2.0**-30
_TILE = 2**15  # values whose float64 sums stay in the cache


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns of ``(m, r) float32`` span, as a new ``(m, r) float32``; m >= 1.

    Modified Gram-Schmidt from the first column to the last. A column that is zero or depends on those before it
    becomes zero. The values are to be finite.
    """
    rows = without_subnormals(columns).t().contiguous().numpy().astype(np.float64)
    lengths = np.sqrt(_row_sums(rows * rows))
    for k in range(rows.shape[0]):
        length = math.sqrt(_row_sums(rows[k : k + 1] * rows[k : k + 1])[0])
        if length <= _DEPENDENT * lengths[k]:
            rows[k] = 0.0
            continue
        rows[k] *= 1.0 / length
        later = rows[k + 1 :]
        shares = _row_sums(later * rows[k])
        later -= shares[:, None] * rows[k]
    rows[np.abs(rows) < _SMALLEST_NORMAL] = 0.0
    return torch.from_numpy(rows.astype(np.float32)).t().contiguous()


def multiply_transposed(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left``, ``(a, r) float32``, times the transpose of ``right``, ``(b, r)``, into ``out``, ``(a, b) float32``.

    The sum runs from the first column to the last. A product of two float32 is exact in float64, so it is the same
    where a compiler fuses it with the sum. What is too large for float32 becomes infinite.
    """
    a, b = out.shape
    wide_left, wide_right = (without_subnormals(factor).double() for factor in (left, right))
    wide_right = wide_right.t().contiguous()
    step = max(1, _TILE // max(b, 1))
    for start in range(0, a, step):
        tile = wide_left[start : start + step]
        total = tile[:, 0:1] * wide_right[0]
        for k in range(1, wide_right.shape[0]):
            total += tile[:, k : k + 1] * wide_right[k]
        total.masked_fill_(total.abs() < _SMALLEST_NORMAL, 0.0)
        out[start : start + step] = total


def without_subnormals(values: Tensor) -> Tensor:
    """A new tensor like ``values``, float32 of any shape, with zeros for what is subnormal."""
    return values.masked_fill(values.abs() < _SMALLEST_NORMAL, 0.0)


def _row_sums(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each row of ``(r, m)``, m >= 1, which is overwritten: the right half is folded onto the left."""
    m = terms.shape[1]
    while m > 1:
        half = m // 2
        terms[:, :half] += terms[:, m - half : m]
        m -= half
    return terms[:, 0]
