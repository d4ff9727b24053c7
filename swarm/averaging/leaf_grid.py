"""Leaves of a contribution: where they begin, what they take, and whether a chunk of them is what was committed to."""

from __future__ import annotations

from shoal.compression.codec import Codec
from shoal.compression.codec_map import CodecMap
from shoal.swarm.averaging.merkle import is_of, leaf_digest, path_bytes
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.rounds import leaf_elements


class LeafGrid:
    """Leaves of all contributions of so many elements. A chunk of a contribution is its leaves' packed bytes, one after
    the other, and the path that leads from them to the root."""

    def __init__(self, elements: int, codec_map: CodecMap) -> None:
        self.leaf = leaf_elements(elements)
        self.leaves = -(-elements // self.leaf)
        self._elements = elements
        self._codec_map = codec_map.by_leaf(self.leaf)

    def bounds(self, leaf: int) -> tuple[int, int]:
        """Return start and stop of a leaf's elements."""
        start = leaf * self.leaf
        return start, min(start + self.leaf, self._elements)

    def codec(self, leaf: int) -> Codec:
        return self._codec_map.contribution(*self.bounds(leaf))

    def codec_of(self, leaves: range) -> Codec:
        """The codec of adjacent leaves together, whose bytes are those of each, one after the other."""
        return self._codec_map.contribution(self.bounds(leaves[0])[0], self.bounds(leaves[-1])[1])

    def within(self, start: int, stop: int) -> range:
        """Return the leaves of these elements. Raises ``WireError`` where some leaf is cut."""
        if start % self.leaf or (stop % self.leaf and stop != self._elements):
            raise WireError(f"the plan has chunks of parts of leaves; a leaf has {self.leaf} elements")
        return range(start // self.leaf, -(-stop // self.leaf))

    def packed_bytes(self, leaf: int) -> int:
        start, stop = self.bounds(leaf)
        return self.codec(leaf).packed_bytes(stop - start)

    def chunk_bytes(self, start: int, stop: int) -> int:
        """Return the size of a chunk of a contribution, its path included. Raises ``WireError`` as ``within``."""
        leaves, packed = self.within(start, stop), self._codec_map.contribution(start, stop)
        return packed.packed_bytes(stop - start) + path_bytes(self.leaves, leaves.start, leaves.stop)

    def checked(self, root: bytes, start: int, stop: int, data: memoryview) -> memoryview:
        """Return the packed bytes of a chunk. For a worker thread.

        Raises ``WireError`` if they are not those that the root was made of."""
        leaves, digests, at = self.within(start, stop), [], 0
        for leaf in leaves:
            size = self.packed_bytes(leaf)
            digests.append(leaf_digest(data[at : at + size]))
            at += size
        if not is_of(root, self.leaves, leaves.start, digests, data[at:]):
            raise WireError(f"elements {start} to {stop} are not of the contribution that it committed to")
        return data[:at]
