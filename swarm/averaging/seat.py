"""One member's place in an exchange: whom it is among, and how it gets chunks from them, or from itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass

from shoal.swarm.averaging.groups import Group
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.bulk import ChunkSource
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import LinkError, MemberGone, WireError
from shoal.swarm.links import Sink
from shoal.swarm.messages import Blob
from shoal.swarm.transport import Endpoint

HandIn = Callable[[int, memoryview], Awaitable[None]]
"""Takes a chunk by its index; the next one comes when it returns."""


@dataclass(frozen=True)
class Wanted:
    """Chunks of ``blob``: of which lengths each may be, with which header, and how long to wait for one."""

    blob: Blob
    sizes_bytes: Callable[[int], Collection[int]]
    header_bytes: int
    wait_s: float


@dataclass(frozen=True)
class Seat:
    """``was_away``: whether the coordinator was, since that moment of the loop's clock. Then others may not have heard
    of this round, and without a verdict it costs nothing to wait for them. ``sources``: what we offer ourselves."""

    endpoint: Endpoint
    store: ResultStore
    me: int
    deadlines: Deadlines
    was_away: Callable[[float], bool]
    sources: dict[Blob, ChunkSource]

    @property
    def members(self) -> list[str]:
        return [member.peer for member in self.store.plan.members]

    def contributions(self) -> Wanted:
        """What a member brings."""
        store = self.store

        def sizes_bytes(chunk: int) -> Collection[int]:
            start, stop = store.bounds(chunk)
            return (store.coding.contribution(start, stop).packed_bytes(stop - start),)

        blob = Blob(kind="contribution", number=store.plan.round)
        return Wanted(blob, sizes_bytes, 0, self.deadlines.contribution_s)

    def partials(self, group: Group) -> Wanted:
        """What a relay makes of its row's contributions; ``group`` is that row."""
        store = self.store

        def sizes_bytes(chunk: int) -> Collection[int]:
            start, stop = store.bounds(chunk)
            codec = store.coding.result(start, stop, len(group.members))
            return (group.header_bytes, group.result_bytes(codec, stop - start))

        blob = Blob(kind="partial", number=store.plan.round)
        return Wanted(blob, sizes_bytes, group.header_bytes, self.deadlines.partial_s)

    async def receive(self, member: int, wanted: Wanted, chunks: range, hand_in: HandIn) -> None:
        """Hand in the chunks one after the other. Raises ``ShoalError``, the other side's too."""
        received: dict[int, memoryview] = {}
        following = chunks.start

        def sink(chunk: int, size: int) -> memoryview:
            if size not in wanted.sizes_bytes(chunk):
                raise WireError(f"a {wanted.blob.kind} chunk of {size} bytes does not fit")
            received[chunk] = self.store.buffers.passing.take(size, wanted.header_bytes)
            return received[chunk]

        async def go_on() -> None:
            nonlocal following
            async with aclosing(self._fetch(member, wanted, range(following, chunks.stop), sink)) as stream:
                async for chunk in stream:
                    following = chunk + 1
                    await hand_in(chunk, received.pop(chunk))

        await self.patiently(go_on)

    async def patiently(self, fetch: Callable[[], Awaitable[None]]) -> None:
        """Fetch; again when that took too long while the coordinator was away. Raises ``ShoalError``."""
        while True:
            start_s = asyncio.get_running_loop().time()
            try:
                return await fetch()
            except MemberGone:
                raise
            except LinkError:
                if not self.was_away(start_s):
                    raise
            await asyncio.sleep(self.deadlines.heartbeat_s)  # that somebody cannot be had is known at once, and again

    def _fetch(self, member: int, wanted: Wanted, chunks: range, sink: Sink) -> AsyncGenerator[int, None]:
        if member == self.me:
            return _own(self.sources[wanted.blob], chunks, sink)
        return self.endpoint.fetch(self.members[member], wanted.blob, chunks, sink, wanted.wait_s)


async def _own(source: ChunkSource, chunks: range, sink: Sink) -> AsyncGenerator[int, None]:
    for chunk in chunks:
        data = await source.chunk(chunk)
        sink(chunk, data.nbytes)[:] = data
        yield chunk
