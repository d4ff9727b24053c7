"""Anchor and outer optimizer state of one version, bit-identical on all peers of a run, with digests."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.scratch import empty_aligned

CHUNK_BYTES = 2**20
"""Bytes of a chunk, the unit in which states are hashed and sent; the last chunk may be shorter."""

DIGEST_BYTES = 32
_CHUNKS_A_THREAD = 8  # starting a thread for less than 8 MiB costs more than it saves


@dataclass(frozen=True)
class AnchorState:
    """Anchor and outer optimizer state of one version, never changed in place, so that it can be served meanwhile.

    ``values``: (1 + slots, n) float32 on the CPU, the anchor and the outer optimizer's vectors; ``version``: number of
    committed rounds behind it; ``chunk_digests``: SHA-256 of each chunk, concatenated.
    """

    values: Tensor
    version: int
    digest: bytes
    chunk_digests: bytes

    @classmethod
    def make(cls, anchor: Tensor, outer: Tensor, version: int) -> AnchorState:
        """Make a state of copies of ``anchor``, (n,), and ``outer``, (slots, n), and hash it."""
        rows, n = 1 + len(outer), anchor.numel()
        values = empty_aligned(rows * n).view(rows, n)
        return cls.of(torch.cat([anchor.unsqueeze(0), outer], out=values), version)

    @classmethod
    def of(cls, values: Tensor, version: int, digest: bytes | None = None) -> AnchorState:
        """Make a state of ``values`` without a copy, and hash it.

        ``digest``: the run's digest of a state that is not hashed by its chunks (``StartSection.state_digest``).
        """
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
    """Return the digest of a state whose chunks have these digests.

    With the run's digest a peer checks a received list of chunk digests, and with that list every chunk by itself.
    """
    return hashlib.sha256(f"shoal state 2 {version} {shape}\0".encode() + chunk_digests).digest()


class GrowingDigest:
    """The digest of a state whose values come in pieces, in any order: at most a chunk at each end of a row of a piece
    is kept, and none of the values."""

    def __init__(self, version: int, shape: tuple[int, int]) -> None:
        self._version, self._shape = version, shape
        self._size_bytes = 4 * shape[0] * shape[1]
        self._digests: list[bytes] = [b""] * chunks_in(self._size_bytes)
        self._open: dict[int, tuple[bytearray, int]] = {}
        """Unfinished chunks, and the bytes of each that were added."""

    def take(self, row: int, column: int, values: Tensor) -> None:
        """Add the values, (k,) float32, that begin at a row and a column; add each value once."""
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
        """Return the state's digest, after all values were added."""
        assert all(self._digests), "some values were not added"
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
    """Return the memory of a contiguous tensor on the CPU."""
    assert values.is_contiguous()
    return values.detach().reshape(-1).view(torch.uint8).numpy().data
