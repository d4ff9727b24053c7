"""Merkle tree over digests, of a contribution's leaves or a part's chunks: one root, and proofs for runs of leaves.

Nodes of a level are paired from the left; one that is left over is its own parent. The number of leaves follows from
the model's size, so a proof's size is known before it comes. Leaves and inner nodes are hashed (BLAKE3) in domains of
their own, so that neither passes for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blake3 import blake3

from shoal.compression.codec import Packed

DIGEST_BYTES = 32

_LEAF, _NODE = "shoal contribution leaf, version 1", "shoal inner node, version 1"


def leaf_digest(packed: Packed) -> bytes:
    """Return the digest of a leaf's packed bytes. Long ones are hashed without the GIL."""
    return blake3(packed, derive_key_context=_LEAF).digest()  # type: ignore[arg-type]


class MerkleTree:
    """Tree over the digests of all leaves, at least one."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = [list(leaves)]
        while len(self._levels[-1]) > 1:
            self._levels.append(_parents(self._levels[-1]))

    @property
    def root(self) -> bytes:
        return self._levels[-1][0]

    def path(self, start: int, stop: int) -> bytes:
        """Return the proof of leaves ``start <= i < stop``, ``path_bytes`` long."""
        return b"".join(self._levels[level][at] for level, at in _beside(len(self._levels[0]), start, stop))


def path_bytes(leaves: int, start: int, stop: int) -> int:
    """Return the size of the proof of leaves ``start <= i < stop`` of so many."""
    return DIGEST_BYTES * sum(1 for _ in _beside(leaves, start, stop))


def is_of(root: bytes, leaves: int, start: int, digests: Sequence[bytes], path: bytes | memoryview) -> bool:
    """Whether these are the digests of the leaves from ``start`` on in the tree of ``leaves`` leaves with that root."""
    stop = start + len(digests)
    if not 0 <= start < stop <= leaves or len(path) != path_bytes(leaves, start, stop):
        return False
    given = {
        place: bytes(path[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
        for number, place in enumerate(_beside(leaves, start, stop))
    }
    nodes, level, width = list(digests), 0, leaves
    while width > 1:
        if (level, start - 1) in given:
            nodes.insert(0, given[level, start - 1])
        if (level, stop) in given:
            nodes.append(given[level, stop])
        nodes = _parents(nodes)
        start, stop, width, level = start // 2, (stop + 1) // 2, (width + 1) // 2, level + 1
    return nodes == [root]


def _parents(nodes: Sequence[bytes]) -> list[bytes]:
    pairs = [nodes[at : at + 2] for at in range(0, len(nodes), 2)]
    return [blake3(b"".join(two), derive_key_context=_NODE).digest() if len(two) == 2 else two[0] for two in pairs]


def _beside(leaves: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield level and place of each node beside the run of leaves that its proof needs, from the leaves up."""
    level, width = 0, leaves
    while width > 1:
        if start % 2:
            yield level, start - 1
        if stop % 2 and stop < width:
            yield level, stop
        start, stop, width, level = start // 2, (stop + 1) // 2, (width + 1) // 2, level + 1
