"""The results of a round on one member: kept until they are committed or void, and offered to everybody else."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from torch import Tensor

from shoal.compression.codec import Codec, CodecError
from shoal.compression.coding import Coding
from shoal.swarm.averaging.buffers import RoundBuffers, same_bytes
from shoal.swarm.averaging.chunk_store import ChunkStore
from shoal.swarm.averaging.groups import Group, Header
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import BlobUnavailable, LinkError, ShoalError, WireError
from shoal.swarm.links import Sink, in_thread
from shoal.swarm.messages import Blob, Part, RoundPlan
from shoal.swarm.transport import Endpoint

log = logging.getLogger(__name__)


class ResultStore(ChunkStore):
    """The result chunks of a round as they arrive or are made; offered to every member."""

    def __init__(self, plan: RoundPlan, coding: Coding, buffers: RoundBuffers | None = None) -> None:
        self.plan = plan
        self.buffers = buffers or RoundBuffers()
        self.coding = coding
        self.group = Group.of(plan)
        self.elements = plan.parts[-1].stop
        self._void: set[int] = set()
        self._digests: dict[int, bytes] = {}
        super().__init__(-(-self.elements // plan.chunk_elements), f"round {plan.round}")

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
        """This part is void: zero for everybody, with nobody in it."""
        self._void.update(self.chunks_of(part))

    def forget(self, part: Part) -> None:
        """Drop a part whose bytes are not the committed ones."""
        for index in self.chunks_of(part):
            self._held[index] = None
        self._digests.pop(part.start, None)

    def has(self, part: Part) -> bool:
        return all(self._held[index] is not None for index in self.chunks_of(part))

    def digest(self, part: Part) -> bytes:
        """SHA-256 of the part's result bytes, in the order of its chunks; made once. Needs all of them."""
        if (known := self._digests.get(part.start)) is not None:
            return known
        digest = hashlib.sha256()
        for index in self.chunks_of(part):
            digest.update(self[index])
        self._digests[part.start] = digest.digest()
        return self._digests[part.start]

    def holds(self, part: Part, digest: bytes | None) -> bool:
        """Whether these are the bytes of a part that is here."""
        return digest is not None and self.has(part) and self.digest(part) == digest

    async def put(self, chunk: int, data: memoryview) -> None:
        """See ``ChunkStore.put``."""
        for part in self.plan.parts:
            if part.start in self._digests and chunk in self.chunks_of(part):
                del self._digests[part.start]
        await super().put(chunk, data)

    def sink(self, received: dict[int, memoryview]) -> Callable[[int, int], memoryview]:
        """Where fetched result chunks go; refuses any that has neither of the two possible lengths."""
        group = self.group

        def take(chunk: int, size: int) -> memoryview:
            start, stop = self.bounds(chunk)
            if size not in (group.header_bytes, group.result_bytes(self.codec(chunk), stop - start)):
                raise WireError(f"a result chunk of {size} bytes does not fit")
            received[chunk] = self.buffers.results.take(size, group.header_bytes)
            return received[chunk]

        return take

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The decoded mean, (elements,) float32, in ``out`` if given. Needs every chunk but those of void parts.

        A chunk with nobody in it, or whose bytes do not decode, is void: zero for everybody alike."""
        mean = self.buffers.passing.floats(self.elements) if out is None else out
        for index in range(self.chunks):
            start, stop = self.bounds(index)
            try:
                if index not in self._void and self.group.header(self[index]).included:
                    packed = self[index][self.group.header_bytes :]
                    self.codec(index).decode(packed, stop - start, mean[start:stop])
                else:
                    mean[start:stop] = 0.0
            except CodecError as error:
                mean[start:stop] = 0.0
                log.warning("chunk %d of round %d is void: %s", index, self.plan.round, error)
                self._void.add(index)
        return mean

    def header(self, chunk: int) -> Header:
        """Of a chunk whose mean counts; after ``mean``."""
        return Header() if chunk in self._void else self.group.header(self[chunk])

    def left_out(self) -> set[int]:
        """The members that some chunk here does without, as the bytes say."""
        headers = {bytes(result[: self.group.header_bytes]) for result in self._held if result is not None}
        members = set(self.group.members)
        return {one for header in headers for one in members - set(self.group.header(memoryview(header)).included)}


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


async def fetch_part(
    endpoint: Endpoint,
    store: ResultStore,
    part: Part,
    holder: str,
    progress_s: float,
    hand_in: Callable[[int, memoryview], Awaitable[None]] | None = None,
    *,
    only_held: bool = False,
) -> None:
    """Bring what the store lacks of one part from ``holder``. Raises ``ShoalError``, the holder's too.

    ``hand_in``: where it goes instead of the store; ``only_held``: take what it has already, and wait for no more."""
    put, blob = hand_in or store.put, store.held if only_held else store.blob
    for run in store.missing(part):
        received: dict[int, memoryview] = {}
        fitting = store.sink(received)

        def sink(chunk: int, size: int, fitting: Sink = fitting) -> memoryview:
            return memoryview(bytearray()) if only_held and not size else fitting(chunk, size)

        async with aclosing(endpoint.fetch(holder, blob, run, sink, progress_s)) as stream:
            async for chunk in stream:
                if chunk in received:
                    await put(chunk, received.pop(chunk))


async def adopt_agreed(
    endpoint: Endpoint, store: ResultStore, part: Part, holders: Sequence[str], progress_s: float
) -> None:
    """Take over what two of ``holders`` have already, and the same, of what the store lacks of a part.

    Nothing shows yet which bytes are the owner's, so nobody's word alone counts; unless there are no two others."""
    enough = min(2, len(store.plan.members) - 2)
    said: dict[int, list[memoryview]] = {}

    async def hear(chunk: int, data: memoryview) -> None:
        said.setdefault(chunk, []).append(data)
        if sum(same_bytes(data, one) for one in said[chunk]) >= enough:
            await store.put(chunk, data)
            del said[chunk]

    for holder in holders:
        if store.has(part):
            return
        with suppress(ShoalError):
            await fetch_part(endpoint, store, part, holder, progress_s, hear, only_held=True)


async def ensure_part(
    endpoint: Endpoint, store: ResultStore, part: Part, digest: bytes, others: Sequence[str], deadlines: Deadlines
) -> None:
    """Make sure that the store holds the committed bytes of a part, from its owner or any other member of the plan.

    Everybody is asked in turn for what is there already, again and again until nothing new has come for long: some may
    still be making them, but most who have not got them lack them as we do, and are not waited for one by one. Raises
    ``LinkError`` when nobody has them."""
    loop = asyncio.get_running_loop()
    if store.has(part):
        if await in_thread(store.digest, part) == digest:
            return
        store.forget(part)
    owner, trouble = store.plan.members[part.owner].peer, "nobody has them"
    holders = sorted(others, key=lambda peer: peer != owner)
    fewest, moved_s, one_by_one = len(store.chunks_of(part)), loop.time(), False
    while holders and loop.time() - moved_s < deadlines.result_s:
        for holder in list(holders):
            if one_by_one:
                store.forget(part)
            lacked = store.lacks(part)
            try:
                await fetch_part(endpoint, store, part, holder, deadlines.adopt_s, only_held=True)
            except ShoalError as error:  # the other side's errors come out of here, too
                trouble = str(error)
            if store.lacks(part) < fewest:
                fewest, moved_s = store.lacks(part), loop.time()
            if not store.has(part):
                continue
            if await in_thread(store.digest, part) == digest:
                return
            trouble = f"{holder} has other bytes than the committed ones"
            fewest = len(store.chunks_of(part))
            if lacked == fewest:
                holders.remove(holder)
                log.warning("round %d: %s", store.plan.round, trouble)
            else:  # of several sources, any may be the wrong one: from now on everybody's bytes are taken by themselves
                one_by_one = True
            store.forget(part)
        await asyncio.sleep(deadlines.heartbeat_s if holders else 0.0)
    store.forget(part)
    raise LinkError(trouble)
