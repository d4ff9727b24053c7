"""The results of a round on one member: kept until they are committed or void, and offered to everybody else."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CodecError
from shoal.compression.coding import Coding
from shoal.swarm.averaging.reducer import mask_bytes, result_bytes, unpack_mask
from shoal.swarm.errors import BlobUnavailable, LinkError, ShoalError, WireError
from shoal.swarm.links import Sink, in_thread
from shoal.swarm.messages import Blob, Part, RoundPlan
from shoal.swarm.transport import Endpoint

log = logging.getLogger(__name__)


class ResultStore:
    """The result chunks of a round as they arrive or are made; offered to every member (a ``ChunkSource``)."""

    def __init__(self, plan: RoundPlan, coding: Coding) -> None:
        self.plan = plan
        self.coding = coding
        self.elements = plan.parts[-1].stop
        self.chunks = -(-self.elements // plan.chunk_elements)
        self.moved = 0
        self._results: list[memoryview | None] = [None] * self.chunks
        self._void: set[int] = set()
        self._closed = False
        self._arrived = asyncio.Condition()

    @property
    def blob(self) -> Blob:
        return Blob(kind="result", number=self.plan.round)

    @property
    def held(self) -> Blob:
        """As ``HeldResults``."""
        return Blob(kind="held", number=self.plan.round)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The elements of a chunk."""
        start = chunk * self.plan.chunk_elements
        return start, min(start + self.plan.chunk_elements, self.elements)

    def codec(self, chunk: int) -> Codec:
        """What the mean of a chunk is packed with."""
        return self.coding.result(*self.bounds(chunk), len(self.plan.members))

    def chunks_of(self, part: Part) -> range:
        size = self.plan.chunk_elements
        return range(part.start // size, -(-part.stop // size))

    def missing(self, part: Part) -> list[range]:
        """The part's chunks that are not here, as ranges."""
        runs: list[range] = []
        for index in self.chunks_of(part):
            if self._results[index] is None:
                if runs and runs[-1].stop == index:
                    runs[-1] = range(runs[-1].start, index + 1)
                else:
                    runs.append(range(index, index + 1))
        return runs

    def drop(self, part: Part) -> None:
        """This part is void: zero for everybody, with nobody in it."""
        self._void.update(self.chunks_of(part))

    async def put(self, chunk: int, result: memoryview) -> None:
        async with self._arrived:
            self._results[chunk] = result
            self.moved += 1
            self._arrived.notify_all()

    async def chunk(self, index: int) -> memoryview:
        """Waits until that result exists here. Raises ``BlobUnavailable`` when it never will."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._closed or self._results[index] is not None)
        return self[index]

    async def close(self) -> None:
        """Nobody needs them any more: ends the streams that wait for one."""
        async with self._arrived:
            self._closed = True
            self._results = [None] * self.chunks
            self._arrived.notify_all()

    def __getitem__(self, index: int) -> memoryview:
        result = self._results[index]
        if result is None:
            raise BlobUnavailable(f"chunk {index} of round {self.plan.round} is not here")
        return result

    def forget(self, part: Part) -> None:
        """Drop a part whose bytes are not the committed ones."""
        for index in self.chunks_of(part):
            self._results[index] = None

    def has(self, part: Part) -> bool:
        return all(self._results[index] is not None for index in self.chunks_of(part))

    def digest(self, part: Part) -> bytes:
        """SHA-256 of the part's result bytes, in the order of its chunks."""
        digest = hashlib.sha256()
        for index in self.chunks_of(part):
            digest.update(self[index])
        return digest.digest()

    def sink(self, received: dict[int, memoryview]) -> Callable[[int, int], memoryview]:
        """Where fetched result chunks go; refuses any that has neither of the two possible lengths."""
        members = len(self.plan.members)

        def take(chunk: int, size: int) -> memoryview:
            start, stop = self.bounds(chunk)
            if size not in (mask_bytes(members), result_bytes(self.codec(chunk), stop - start, members)):
                raise WireError(f"a result chunk of {size} bytes does not fit")
            received[chunk] = memoryview(bytearray(size))
            return received[chunk]

        return take

    def mean(self) -> Tensor:
        """The decoded mean, (elements,) float32. Needs every chunk but those of void parts.

        A chunk with nobody in it, or whose bytes do not decode, is void: zero for everybody alike."""
        mean = torch.zeros(self.elements)
        members = len(self.plan.members)
        for index in range(self.chunks):
            if index in self._void:
                continue
            start, stop = self.bounds(index)
            result = self[index]
            try:
                if unpack_mask(result, members):
                    self.codec(index).decode(result[mask_bytes(members) :], stop - start, mean[start:stop])
            except CodecError as error:
                mean[start:stop] = 0.0
                log.warning("chunk %d of round %d is void: %s", index, self.plan.round, error)
                self._void.add(index)
        return mean

    def included(self, chunk: int) -> list[int]:
        """The members in the mean of a chunk; after ``mean``."""
        return [] if chunk in self._void else unpack_mask(self[chunk], len(self.plan.members))

    def left_out(self) -> set[int]:
        """The members that some chunk here does without, as the bytes say."""
        members = len(self.plan.members)
        masks = {bytes(result[: mask_bytes(members)]) for result in self._results if result is not None}
        return {index for mask in masks for index in set(range(members)) - set(unpack_mask(memoryview(mask), members))}


class HeldResults:
    """What of a store's results is there already, for those that cannot wait (a ``ChunkSource``)."""

    def __init__(self, store: ResultStore) -> None:
        self.chunks = store.chunks
        self._store = store

    async def chunk(self, index: int) -> memoryview:
        """That result, or nothing."""
        try:
            return self._store[index]
        except BlobUnavailable:
            return memoryview(b"")


async def fetch_part(endpoint: Endpoint, store: ResultStore, part: Part, holder: str, progress_s: float) -> None:
    """Bring what the store lacks of one part from ``holder``. Raises ``ShoalError``, the holder's too."""
    for run in store.missing(part):
        received: dict[int, memoryview] = {}
        stream = endpoint.fetch(holder, store.blob, run, store.sink(received), progress_s)
        async with aclosing(stream):
            async for chunk in stream:
                await store.put(chunk, received.pop(chunk))


async def adopt_part(endpoint: Endpoint, store: ResultStore, part: Part, holder: str, progress_s: float) -> None:
    """Take over what ``holder`` has already of what the store lacks of one part. Raises ``ShoalError``."""
    for run in store.missing(part):
        received: dict[int, memoryview] = {}
        fitting = store.sink(received)

        def sink(chunk: int, size: int, fitting: Sink = fitting) -> memoryview:
            return fitting(chunk, size) if size else memoryview(bytearray())

        stream = endpoint.fetch(holder, store.held, run, sink, progress_s)
        async with aclosing(stream):
            async for chunk in stream:
                if chunk in received:
                    await store.put(chunk, received.pop(chunk))


async def ensure_part(
    endpoint: Endpoint, store: ResultStore, part: Part, digest: bytes, others: Sequence[str], progress_s: float
) -> None:
    """Make sure that the store holds the committed bytes of a part, from its owner or any other member of the plan.

    Raises ``LinkError`` when none of them has them."""
    if store.has(part) and await in_thread(store.digest, part) == digest:
        return
    owner, trouble = store.plan.members[part.owner].peer, "nobody has them"
    for holder in sorted(others, key=lambda peer: peer != owner):
        store.forget(part)
        try:
            await fetch_part(endpoint, store, part, holder, progress_s)
        except ShoalError as error:  # the other side's errors come out of here, too
            trouble = str(error)
            continue
        if await in_thread(store.digest, part) == digest:
            return
        trouble = f"{holder} has other bytes than the committed ones"
        log.warning("round %d: %s", store.plan.round, trouble)
    store.forget(part)
    raise LinkError(trouble)
