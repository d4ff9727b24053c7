"""Results of a round on one member: stored as they arrive or are made, offered to other members, and decoded."""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

from blake3 import blake3
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.codec_map import CodecMap, Piece, decode_all
from shoal.compression.formats import CodecError
from shoal.swarm.aio import Changes, in_thread
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_header import ChunkHeader, Group
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.errors import AboveBound, BlobUnavailable, WireError
from shoal.swarm.protocol.rounds import Part, RoundPlan, Verdict
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)


def part_digest(chunks: Iterable[memoryview]) -> bytes:
    """Return the BLAKE3 digest of a part's result chunks in order: 32 bytes. One thread, without the GIL."""
    return RunningDigest().of(list(chunks))


class RunningDigest:
    """Incremental ``part_digest`` of chunks that come one by one."""

    def __init__(self) -> None:
        self._digest = blake3()
        self._chunks: list[memoryview] = []

    def of(self, chunks: Sequence[memoryview]) -> bytes:
        """Return the digest of these chunks, from the first on; chunks digested by the last call are not read again."""
        before = len(self._chunks)
        if len(chunks) < before or not all(map(operator.is_, self._chunks, chunks)):
            self._digest, self._chunks, before = blake3(), [], 0
        for chunk in chunks[before:]:
            self._digest.update(chunk)
            self._chunks.append(chunk)
        return self._digest.digest()


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
        if plan.chunk_elements > codec_map.formats.max_chunk_values:
            most = codec_map.formats.max_chunk_values
            raise WireError(
                f"the plan of round {plan.round} has chunks of {plan.chunk_elements} values; the codec allows {most}"
            )
        self.plan = plan
        self.buffers = buffers or RoundBuffers()
        self.codec_map = codec_map
        self.group = Group.of(plan)
        self.elements = plan.parts[-1].stop
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
        digesting.of([self[index] for index in range(self.chunks_of(part).start, stop)])
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

        A digest covers a part's chunks one after the other, so it does not show where one ends."""
        group, (start, stop) = self.group, self.bounds(chunk)
        is_empty = data.nbytes < group.header_bytes or not group.header(data).included
        expected = group.header_bytes if is_empty else group.result_bytes(self.codec(chunk), stop - start)
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
        bound = self.norm_bounds.mean(header.included, start, stop, with_partial_sums=bool(header.reduced_rows))
        try:
            square = self.codec(chunk).squared_norm(data[self.group.header_bytes :], stop - start)
        except CodecError as error:
            raise AboveBound(f"its mean of chunk {chunk} does not decode: {error}") from error
        if not square <= bound:  # NaN is within no bound
            norm, most = math.sqrt(square), math.sqrt(bound)
            raise AboveBound(f"its mean of chunk {chunk} has norm {norm:.3g}; by the plan it is up to {most:.3g}")

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
        group, (start, stop) = self.group, self.bounds(chunk)
        if size not in (group.header_bytes, group.result_bytes(self.codec(chunk), stop - start)):
            raise WireError(f"a result chunk of {size} bytes does not fit")
        return self.buffers.results.take(size, group.header_bytes)

    def mean(self) -> Tensor:
        """Return the decoded mean, (elements,) float32. Needs every chunk except those of void parts."""
        mean = self.buffers.passing.floats(self.elements)
        self.decode(range(self.chunks), mean)
        return mean

    def decode(self, chunks: Sequence[int], mean: Tensor) -> None:
        """Decode chunks into their places in ``mean``, (elements,) float32.

        A chunk with no member in it, or whose bytes do not decode, is void: zero for all members alike. Raises
        ``BlobUnavailable`` when a chunk is not here."""
        places = {index: mean[slice(*self.bounds(index))] for index in chunks}
        self._undecodable.difference_update(places)
        counting = [index for index in places if index not in self._dropped and self.header(index).included]
        after = self.group.header_bytes
        pieces = [Piece(self.codec(index), self[index][after:], places[index]) for index in counting]
        for at, error in decode_all(pieces).items():
            log.warning("chunk %d of round %d is void: %s", counting[at], self.plan.round, error)
            self._undecodable.add(counting[at])
        for index in places.keys() - set(counting) | self._undecodable.intersection(places):
            places[index].zero_()

    def is_dropped(self, chunk: int) -> bool:
        """Whether the chunk is of a void part."""
        return chunk in self._dropped

    def header(self, chunk: int) -> ChunkHeader:
        """Return a chunk's header, an empty one if the chunk is void. Call it after ``decode``."""
        is_void = chunk in self._dropped or chunk in self._undecodable
        return ChunkHeader() if is_void else self.group.header(self[chunk])

    def left_out(self) -> set[int]:
        """Return the members that the header of some chunk here does not include."""
        headers = {bytes(result[: self.group.header_bytes]) for result in self._held if result is not None}
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


class ResultDecoder:
    """Incremental decoder of a round's mean, for worker threads, while other results are still on their way.

    A chunk is decoded again if the store has other memory for it by then."""

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._mean: Tensor | None = None
        self._lock = threading.Lock()
        self._decoded: dict[int, memoryview] = {}

    def decode(self, chunks: Sequence[int]) -> None:
        """Decode those chunks that are not decoded yet; each is here or void. Thread-safe for disjoint chunks."""
        store = self._store
        left = [index for index in chunks if not self._is_decoded(index)]
        decoded = {index: store[index] for index in left if not store.is_dropped(index)}
        store.decode(left, self._room())
        self._decoded |= decoded

    def finish(self) -> Tensor:
        """Return the whole mean, as ``ResultStore.mean``."""
        self.decode(range(self._store.chunks))
        return self._room()

    def _is_decoded(self, index: int) -> bool:
        chunk = None if self._store.is_dropped(index) else self._decoded.get(index)
        return chunk is not None and self._store[index] is chunk

    def _room(self) -> Tensor:
        with self._lock:
            if self._mean is None:
                self._mean = self._store.buffers.passing.floats(self._store.elements)
            return self._mean


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
