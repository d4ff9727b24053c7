"""Anchor and outer optimizer state of one version, which all peers of a run hold alike, with digests."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.scratch import empty_aligned

CHUNK_BYTES = 2**20
"""States are hashed and sent in pieces of so many bytes, the last one shorter."""

DIGEST_BYTES = 32
_CHUNKS_A_THREAD = 8  # a thread for less than 8 MiB would cost more than it saves


@dataclass(frozen=True)
class AnchorState:
    """``values``: (1 + slots, n) float32 on the CPU, the anchor and the outer optimizer's vectors. Never changed
    in place, so it can be served while the next one is being made. ``version``: committed rounds behind it."""

    values: Tensor
    version: int
    digest: bytes
    chunk_digests: bytes
    """SHA-256 of each chunk, one after the other: 32 bytes each."""

    @classmethod
    def make(cls, anchor: Tensor, outer: Tensor, version: int) -> AnchorState:
        """``anchor`` (n,), ``outer`` (slots, n). Hashes everything."""
        rows, n = 1 + len(outer), anchor.numel()
        values = empty_aligned(rows * n).view(rows, n)
        return cls.of(torch.cat([anchor.unsqueeze(0), outer], out=values), version)

    @classmethod
    def of(cls, values: Tensor, version: int, digest: bytes | None = None) -> AnchorState:
        """``digest``: the run's for this state, where it is not made of the chunks' (``StartSection.state_digest``)."""
        chunk_digests = _chunk_digests(bytes_of(values))
        digest = digest or state_digest(version, tuple(values.shape), chunk_digests)
        return cls(values, version, digest, chunk_digests)

    @property
    def anchor(self) -> Tensor:
        return self.values[0]

    @property
    def outer(self) -> Tensor:
        return self.values[1:]


def state_digest(version: int, shape: tuple[int, ...], chunk_digests: bytes) -> bytes:
    """The digest of a state whose chunks have these digests: whoever has the run's can check the list by it, and then
    every chunk by itself."""
    return hashlib.sha256(f"shoal state 2 {version} {shape}\0".encode() + chunk_digests).digest()


class GrowingDigest:
    """The digest of a state whose values come in pieces, in any order: at most a chunk at each end of a row of a piece
    is kept, and none of the values."""

    def __init__(self, version: int, shape: tuple[int, int]) -> None:
        self._version, self._shape = version, shape
        self._size_bytes = 4 * shape[0] * shape[1]
        self._digests: list[bytes] = [b""] * chunks_in(self._size_bytes)
        self._open: dict[int, tuple[bytearray, int]] = {}
        """Chunks of which a part has come, and how much of them."""

    def take(self, row: int, column: int, values: Tensor) -> None:
        """The values that begin there, (k,) float32; each comes once."""
        data, at = bytes_of(values), 4 * (row * self._shape[1] + column)
        while data.nbytes:
            chunk = at // CHUNK_BYTES
            start = chunk * CHUNK_BYTES
            room = min(CHUNK_BYTES, self._size_bytes - start)
            piece = data[: start + room - at]
            self._put(chunk, at - start, piece, room)
            at, data = at + piece.nbytes, data[piece.nbytes :]

    def _put(self, chunk: int, offset: int, piece: memoryview, room: int) -> None:
        if piece.nbytes == room:
            self._digests[chunk] = chunk_digest(piece)
            return
        kept, filled = self._open.pop(chunk) if chunk in self._open else (bytearray(room), 0)
        kept[offset : offset + piece.nbytes] = piece
        filled += piece.nbytes
        if filled == room:
            self._digests[chunk] = chunk_digest(memoryview(kept))
        else:
            self._open[chunk] = (kept, filled)

    def digest(self) -> bytes:
        """Once all values have come."""
        assert all(self._digests), "some values are missing"
        return state_digest(self._version, self._shape, b"".join(self._digests))


def _chunk_digests(data: memoryview) -> bytes:
    chunks = chunks_in(data.nbytes)

    def digest(chunk: int) -> bytes:
        return chunk_digest(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])

    threads = min(torch.get_num_threads(), chunks // _CHUNKS_A_THREAD)
    if threads < 2:
        return b"".join(map(digest, range(chunks)))
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(pool.map(digest, range(chunks)))


def chunk_digest(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def chunks_in(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    assert values.is_contiguous()
    return values.detach().reshape(-1).view(torch.uint8).numpy().data
