"""The compiled kernels that unpack what ``sparse_kernels.py`` packs, whatever the bytes are. Imports numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.compression.kernels.jit import njit
from shoal.compression.topk_format import LARGEST_SCALE_BITS, MAX_BFLOAT16_BITS, Shape

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Shorts = NDArray[np.uint16]


@njit
def _rooms(shape: Shape) -> tuple[Ints, Floats]:
    """Where ``_unpack`` puts a chunk's indices and values; no upper bits can make it write past the indices."""
    keep, upper_bits = shape[1], shape[3]
    return np.empty(upper_bits + 9, np.int32), np.empty(keep, np.float32)


@njit
def _unpack(record: Bytes, shape: Shape, indices: Ints, values: Floats) -> int:
    """One chunk's indices and values; 0, or the number of what is wrong in ``sparse_format.REASONS``."""
    size, keep, low_bits, _, value_bits, low_at, code_at, _ = shape
    found = 0
    for place in range(8 * (low_at - 4)):
        indices[found] = place - found
        found += (record[4 + (place >> 3)] >> (place & 7)) & 1
    if found != keep:  # a one in the padding makes the last index too large
        return 1
    held = 0
    waiting = 0
    at = low_at
    last = -1
    increasing = True
    for j in range(keep):
        while held < low_bits:
            waiting |= int(record[at]) << held
            held += 8
            at += 1
        index = (int(indices[j]) << low_bits) | (waiting & ((1 << low_bits) - 1))
        waiting >>= low_bits
        held -= low_bits
        increasing = increasing and index > last
        last = index
        indices[j] = index
    if not increasing or last >= size:
        return 1
    if waiting:
        return 3
    bits = values.view(np.int32)
    if value_bits == 2:
        small = np.int64(record[0]) | np.int64(record[1]) << 8
        large = np.int64(record[2]) | np.int64(record[3]) << 8
        for scale in (small, large):
            if scale > MAX_BFLOAT16_BITS or 0 < scale < 0x80:
                return 2
        for j in range(keep):
            code = record[code_at + (j >> 2)] >> (2 * (j & 3))
            bits[j] = np.int32((large if code & 2 else small) << 16 | np.int64(code & 1) << 31)
        if keep & 3 and record[code_at + (keep >> 2)] >> (2 * (keep & 3)):
            return 3
        return 0
    bits[0] = np.int32(
        np.int64(record[0]) | np.int64(record[1]) << 8 | np.int64(record[2]) << 16 | np.int64(record[3]) << 24
    )
    if bits[0] < 0 or bits[0] > LARGEST_SCALE_BITS or 0 < bits[0] < 0x00800000:
        return 2
    scale32 = values[0]
    for j in range(keep):
        code8 = np.int8(record[code_at + j])
        if code8 == -128:
            return 3
        values[j] = np.float32(code8) * scale32
    return 0


@njit
def decode(packed: Bytes, out: Floats, shape: Shape) -> int:
    """Unpack whole chunks into ``out``; 0, or the number of what is wrong."""
    size, record = shape[0], shape[7]
    indices, values = _rooms(shape)
    for chunk in range(out.size // size):
        wrong = _unpack(packed[chunk * record : (chunk + 1) * record], shape, indices, values)
        if wrong:
            return wrong
        part = out[chunk * size : (chunk + 1) * size]
        part[:] = 0
        for j in range(values.size):
            part[indices[j]] = values[j]
    return 0


@njit
def unpack(packed: Bytes, indices: Shorts, values: Floats, shape: Shape) -> int:
    """What ``decode`` would return, and ``keep`` indices, each within its chunk, and values for each chunk."""
    keep, record = shape[1], shape[7]
    own, own_values = _rooms(shape)
    for chunk in range(values.size // keep):
        wrong = _unpack(packed[chunk * record : (chunk + 1) * record], shape, own, own_values)
        if wrong:
            return wrong
        at = chunk * keep
        for j in range(keep):
            indices[at + j] = own[j]
            values[at + j] = own_values[j]
    return 0


@njit
def add(indices: Shorts, values: Floats, total: Floats, weight: np.float32, shape: Shape) -> None:
    """Add ``weight`` times what ``unpack`` gave, found right, to ``total``."""
    size, keep = shape[0], shape[1]
    for chunk in range(total.size // size):
        part = total[chunk * size : (chunk + 1) * size]
        for j in range(chunk * keep, (chunk + 1) * keep):
            part[indices[j]] = part[indices[j]] + weight * values[j]
