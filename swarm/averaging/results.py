"""Results of a round on one member: kept until they are committed or void, offered to every member, and decoded."""

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
    """Return BLAKE3 of a part's result chunks, one after the other: 32 bytes. On one thread, without the GIL."""
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
    """Chunks by index, each from when it arrives or is made until ``close`` (a ``ChunkSource``). ``about``: what they
    are, for errors; ``moved``: how many have come."""

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
        """Waits until that chunk exists here. Raises ``BlobUnavailable`` when it never will."""
        await self._changes.until(lambda: self._closed or self._held[index] is not None)
        return self[index]

    async def close(self) -> None:
        """Nobody needs them any more: ends the streams that wait for one."""
        self._closed = True
        self._held = [None] * self.chunks
        self._changes.announce()

    def __getitem__(self, index: int) -> memoryview:
        data = self._held[index]
        if data is None:
            raise BlobUnavailable(f"chunk {index} of {self._about} is not here")
        return data


def chunks_of(plan: RoundPlan, part: Part) -> range:
    """The chunks of a part, by their index in the round."""
    size = plan.chunk_elements
    return range(part.start // size, -(-part.stop // size))


class ResultStore(ChunkStore):
    """The result chunks of a round as they arrive or are made; offered to every member."""

    def __init__(self, plan: RoundPlan, codec_map: CodecMap, buffers: RoundBuffers | None = None) -> None:
        """Raises ``WireError`` for a plan with larger chunks than the run's codec packs into a frame."""
        if plan.chunk_elements > codec_map.formats.max_chunk_values:
            most = codec_map.formats.max_chunk_values
            raise WireError(
                f"the plan of round {plan.round} has chunks of {plan.chunk_elements} values, not up to {most}"
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
        """As ``HeldResults``."""
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
        """The part's chunks that are not here, as ranges."""
        runs: list[range] = []
        for index in self.chunks_of(part):
            if self._held[index] is None:
                if runs and runs[-1].stop == index:
                    runs[-1] = range(runs[-1].start, index + 1)
                else:
                    runs.append(range(index, index + 1))
        return runs

    def lacks(self, part: Part) -> int:
        """How many of the part's chunks are not here."""
        return sum(map(len, self.missing(part)))

    def drop(self, part: Part) -> None:
        """Mark a part as void: zero for everybody, with nobody in it."""
        self._dropped.update(self.chunks_of(part))

    def forget(self, part: Part) -> None:
        """Drop a part whose bytes are not the committed ones."""
        for index in self.chunks_of(part):
            self._held[index] = None
        self._digests.pop(part.start, None)

    def has(self, part: Part) -> bool:
        return all(self._held[index] is not None for index in self.chunks_of(part))

    def bytes_of(self, part: Part) -> list[memoryview]:
        """The part's chunks in their order. Raises ``BlobUnavailable`` when one is not here."""
        return [self[index] for index in self.chunks_of(part)]

    def digest(self, part: Part) -> bytes:
        """See ``part_digest``; made once. Needs all of the part's chunks."""
        if (known := self._digests.get(part.start)) is not None:
            return known
        digesting = self._digesting.pop(part.start, None) or RunningDigest()
        self._digests[part.start] = digest = digesting.of(self.bytes_of(part))
        return digest

    def digest_ahead(self, part: Part, stop: int) -> None:
        """Digest the part's chunks up to that one, which are here: ``digest`` goes on from there."""
        digesting = self._digesting.pop(part.start, None) or RunningDigest()
        digesting.of([self[index] for index in range(self.chunks_of(part).start, stop)])
        self._digesting[part.start] = digesting

    def holds(self, part: Part, digest: bytes | None) -> bool:
        """Whether these are the bytes of a part that is here."""
        return digest is not None and self.has(part) and self.digest(part) == digest

    async def put(self, chunk: int, data: memoryview) -> None:
        """See ``ChunkStore.put``."""
        for part in self.plan.parts:
            if part.start in self._digests and chunk in self.chunks_of(part):
                del self._digests[part.start]
        await super().put(chunk, data)

    def check(self, chunk: int, data: memoryview) -> None:
        """Raises ``WireError`` for a chunk whose length is not the one that goes with its header.

        Digests cover a part's chunks one after the other: where each ends, only its header tells."""
        group, (start, stop) = self.group, self.bounds(chunk)
        is_empty = data.nbytes < group.header_bytes or not group.header(data).included
        expected = group.header_bytes if is_empty else group.result_bytes(self.codec(chunk), stop - start)
        if data.nbytes != expected:
            raise WireError(f"result chunk {chunk} has {data.nbytes} bytes; with its header it has {expected}")

    async def put_checked(self, chunk: int, data: memoryview) -> None:
        """Put a result that another member has made, or passes on. Raises ``AboveBound``: it is not offered then."""
        await in_thread(self.check_norm, chunk, data)
        await self.put(chunk, data)

    def check_norm(self, chunk: int, data: memoryview) -> None:
        """Raises ``AboveBound`` for a mean that is larger than who is in it may make it, or that does not decode, for
        which its maker is to blame. For a worker thread."""
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
        """Begin with these, by index. Raises ``WireError`` as ``check``."""
        for index, data in enumerate(chunks):
            if data is not None:
                self.check(index, data)
                self._held[index] = data

    @property
    def held_chunks(self) -> list[memoryview | None]:
        """Those in hand, by index; their memory is not used again before they are let go of."""
        return list(self._held)

    def room(self, chunk: int, size: int) -> memoryview:
        """Return memory for a fetched result chunk. Raises ``WireError`` for a size that no result chunk has."""
        group, (start, stop) = self.group, self.bounds(chunk)
        if size not in (group.header_bytes, group.result_bytes(self.codec(chunk), stop - start)):
            raise WireError(f"a result chunk of {size} bytes does not fit")
        return self.buffers.results.take(size, group.header_bytes)

    def mean(self) -> Tensor:
        """The decoded mean, (elements,) float32. Needs every chunk but those of void parts."""
        mean = self.buffers.passing.floats(self.elements)
        self.decode(range(self.chunks), mean)
        return mean

    def decode(self, chunks: Sequence[int], mean: Tensor) -> None:
        """Decode chunks into their places in ``mean``, (elements,) float32. Raises ``BlobUnavailable`` when one is not
        here.

        A chunk with nobody in it, or whose bytes do not decode, is void: zero for everybody alike."""
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
        """Whether it is of a void part."""
        return chunk in self._dropped

    def header(self, chunk: int) -> ChunkHeader:
        """Of a chunk whose mean counts; after ``decode``."""
        is_void = chunk in self._dropped or chunk in self._undecodable
        return ChunkHeader() if is_void else self.group.header(self[chunk])

    def left_out(self) -> set[int]:
        """The members that some chunk here does without, as the bytes say."""
        headers = {bytes(result[: self.group.header_bytes]) for result in self._held if result is not None}
        members = set(self.group.members)
        return {one for header in headers for one in members - set(self.group.header(memoryview(header)).included)}


class Archive(Protocol):
    """Where the results of committed rounds go when they are no longer kept in memory."""

    def keep(self, store: ResultStore, verdict: Verdict) -> None:
        """Begin to write them down, beside everything else. ``store`` holds all that the verdict committed."""
        ...

    def take_over(self, number: int) -> None:
        """That round is not offered from memory any more."""
        ...


class HeldResults:
    """Results that a store holds already, for readers that cannot wait (a ``ChunkSource``)."""

    def __init__(self, store: ResultStore) -> None:
        self.chunks = store.chunks
        self._store = store

    async def chunk(self, index: int) -> memoryview:
        """Return that result, or no bytes if it is not here yet."""
        try:
            return self._store[index]
        except BlobUnavailable:
            return memoryview(b"")


class ResultDecoder:
    """Decodes a round's mean piece by piece, in worker threads, while other results are still on their way.

    A decoded chunk counts as long as the store holds the very same bytes."""

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._mean: Tensor | None = None
        self._lock = threading.Lock()
        self._decoded: dict[int, memoryview] = {}

    def decode(self, chunks: Sequence[int]) -> None:
        """Those of them that are not decoded already: all are here, or void. Several may be decoded at once."""
        store = self._store
        left = [index for index in chunks if not self._is_decoded(index)]
        decoded = {index: store[index] for index in left if not store.is_dropped(index)}
        store.decode(left, self._room())
        self._decoded |= decoded

    def finish(self) -> Tensor:
        """The whole mean, as ``ResultStore.mean``."""
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
    """Stores by the number of their round. ``archive``: what those that are dropped are then offered from, if any."""

    def __init__(self, endpoint: Endpoint, archive: Archive | None) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._archive = archive
        self._moved_before = 0

    @property
    def moved(self) -> int:
        """Result chunks made or received so far, of all rounds."""
        return self._moved_before + sum(store.moved for store in self.values())

    def add(self, store: ResultStore) -> ResultStore:
        """Offer what it holds, and what it will."""
        self[store.plan.round] = store
        self._endpoint.publish(store.blob, store)
        self._endpoint.publish(store.held, HeldResults(store))
        return store

    async def drop(self, *rounds: int) -> None:
        """Of those that are here."""
        for number in rounds:
            store = self.pop(number, None)
            if store is not None:
                self._endpoint.retract(store.blob)
                self._endpoint.retract(store.held)
                self._moved_before += store.moved
                await store.close()
                if self._archive is not None:
                    self._archive.take_over(number)
