"""Masked chunks of a secure round: their lanes, and the proof that a chunk is one of those that its member has signed.

A chunk is the packed lanes and, after them, their path to the root over the member's masked chunks of that part, the
root, and the member's signature of it under the plan. So an owner can show afterwards what it was sent, and whoever
looks at one chunk needs no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.swarm.averaging.merkle import DIGEST_BYTES, MerkleTree, is_of, leaf_digest, path_bytes
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.rounds import Part, PlanMember
from shoal.swarm.protocol.secure import MaskedPartStatement, SecurePlan
from shoal.swarm.protocol.statements import PlanStatement, has_signed
from shoal.swarm.secure.groups import lane_bits
from shoal.swarm.secure.masks import packed_bytes, padded

_SIGNATURE_BYTES = 64

_AT_ONCE = 2**17
"""Elements of a call to encode: with what it reads and writes they stay in a processor's cache."""


class LaneLayout:
    """Lanes of a round's chunks: the codes of a chunk, and zeros up to a whole group of lanes."""

    def __init__(self, store: ResultStore) -> None:
        assert store.plan.secure is not None
        self.secure: SecurePlan = store.plan.secure
        self.scales: NDArray[np.int8] = np.frombuffer(self.secure.scales, dtype=np.int8)
        self._store = store

    def blocks(self, start: int, stop: int) -> slice:
        """Return the blocks of a range of elements that begins with one."""
        return slice(start // self.secure.block, -(-stop // self.secure.block))

    def runs(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of elements of a chunk that are encoded in one call: whole leaves."""
        start, stop = self._store.bounds(chunk)
        step = max(1, _AT_ONCE // self._store.leaf_grid.leaf) * self._store.leaf_grid.leaf
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def values(self, chunk: int) -> int:
        start, stop = self._store.bounds(chunk)
        return stop - start

    def lanes(self, chunk: int) -> int:
        """Return the number of lanes of a chunk."""
        return padded(self.values(chunk))

    def places(self, chunks: range) -> list[slice]:
        """Return where the lanes of each of these chunks are among those of all."""
        places, at = [], 0
        for chunk in chunks:
            places.append(slice(at, at + self.lanes(chunk)))
            at = places[-1].stop
        return places

    def bits(self, members: int) -> int:
        """Return the bits of a lane in a group of so many members."""
        return lane_bits(members, self.secure.bits)

    def packed_bytes(self, chunk: int, members: int) -> int:
        """Return the size of a chunk's packed lanes in a group of so many members."""
        return packed_bytes(self.lanes(chunk), self.bits(members))

    def chunk_bytes(self, part: Part, chunk: int, members: int) -> int:
        """Return the size of a masked chunk, with its proof, in a group of so many members."""
        chunks = self._store.chunks_of(part)
        place = chunk - chunks.start
        proof = path_bytes(len(chunks), place, place + 1) + DIGEST_BYTES + _SIGNATURE_BYTES
        return self.packed_bytes(chunk, members) + proof


@dataclass(frozen=True)
class SignedRoot:
    """Root over a member's masked chunks of one part, with its signature (``MaskedPartStatement``)."""

    root: bytes
    signature: bytes

    def is_of(self, about: PlanStatement, part: int, index: int, member: PlanMember) -> bool:
        """Whether that member, with this index of the plan, has signed it for this part under this plan."""
        data = MaskedPartStatement(about, part, index, self.root).bytes_to_sign()
        return has_signed(member.identity_key, member.peer, self.signature, data)


def write_proofs(chunks: Sequence[memoryview], sizes: Sequence[int], sign: Callable[[bytes], bytes]) -> None:
    """Write the proof of each of a part's chunks after its packed lanes, of the given sizes. For a worker thread.

    ``sign``: signs the root."""
    tree = MerkleTree([leaf_digest(chunk[:size]) for chunk, size in zip(chunks, sizes, strict=True)])
    signature = sign(tree.root)
    for place, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        chunk[size:] = tree.path(place, place + 1) + tree.root + signature


def checked_lanes(data: memoryview, size: int, place: int, chunks: int) -> tuple[memoryview, SignedRoot]:
    """Return the packed lanes, of ``size`` bytes, of chunk ``place`` of so many, and the root that they lead to.

    Raises ``WireError`` if they do not lead to the root that is shown. For a worker thread."""
    path = path_bytes(chunks, place, place + 1)
    if data.nbytes != size + path + DIGEST_BYTES + _SIGNATURE_BYTES:
        raise WireError(f"a masked chunk of {data.nbytes} bytes does not fit")
    packed, proof = data[:size], bytes(data[size:])
    shown = SignedRoot(proof[path : path + DIGEST_BYTES], proof[path + DIGEST_BYTES :])
    if not is_of(shown.root, chunks, place, [leaf_digest(packed)], proof[:path]):
        raise WireError("a masked chunk is not of those that its member has signed")
    return packed, shown
