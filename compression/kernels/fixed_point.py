"""Fixed-point codes as numba kernels: each block is read once from memory and worked on in the cache.

The same arithmetic, operation for operation, as ``FixedPoint`` has by torch; no fastmath, so that LLVM neither reorders
nor fuses. ``units`` and ``rates``: by block, what a code is worth, and codes a value; ``limits``: the largest code, and
the code below which a whole block counts as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compression.kernels.blockwise import ABSOLUTE, LARGEST_FINITE, are_sums_finite
from shoal.compression.kernels.jit import njit
from shoal.compression.kernels.simd import lines

__all__ = ["accumulate", "are_sums_finite", "count_sizes", "decode", "encode", "encode_residual", "warm_up"]

ZERO = np.float32(0.0)


@njit
def quantize(values: Any, rate: Any, limits: Any, codes: Any) -> Any:
    """Write the codes of one block, as float32 to ``values`` in place and as int8 to ``codes``."""
    largest, least = limits
    top = np.int32(0)
    for i in range(values.size):
        code = np.int32(np.rint(min(max(np.float32(values[i] * rate), -largest), largest)))
        values[i] = np.float32(code)
        codes[i] = np.int8(code)
        top = max(top, abs(code))
    if top < least:
        for i in range(values.size):
            values[i] = ZERO
            codes[i] = np.int8(0)


@njit
def encode(values: Any, rates: Any, block: Any, limits: Any, codes: Any) -> Any:
    """Encode a vector. False when a value is not finite."""
    work = lines(min(block, values.size))
    for b in range(rates.size):
        start, stop = b * block, min((b + 1) * block, values.size)
        part, top = work[: stop - start], np.int32(0)
        for i in range(part.size):
            part[i] = value = values[start + i]
            top = max(top, np.float32(value).view(np.int32) & ABSOLUTE)
        if top > LARGEST_FINITE:
            return False
        quantize(part, rates[b], limits, codes[start:stop])
    return True


@njit
def encode_residual(
    values: Any, residual: Any, left: Any, units: Any, rates: Any, block: Any, limits: Any, codes: Any
) -> Any:
    """Encode the sum of two vectors; ``left`` becomes the loss. False when a sum is not finite.

    ``left`` may be ``residual``: what is written has been read before."""
    n, room = values.size, min(block, values.size)
    sums, work = lines(room), lines(room)
    for b in range(rates.size):
        start, stop = b * block, min((b + 1) * block, n)
        one, two, rest = values[start:stop], residual[start:stop], left[start:stop]
        total, part, top = sums[: stop - start], work[: stop - start], np.int32(0)
        for i in range(part.size):
            total[i] = value = np.float32(one[i] + two[i])
            part[i] = value
            top = max(top, np.float32(value).view(np.int32) & ABSOLUTE)
        if top > LARGEST_FINITE:
            return False
        quantize(part, rates[b], limits, codes[start:stop])
        unit = units[b]
        for i in range(part.size):
            rest[i] = np.float32(total[i] - np.float32(part[i] * unit))
    return True


@njit
def decode(codes: Any, units: Any, block: Any, out: Any) -> Any:
    """Write the values of all codes."""
    for b in range(units.size):
        start, stop, unit = b * block, min((b + 1) * block, out.size), units[b]
        for i in range(start, stop):
            out[i] = np.float32(np.float32(codes[i]) * unit)


@njit
def accumulate(codes: Any, units: Any, block: Any, total: Any, weight: Any) -> Any:
    """Add the values of all codes, times ``weight``."""
    factor = np.float32(weight)
    for b in range(units.size):
        start, stop, unit = b * block, min((b + 1) * block, total.size), units[b]
        for i in range(start, stop):
            total[i] = np.float32(total[i] + np.float32(np.float32(np.float32(codes[i]) * unit) * factor))


@njit
def count_sizes(values: Any, block: Any, limits: Any, counts: Any) -> Any:
    """Count by block how many values are above each of three limits, ``(3, blocks) float32``, without their signs."""
    for b in range(counts.shape[1]):
        start, stop = b * block, min((b + 1) * block, values.size)
        first, second, third = limits[0, b], limits[1, b], limits[2, b]
        large, rest, some = np.int32(0), np.int32(0), np.int32(0)
        for i in range(start, stop):
            size = abs(values[i])
            large += np.int32(size > first)
            rest += np.int32(size > second)
            some += np.int32(size > third)
        counts[0, b], counts[1, b], counts[2, b] = large, rest, some


def warm_up() -> None:
    """Compile every kernel for the types that the codec uses, or load it from the cache."""
    values, codes, units = np.ones(4, np.float32), np.zeros(4, np.int8), np.ones(1, np.float32)
    limits = np.float32(7.0), np.int32(1)
    encode(values, units, 4, limits, codes)
    are_sums_finite(values, values)
    encode_residual(values, np.zeros(4, np.float32), values.copy(), units, units, 4, limits, codes)
    decode(codes, units, 4, values)
    accumulate(codes, units, 4, values, 1.0)
    count_sizes(values, 4, np.ones((3, 1), np.float32), np.zeros((3, 1), np.int64))
