"""Lanes of masked sums as numba kernels: keystreams are added, and lanes are packed and summed, in one pass each.

The layout of packed lanes is that of ``swarm/secure/masks.py``, which has the same operations by numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compression.kernels.jit import njit
from shoal.compression.kernels.simd import address_of, load_word, store_word

GROUP = 8


@njit
def add(lanes: Any, stream: Any) -> Any:
    """Add a keystream, ``(n,) uint16`` both."""
    for i in range(lanes.size):
        lanes[i] += stream[i]


@njit
def subtract(lanes: Any, stream: Any) -> Any:
    """Subtract a keystream, ``(n,) uint16`` both."""
    for i in range(lanes.size):
        lanes[i] -= stream[i]


@njit
def pack(lanes: Any, bits: Any, tile: Any, out: Any) -> Any:
    """Write the lowest ``bits`` bits of whole groups of lanes, ``tile`` lanes after the other, to ``out``, bytes."""
    high = bits - 8 if bits > 8 else bits
    mask, shift, after = np.uint64((1 << high) - 1), np.uint64(bits - high), address_of(out) + out.size
    words, written = np.empty(tile // GROUP, np.uint64), address_of(out)
    for start in range(0, lanes.size, tile):
        part = lanes[start : min(start + tile, lanes.size)]
        rows = part.size // GROUP
        if bits > 8:
            low = out[start // GROUP * bits : start // GROUP * bits + part.size]
            for i in range(part.size):
                low[i] = np.uint8(part[i])
            written += part.size
        for i in range(rows):
            words[i] = np.uint64(part[i]) >> shift & mask
        for row in range(1, GROUP):
            lane, by = part[row * rows : (row + 1) * rows], np.uint64(row * high)
            for i in range(rows):
                words[i] |= (np.uint64(lane[i]) >> shift & mask) << by
        for i in range(rows):
            # The bytes beyond its own are the next word's, which is written after it.
            if written + 8 <= after:
                store_word(words[i], written)
            else:
                for byte in range(high):
                    out[written - address_of(out) + byte] = np.uint8(words[i] >> np.uint64(8 * byte))
            written += high


@njit
def add_packed(packed: Any, bits: Any, tile: Any, total: Any) -> Any:
    """Add packed lanes to ``total``, ``(n,) uint16``."""
    high = bits - 8 if bits > 8 else bits
    mask, shift, first = np.uint64((1 << high) - 1), np.uint64(bits - high), address_of(packed)
    words, read, after = np.empty(tile // GROUP, np.uint64), address_of(packed), address_of(packed) + packed.size
    for start in range(0, total.size, tile):
        part = total[start : min(start + tile, total.size)]
        rows = part.size // GROUP
        if bits > 8:
            low = packed[read - first : read - first + part.size]
            for i in range(part.size):
                part[i] += np.uint16(low[i])
            read += part.size
        for i in range(rows):
            if read + 8 <= after:
                words[i] = load_word(read)
            else:
                word = np.uint64(0)
                for byte in range(high):
                    word |= np.uint64(packed[read - first + byte]) << np.uint64(8 * byte)
                words[i] = word
            read += high
        for row in range(GROUP):
            lane, by = part[row * rows : (row + 1) * rows], np.uint64(row * high)
            for i in range(rows):
                lane[i] += np.uint16((words[i] >> by & mask) << shift)


def warm_up() -> None:
    """Compile every kernel for the types that masks use, or load it from the cache."""
    lanes, out = np.zeros(GROUP, np.uint16), np.zeros(11, np.uint8)
    add(lanes, lanes.copy())
    subtract(lanes, lanes.copy())
    pack(lanes, 11, GROUP, out)
    add_packed(out, 11, GROUP, lanes)
    out.flags.writeable = False
    add_packed(out, 11, GROUP, lanes)  # a type of its own, which received bytes may have
