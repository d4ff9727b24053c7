"""Results of a round on one member: stored as they arrive or are made, offered to other members, and decoded."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

from blake3 import blake3
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.codec_map import CodecMap, Piece, decode_all, spans
from shoal.compression.formats import CodecError
from shoal.compression.scratch import empty_aligned
from shoal.swarm.aio import Changes, in_thread
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_header import ChunkHeader, Group
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.merkle import MerkleTree
from shoal.swarm.averaging.norm_bounds import NormBounds, secure_mean_bound
from shoal.swarm.errors import AboveBound, BlobUnavailable, WireError
from shoal.swarm.protocol.rounds import Part, RoundPlan, Verdict, leaf_elements
from shoal.swarm.protocol.secure import fewest_groups
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_PIECE_ELEMENTS = 2**20
"""Elements of a mean that are decoded at once, unless a chunk has more: enough to spare calls, and 4 MiB."""


_CHUNK = "shoal result chunk, version 1"


def chunk_digest(chunk: memoryview) -> bytes:
    """Return the digest of a result chunk, a leaf of the tree of ``part_digest``. Long ones are hashed without the
    GIL."""
    return blake3(chunk, derive_key_context=_CHUNK).digest()


def part_digest(chunks: Iterable[memoryview]) -> bytes:
    """Return the digest of a part's result chunks, at least one, in order: 32 bytes. One thread, without the GIL.

    It is the root of a Merkle tree over the chunks' own BLAKE3 digests: it tells where each chunk ends, and one chunk
    with its path shows what the whole digest committed to."""
    return RunningDigest().of(list(chunks))


class RunningDigest:
    """Incremental ``part_digest`` of chunks that come one by one."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._chunks: list[memoryview] = []

    def of(self, chunks: Sequence[memoryview]) -> bytes:
        """Return the digest of these chunks, from the first on; chunks read by the last call are not read again."""
        self.read(chunks)
        return MerkleTree(self._digests).root

    def read(self, chunks: Sequence[memoryview]) -> None:
        """Read these chunks, from the first on, ahead of ``of``."""
        before = len(self._chunks)
        if len(chunks) < before or not all(map(operator.is_, self._chunks, chunks)):
            self._digests, self._chunks, before = [], [], 0
        for chunk in chunks[before:]:
            self._digests.append(chunk_digest(chunk))
            self._chunks.append(chunk)


class ChunkStore:
    """Chunks by index, each from its arrival until ``close`` (a ``ChunkSource``).

    ``about``: what they are, for errors; ``moved``: number of chunks that were put."""

    def __init__(self, chunks: int, about: str) -> None:
        self.chunks = chunks
        self.moved = 0
        self._about = about
        self._held: list[memoryview | None] = [None] * chunks
        self._closed = False
        self._changes = Changes()

    async def put(self, chunk: int, data: memoryview) -> None:
        self._held[chunk] = data
        self.moved += 1
        self._changes.announce()

    async def chunk(self, index: int) -> memoryview:
        """Wait until that chunk is here and return it. Raises ``BlobUnavailable`` once closed."""
        await self._changes.until(lambda: self._closed or self._held[index] is not None)
        return self[index]

    async def close(self) -> None:
        """Drop all chunks, and end the streams that wait for one."""
        self._closed = True
        self._held = [None] * self.chunks
        self._changes.announce()

    def __getitem__(self, index: int) -> memoryview:
        data = self._held[index]
        if data is None:
            raise BlobUnavailable(f"chunk {index} of {self._about} is not here")
        return data


def chunks_of(plan: RoundPlan, part: Part) -> range:
    """Return the indices of a part's chunks in the round."""
    size = plan.chunk_elements
    return range(part.start // size, -(-part.stop // size))


class ResultStore(ChunkStore):
    """Result chunks of a round as they arrive or are made; offered to every member."""

    def __init__(self, plan: RoundPlan, codec_map: CodecMap, buffers: RoundBuffers | None = None) -> None:
        """Raises ``WireError`` for a plan with larger chunks than the run's codec packs into a frame."""
        values = plan.copies * plan.chunk_elements
        if values > codec_map.formats.max_chunk_values:
            most = codec_map.formats.max_chunk_values
            raise WireError(f"the plan of round {plan.round} has chunks of {values} values; the codec allows {most}")
        self.plan = plan
        self.buffers = buffers or RoundBuffers()
        self.elements = plan.parts[-1].stop
        self.codec_map = codec_map.by_leaf(leaf_elements(self.elements))
        self.group = Group.of(plan)
        self.signed_sums: dict[int, list[set[int]]] = {}
        """Of a secure round that we take part in: by start of a part, the members of each group's sum."""
        self.signed_names: dict[int, bytes] = {}
        """The name of these sums together, which its mean has to name."""
        self._dropped: set[int] = set()
        self._undecodable: set[int] = set()
        self._digests: dict[int, bytes] = {}
        self._digesting: dict[int, RunningDigest] = {}
        super().__init__(-(-self.elements // plan.chunk_elements), f"round {plan.round}")

    @classmethod
    def of(cls, verdict: Verdict, codec_map: CodecMap) -> ResultStore:
        """Make an empty store for what a verdict has committed."""
        assert verdict.plan is not None
        store = cls(verdict.plan, codec_map)
        for part, digest in zip(verdict.plan.parts, verdict.digests, strict=True):
            if digest is None:
                store.drop(part)
        return store

    @cached_property
    def leaf_grid(self) -> LeafGrid:
        """Leaves of contributions, of which a chunk has one or more."""
        return LeafGrid(self.elements, self.codec_map)

    @cached_property
    def norm_bounds(self) -> NormBounds:
        """Bounds on the norms of the plan's contributions and means."""
        return NormBounds(self.plan, self.codec_map)

    @property
    def blob(self) -> Blob:
        return Blob(kind="result", number=self.plan.round)

    @property
    def held(self) -> Blob:
        """Blob of the results that are here already: see ``HeldResults``."""
        return Blob(kind="held", number=self.plan.round)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return start and stop of a chunk's elements."""
        start = chunk * self.plan.chunk_elements
        return start, min(start + self.plan.chunk_elements, self.elements)

    def values(self, chunk: int) -> int:
        """Return the number of values of a chunk's result."""
        start, stop = self.bounds(chunk)
        return self.plan.copies * (stop - start)

    def result_bytes(self, chunk: int) -> int:
        """Return the size of a result chunk with at least one member; an empty one is the header alone."""
        return self.group.result_bytes(self.codec(chunk), self.values(chunk))

    def codec(self, chunk: int) -> Codec:
        """Return the codec that packs the mean of a chunk."""
        return self.codec_map.result(*self.bounds(chunk), len(self.plan.members))

    def chunks_of(self, part: Part) -> range:
        return chunks_of(self.plan, part)

    def missing(self, part: Part) -> list[range]:
        """Return the ranges of the part's chunks that are not here."""
        runs: list[range] = []
        for index in self.chunks_of(part):
            if self._held[index] is None:
                if runs and runs[-1].stop == index:
                    runs[-1] = range(runs[-1].start, index + 1)
                else:
                    runs.append(range(index, index + 1))
        return runs

    def lacks(self, part: Part) -> int:
        """Return the number of the part's chunks that are not here."""
        return sum(map(len, self.missing(part)))

    def drop(self, part: Part) -> None:
        """Mark a part as void: its mean is zero for all members, with no member in it."""
        self._dropped.update(self.chunks_of(part))

    def forget(self, part: Part) -> None:
        """Remove a part's chunks, whose bytes are not the committed ones."""
        for index in self.chunks_of(part):
            self._held[index] = None
        self._digests.pop(part.start, None)

    def has(self, part: Part) -> bool:
        return all(self._held[index] is not None for index in self.chunks_of(part))

    def bytes_of(self, part: Part) -> list[memoryview]:
        """Return the part's chunks in order. Raises ``BlobUnavailable`` when one is not here."""
        return [self[index] for index in self.chunks_of(part)]

    def digest(self, part: Part) -> bytes:
        """Return the part's ``part_digest``, computed once. Needs all of the part's chunks."""
        if (known := self._digests.get(part.start)) is not None:
            return known
        digesting = self._digesting.pop(part.start, None) or RunningDigest()
        self._digests[part.start] = digest = digesting.of(self.bytes_of(part))
        return digest

    def digest_ahead(self, part: Part, stop: int) -> None:
        """Digest the part's chunks before ``stop``, which are here; ``digest`` continues from there."""
        digesting = self._digesting.pop(part.start, None) or RunningDigest()
        digesting.read([self[index] for index in range(self.chunks_of(part).start, stop)])
        self._digesting[part.start] = digesting

    def holds(self, part: Part, digest: bytes | None) -> bool:
        """Whether the part is here and its bytes have this digest."""
        return digest is not None and self.has(part) and self.digest(part) == digest

    async def put(self, chunk: int, data: memoryview) -> None:
        """See ``ChunkStore.put``."""
        for part in self.plan.parts:
            if part.start in self._digests and chunk in self.chunks_of(part):
                del self._digests[part.start]
        await super().put(chunk, data)

    def check(self, chunk: int, data: memoryview) -> None:
        """Raise ``WireError`` for a chunk whose length does not match its header.

        Most chunks come before a verdict names their part's digest, and memory is bounded by what they may take."""
        group = self.group
        is_empty = data.nbytes < group.header_bytes or not group.header(data).included
        expected = group.header_bytes if is_empty else self.result_bytes(chunk)
        if data.nbytes != expected:
            raise WireError(f"result chunk {chunk} has {data.nbytes} bytes; with its header it has {expected}")

    async def put_checked(self, chunk: int, data: memoryview) -> None:
        """Put a result from another member. Raises ``AboveBound``, and does not put it, when ``check_norm`` does."""
        await in_thread(self.check_norm, chunk, data)
        await self.put(chunk, data)

    def check_norm(self, chunk: int, data: memoryview) -> None:
        """Raise ``AboveBound`` for a mean that is above the bound of its members or does not decode: a lie of its
        maker.

        For a worker thread."""
        header, (start, stop) = self.group.header(data), self.bounds(chunk)
        if not header.included:
            return
        if self.plan.secure is not None:
            self._check_members(chunk, header)
            bound = secure_mean_bound(self.plan, self.plan.secure, self.codec(chunk).growth, (start, stop))
        else:
            bound = self.norm_bounds.mean(header.included, start, stop, with_partial_sums=bool(header.reduced_rows))
        try:
            square = self.codec(chunk).squared_norm(data[self.group.header_bytes :], self.values(chunk))
        except CodecError as error:
            raise AboveBound(f"its mean of chunk {chunk} does not decode: {error}") from error
        if not square <= bound:  # NaN is within no bound
            norm, most = math.sqrt(square), math.sqrt(bound)
            raise AboveBound(f"its mean of chunk {chunk} has norm {norm:.3g}; by the plan it is up to {most:.3g}")

    def _check_members(self, chunk: int, header: ChunkHeader) -> None:
        """Raise ``AboveBound`` for a secure mean of others than the groups whose sums were signed for, or of other
        masked sums than these."""
        part = next(part for part in self.plan.parts if chunk in self.chunks_of(part))
        sums = self.signed_sums.get(part.start)
        if sums is None:
            return
        included = set(header.included)
        whole = [each for each in sums if each <= included]
        if included != set().union(*whole) or len(whole) < fewest_groups(is_trimmed=self.plan.mean == "trimmed"):
            raise AboveBound(f"its mean of chunk {chunk} is not one of the members that were signed for")
        if header.seal != self.signed_names[part.start]:
            raise AboveBound(f"its mean of chunk {chunk} names other masked sums than were signed for")

    def adopt(self, chunks: Sequence[memoryview | None]) -> None:
        """Start from these chunks, by index. Raises ``WireError`` as ``check``."""
        for index, data in enumerate(chunks):
            if data is not None:
                self.check(index, data)
                self._held[index] = data

    @property
    def held_chunks(self) -> list[memoryview | None]:
        """Chunks by index, None where one is not here; the caller's references keep their memory from reuse."""
        return list(self._held)

    def room(self, chunk: int, size: int) -> memoryview:
        """Return memory for a fetched result chunk. Raises ``WireError`` for a size that no result chunk has."""
        if size not in (self.group.header_bytes, self.result_bytes(chunk)):
            raise WireError(f"a result chunk of {size} bytes does not fit")
        return self.buffers.results.take(size, self.group.header_bytes)

    def find_undecodable(self) -> None:
        """Note the chunks whose bytes do not decode: they are void for all members alike.

        For a worker thread. Raises ``BlobUnavailable`` when a chunk is not here that is not of a void part."""
        self._undecodable.clear()
        for index in range(self.chunks):
            if not self.header(index).included:
                continue
            try:
                self.codec(index).checked(self[index][self.group.header_bytes :], self.values(index))
            except CodecError as error:
                log.warning("chunk %d of round %d is void: %s", index, self.plan.round, error)
                self._undecodable.add(index)

    def header(self, chunk: int) -> ChunkHeader:
        """Return a chunk's header, an empty one if the chunk is void. Call it after ``find_undecodable``."""
        is_void = chunk in self._dropped or chunk in self._undecodable
        return ChunkHeader() if is_void else self.group.header(self[chunk])

    def left_out(self) -> set[int]:
        """Return the members that the header of some chunk here does not include."""
        headers = {bytes(result[: self.group.bits_bytes]) for result in self._held if result is not None}
        members = set(self.group.members)
        return {one for header in headers for one in members - set(self.group.header(memoryview(header)).included)}


class ResultArchive(Protocol):
    """Archive of committed results, for rounds that are no longer kept in memory."""

    def keep(self, store: ResultStore, verdict: Verdict) -> None:
        """Begin to write results in the background. ``store`` holds all that the verdict committed."""
        ...

    def take_over(self, number: int) -> None:
        """Offer that round from now on: it is not offered from memory any more."""
        ...


class HeldResults:
    """Results that a store has already, for readers that do not wait (a ``ChunkSource``)."""

    def __init__(self, store: ResultStore) -> None:
        self.chunks = store.chunks
        self._store = store

    async def chunk(self, index: int) -> memoryview:
        """Return the chunk, or no bytes if it is not here yet."""
        try:
            return self._store[index]
        except BlobUnavailable:
            return memoryview(b"")


class RoundMean:
    """Mean of a committed round, decoded from its bytes whenever it is read; for worker threads.

    It keeps the encoded bytes, whatever becomes of the store. A chunk with no member in it, or whose bytes do not
    decode, is void: zero for all members alike. Where contributions are gathered, the mean is zero everywhere, and
    ``brought`` reads them."""

    def __init__(self, store: ResultStore) -> None:
        """``store``: has every chunk except those of void parts, else this raises ``BlobUnavailable``."""
        store.find_undecodable()
        self.elements = store.elements
        self._store = store
        after = store.group.header_bytes
        self._included = [frozenset(store.header(one).included) for one in range(store.chunks)]
        self._packed = [store[one][after:] if self._included[one] else None for one in range(store.chunks)]

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield start, stop and values, ``(stop - start,) float32``, of consecutive pieces that cover the vector.

        Each is one chunk or, up to 2**20 elements, several. The values are overwritten once the next piece is asked
        for.
        """
        chunks, size = len(self._packed), self._store.plan.chunk_elements
        step = max(1, _PIECE_ELEMENTS // size)
        room = empty_aligned(min(step * size, self.elements))
        for first in range(0, chunks, step):
            after = min(first + step, chunks)
            start, stop = first * size, self._store.bounds(after - 1)[1]
            self._decode(range(first, after), room[: stop - start])
            yield start, stop, room[: stop - start]

    def brought(self, member: int) -> Tensor | None:
        """Return a member's contribution to a round that gathers them, a new (n,) float32; None if any of it is
        missing. ``member``: an index of the plan."""
        store, whole = self._store, empty_aligned(self.elements)
        assert store.plan.mean == "gather"
        for index, packed in enumerate(self._packed):
            if packed is None or member not in self._included[index]:
                return None
            (start, stop), codec = store.bounds(index), store.codec(index)
            place = codec.packed_bytes(stop - start)
            codec.decode(packed[member * place : (member + 1) * place], stop - start, whole[start:stop])
        return whole

    def whole(self) -> Tensor:
        """Return the whole mean, a new (n,) float32."""
        mean = empty_aligned(self.elements)
        self._decode(range(len(self._packed)), mean)
        return mean

    def _decode(self, chunks: range, out: Tensor) -> None:
        """Decode consecutive chunks into ``out``, which begins with the first of them."""
        store, pieces = self._store, []
        offset = chunks.start * store.plan.chunk_elements
        for index in chunks:
            start, stop = store.bounds(index)
            values, packed = out[start - offset : stop - offset], self._packed[index]
            if packed is None or store.plan.mean == "gather":
                values.zero_()
            else:
                codec = store.codec(index)
                pieces += [Piece(one, packed[room], values[span]) for span, room, one in spans(codec, stop - start)]
        assert not decode_all(pieces), "find_undecodable has found those that do not decode"


class PublishedResults(dict[int, ResultStore]):
    """Result stores that are offered to other members, by round. ``archive``: offers those that are dropped, if any."""

    def __init__(self, endpoint: Endpoint, archive: ResultArchive | None) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._archive = archive
        self._moved_before = 0

    @property
    def moved(self) -> int:
        """Result chunks made or received so far, of all rounds."""
        return self._moved_before + sum(store.moved for store in self.values())

    def add(self, store: ResultStore) -> ResultStore:
        """Publish a store's results."""
        self[store.plan.round] = store
        self._endpoint.publish(store.blob, store)
        self._endpoint.publish(store.held, HeldResults(store))
        return store

    async def drop(self, *rounds: int) -> None:
        """Stop offering these rounds; the archive takes them over."""
        for number in rounds:
            store = self.pop(number, None)
            if store is not None:
                self._endpoint.retract(store.blob)
                self._endpoint.retract(store.held)
                self._moved_before += store.moved
                await store.close()
                if self._archive is not None:
                    self._archive.take_over(number)
