"""One block of values as numba kernels: its scale, its codes, and back.

The same arithmetic, operation for operation, as ``blockwise.py``; no fastmath, so that LLVM neither reorders nor
fuses. The absolute maximum is taken on the floats' bits as integers, which orders them, NaN and infinity above all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint32

from shoal.compression.kernels.jit import njit

ABSOLUTE = np.int32(0x7FFFFFFF)
LARGEST_FINITE = np.int32(0x7F7FFFFF)
SMALLEST_NORMAL = np.int32(0x00800000)
HALF = np.float32(0.5)
DRAW = np.float32(2.0**-24)
ZERO = np.float32(0.0)


def _limits(largest: int) -> tuple[np.int32, np.float32]:
    """Of the largest code: the bits of the smallest block maximum that counts, and the largest scale."""
    info = np.finfo(np.float32)
    smallest = np.float32(largest * float(info.tiny)).view(np.int32)
    return smallest, np.nextafter(np.float32(float(info.max) / largest), np.float32(0.0))


SMALLEST_8, LARGEST_SCALE_8 = _limits(127)
SMALLEST_4, LARGEST_SCALE_4 = _limits(7)


@njit
def mix(x: Any) -> Any:
    """32 bits to 32 well-mixed bits."""
    x = uint32(x)
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x ^ (x >> uint32(15)))
    x = uint32(x * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@njit
def absmax_bits(bits: Any) -> Any:
    """The largest of ``bits``, ``(m,) int32``, without their signs."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & ABSOLUTE)
    return largest


@njit
def scale_of(bits: Any, largest: Any) -> Any:
    """A block's scale and what its values are multiplied with, from the bits of its absolute maximum."""
    if largest == np.float32(127.0):
        smallest, highest = SMALLEST_8, LARGEST_SCALE_8
    else:
        smallest, highest = SMALLEST_4, LARGEST_SCALE_4
    if bits < smallest:
        return ZERO, ZERO
    absmax = np.int32(bits).view(np.float32)
    return min(np.float32(absmax / largest), highest), np.float32(largest / absmax)


@njit
def quantize(values: Any, inverse: Any, largest: Any, key: Any, rounded: Any) -> Any:
    """``rounded`` becomes the codes of one block, as floats; ``key`` below 0: to nearest, else stochastically."""
    if key < 0:
        for i in range(values.size):
            rounded[i] = np.rint(np.float32(values[i] * inverse))
    else:
        start = uint32(key)
        for i in range(values.size):
            drawn = mix(uint32(start + uint32(i)))
            dither = np.float32(np.float32(np.float32(drawn >> uint32(8)) * DRAW) - HALF)
            scaled = np.float32(np.float32(values[i] * inverse) + dither)
            rounded[i] = np.rint(min(max(scaled, -largest), largest))


@njit
def key_of(seed: Any, bits: Any, block: Any) -> Any:
    if seed < 0:
        return np.int64(-1)
    return np.int64(mix(uint32(mix(uint32(uint32(bits) ^ uint32(seed))) ^ uint32(block))))


@njit
def write_codes(rounded: Any, codes: Any, start: Any, bits: Any) -> Any:
    """The codes of a block that begins at value ``start``."""
    m = rounded.size
    if bits == 8:
        signed = codes[start : start + m].view(np.int8)
        for i in range(m):
            signed[i] = np.int8(np.int32(rounded[i]))
        return
    target = codes[start // 2 : start // 2 + (m + 1) // 2]
    for i in range(m // 2):
        low = np.uint8(np.int32(rounded[2 * i]) + 8)
        high = np.uint8(np.int32(rounded[2 * i + 1]) + 8)
        target[i] = low | (high << 4)
    if m % 2:
        target[m // 2] = np.uint8(np.int32(rounded[m - 1]) + 8) | np.uint8(0x80)


@njit
def read_codes(codes: Any, start: Any, bits: Any, values: Any) -> Any:
    """``values`` become the codes of a block that begins at value ``start``."""
    m = values.size
    if bits == 8:
        signed = codes[start : start + m].view(np.int8)
        for i in range(m):
            values[i] = np.float32(signed[i])
        return
    source = codes[start // 2 : start // 2 + (m + 1) // 2]
    for i in range(m // 2):
        values[2 * i] = np.float32(np.int32(source[i] & 15) - 8)
        values[2 * i + 1] = np.float32(np.int32(source[i] >> 4) - 8)
    if m % 2:
        values[m - 1] = np.float32(np.int32(source[m // 2] & 15) - 8)
