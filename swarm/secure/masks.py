"""Masks and packing of lanes: integers modulo 2**16 whose masks cancel in the sum, and their packed bits.

A mask is the keystream of AES-256 in counter mode under a key that is used once, for the lanes of one part. It is added
tile by tile while these are in the cache. Only the lowest ``bits`` bits of a lane travel: 2**bits divides 2**16, so a
sum modulo the one is the sum modulo the other, and a uniform mask stays uniform. With compiled kernels, all but the
keystreams themselves is one pass in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from shoal.compression.kernels import loader
from shoal.swarm.errors import WireError

Lanes = NDArray[np.uint16]
"""``(n,)`` uint16, little-endian: integers modulo 2**16."""

KEY_BYTES = 32
_TILE = 2**15
_ZEROS = bytes(2 * _TILE)
_GROUP = 8
"""Lanes are packed in groups of so many, which fill whole bytes at any number of bits, and a block of AES."""


def add_masks(lanes: Lanes, keys: Sequence[tuple[bytes, int]], first_lane: int = 0) -> None:
    """Add the mask of each key to ``lanes``, in place: with sign 1, or subtract it with sign -1.

    Each key: ``KEY_BYTES`` bytes that no other lanes are masked with. ``first_lane``: where these lanes are among those
    of their part, whole groups after its beginning. For a worker thread."""
    assert first_lane % _GROUP == 0
    counter, streams = (first_lane // _GROUP).to_bytes(16, "big"), []
    for key, sign in keys:
        assert len(key) == KEY_BYTES
        assert sign in (1, -1)
        streams.append((Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor(), sign))
    kernels, room = loader.kernels("lanes"), np.empty(_TILE, dtype="<u2")
    for start in range(0, lanes.size, _TILE):
        tile = lanes[start : start + _TILE]
        zeros, mask = _ZEROS[: 2 * tile.size], room[: tile.size]
        for stream, sign in streams:
            stream.update_into(zeros, mask.data.cast("B"))
            if kernels is None:
                (np.add if sign == 1 else np.subtract)(tile, mask, out=tile)
            else:
                (kernels.add if sign == 1 else kernels.subtract)(tile, mask)


def padded(lanes: int) -> int:
    """Return the number of lanes that whole groups have, which so many are filled up to."""
    return -(-lanes // _GROUP) * _GROUP


def packed_bytes(lanes: int, bits: int) -> int:
    """Return the size of so many lanes of ``bits`` bits, padded to whole groups."""
    return padded(lanes) // _GROUP * bits


def pack(lanes: Lanes, bits: int, out: NDArray[np.uint8]) -> None:
    """Write the lowest ``bits`` bits, 1 to 16, of whole groups of lanes to ``out``, ``(packed_bytes,) uint8``.

    Tile by tile; of more than 8 bits, a tile's low bytes come first. Then come the other bits of the eight lanes
    i, i + n/8, i + 2n/8 ... side by side, for each i below n/8: lanes that are far from each other, so that all
    operations go along the vector."""
    assert lanes.size % _GROUP == 0
    assert out.size == packed_bytes(lanes.size, bits)
    kernels = loader.kernels("lanes")
    if kernels is not None:
        kernels.pack(lanes, bits, _TILE, out)
        return
    high, mask = (bits - 8, np.uint16((1 << bits) - 1 >> 8)) if bits > 8 else (bits, np.uint16((1 << bits) - 1))
    for start in range(0, lanes.size, _TILE):
        tile, at = lanes[start : start + _TILE], start // _GROUP * bits
        if bits > 8:
            out[at : at + tile.size] = tile.view(np.uint8)[::2]
            at, tile = at + tile.size, tile >> np.uint16(8)
        rows = (tile & mask).reshape(_GROUP, -1)
        words = rows[0].astype("<u8")
        for row in range(1, _GROUP):
            words |= rows[row].astype(np.uint64) << np.uint64(row * high)
        room = out[at : at + words.size * high].reshape(-1, high)
        room[:] = words.view(np.uint8).reshape(-1, 8)[:, :high]


def add_packed(packed: memoryview, bits: int, total: Lanes) -> None:
    """Add whole groups of lanes, as ``pack`` wrote them, to ``total``. Raises ``WireError`` for a wrong length."""
    kernels = loader.kernels("lanes")
    if kernels is None:
        np.add(total, unpack(packed, total.size, bits), out=total)
        return
    _check_packed(packed, total.size, bits)
    kernels.add_packed(np.frombuffer(packed, dtype=np.uint8), bits, _TILE, total)


def unpack(packed: memoryview, lanes: int, bits: int) -> Lanes:
    """Return so many lanes, whole groups, from what ``pack`` wrote. Raises ``WireError`` for a wrong length."""
    _check_packed(packed, lanes, bits)
    data, whole = np.frombuffer(packed, dtype=np.uint8), np.empty(lanes, dtype=np.uint16)
    high = bits - 8 if bits > 8 else bits
    mask = np.uint64((1 << high) - 1)
    for start in range(0, lanes, _TILE):
        tile, at = whole[start : start + _TILE], start // _GROUP * bits
        low = data[at : at + tile.size] if bits > 8 else None
        at += tile.size if bits > 8 else 0
        words = np.zeros((tile.size // _GROUP, 8), dtype=np.uint8)
        words[:, :high] = data[at : at + words.shape[0] * high].reshape(-1, high)
        joined, rows = words.view("<u8").reshape(-1), tile.reshape(_GROUP, -1)
        for row in range(_GROUP):
            rows[row] = joined >> np.uint64(row * high) & mask
        if low is not None:
            tile <<= np.uint16(8)
            tile |= low
    return whole


def _check_packed(packed: memoryview, lanes: int, bits: int) -> None:
    assert lanes % _GROUP == 0
    if packed.nbytes != packed_bytes(lanes, bits):
        raise WireError(f"{packed.nbytes} bytes are not {lanes} lanes of {bits} bits")
