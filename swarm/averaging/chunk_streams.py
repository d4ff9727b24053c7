"""Streams of chunks between one member and the others of a round, and how fast each other member delivers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.contribution import contribution_blob
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.traffic import Traffic
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import LinkError, MemberGone, ShoalError, WireError
from shoal.swarm.protocol.messages import MAX_DELIVERIES, Blob, Delivery
from shoal.swarm.transport.link import Sink
from shoal.swarm.transport.node import Endpoint
from shoal.swarm.transport.source import ChunkSource

log = logging.getLogger(__name__)

_FEWEST_BYTES = 2**18
"""Less says more about delays than about a link."""


@dataclass
class DeliveryMeter:
    """What one member delivered, in the time that we waited for chunks of its contribution.

    Partials and results are not waited for here: who makes them waits for others itself. But they come over the same
    link, so what arrives of them meanwhile counts."""

    size_bytes: int = 0
    seconds: float = 0.0
    _beside_bytes: int = 0
    _arrived_s: float = -math.inf

    def began(self, now_s: float) -> None:
        """The first chunk of a stream is here: how long it took is not the link's, but everybody's start."""
        self._beside_bytes, self._arrived_s = 0, now_s

    def arrived(self, size_bytes: int, now_s: float, waited_s: float, paused_s: float) -> None:
        """Another chunk of a stream, ``waited_s`` after we asked for it, ``paused_s`` after the one before had come.

        After a pause of ours that was longer than the wait, it had been lying here and tells nothing. Streams run
        beside each other: no moment counts twice."""
        if waited_s >= paused_s:
            self.size_bytes += size_bytes + self._beside_bytes
            self.seconds += min(waited_s + paused_s, now_s - self._arrived_s)
        self._beside_bytes, self._arrived_s = 0, now_s

    def arrived_beside(self, size_bytes: int) -> None:
        """A chunk of something else."""
        self._beside_bytes += size_bytes

    @property
    def bps(self) -> float | None:
        """Bits a second; None while too little came to tell."""
        if self.size_bytes < _FEWEST_BYTES or not self.seconds:
            return None
        return max(1.0, 8 * self.size_bytes / self.seconds)


class MeteredEndpoint:
    """An endpoint that measures what is fetched over it (an ``Endpoint``)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._paces: dict[str, DeliveryMeter] = {}

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._endpoint.publish(blob, source)

    def retract(self, blob: Blob) -> None:
        self._endpoint.retract(blob)

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        self._endpoint.share_uplink(shares, scope)

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        """As the endpoint's."""
        pace, sizes = self._paces.setdefault(peer, DeliveryMeter()), dict.fromkeys(chunks, 0)

        def measured(chunk: int, size_bytes: int) -> memoryview:  # on the data plane's thread
            sizes[chunk] = size_bytes
            return sink(chunk, size_bytes)

        loop = asyncio.get_running_loop()
        arrived_s = asked_s = loop.time()
        async with aclosing(self._endpoint.fetch(peer, blob, chunks, measured, progress_s)) as stream:
            async for chunk in stream:
                now_s = loop.time()
                if blob.kind != "contribution":
                    pace.arrived_beside(sizes[chunk])
                elif chunk == chunks.start:
                    pace.began(now_s)
                else:
                    pace.arrived(sizes[chunk], now_s, now_s - asked_s, asked_s - arrived_s)
                arrived_s = now_s
                yield chunk
                asked_s = loop.time()

    def forget(self) -> None:
        """Begin anew, for another round."""
        self._paces.clear()

    def deliveries(self, members: Sequence[str], me: str, round_number: int) -> tuple[Delivery, ...]:
        """Of some of the plan's ``members``, others in every round when there are more than a report has room for."""
        known = [(index, pace.bps) for index, peer in enumerate(members) if (pace := self._paces.get(peer)) is not None]
        seen = [Delivery(member=index, bps=bps) for index, bps in known if bps is not None]
        if not seen:
            return ()
        first = (members.index(me) + round_number * MAX_DELIVERIES) % len(seen)
        return tuple((seen[first:] + seen[:first])[:MAX_DELIVERIES])


Chunks = AsyncGenerator[tuple[int, memoryview], None]
"""Of a stream, with their index, in order."""


class PrefetchedStream:
    """A stream whose first chunk is on its way, or will be; no more come than its window allows."""

    def __init__(self, stream: Chunks, tasks: asyncio.TaskGroup) -> None:
        self._stream = stream
        self._first = tasks.create_task(self._begin())

    async def _begin(self) -> tuple[int, memoryview] | ShoalError | None:
        try:
            return await anext(self._stream, None)
        except ShoalError as error:
            return error

    async def chunks(self, wait_s: float) -> Chunks:
        """All of them, from the first on. Raises ``ShoalError``: ``LinkError`` when ``wait_s`` pass without one."""
        try:
            done, _ = await asyncio.wait([self._first], timeout=wait_s)
            if not done or self._first.cancelled():
                raise LinkError(f"nothing had come ahead, nor for {wait_s:.1f} s")
            following = self._first.result()
            while following is not None:
                if isinstance(following, ShoalError):
                    raise following
                yield following
                try:
                    async with asyncio.timeout(wait_s):
                        following = await anext(self._stream, None)
                except TimeoutError as error:
                    raise LinkError(f"no chunk came for {wait_s:.1f} s") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop it, wherever it is."""
        self._first.cancel()
        await asyncio.wait([self._first])
        await self._stream.aclose()


ChunkConsumer = Callable[[int, memoryview], Awaitable[None]]
"""Takes a chunk by its index; the next one comes when it returns."""


@dataclass(frozen=True)
class StreamRequest:
    """Chunks of ``blob``: of which lengths each may be, with which header, and how long to wait for one."""

    blob: Blob
    sizes_bytes: Callable[[int], Collection[int]]
    header_bytes: int
    wait_s: float


@dataclass(frozen=True)
class ExchangeContext:
    """``was_away``: whether the coordinator was, since that moment of the loop's clock. Then others may not have heard
    of this round, and without a verdict it costs nothing to wait for them. ``sources``: what we offer ourselves.
    ``ahead``: streams that are open already, by member."""

    endpoint: Endpoint
    store: ResultStore
    me: int
    deadlines: Deadlines
    was_away: Callable[[float], bool]
    sources: dict[Blob, ChunkSource]
    ahead: dict[tuple[int, Blob, range], PrefetchedStream] = field(default_factory=dict)

    @property
    def members(self) -> list[str]:
        return [member.peer for member in self.store.plan.members]

    def publish(self) -> None:
        """From now on others get what we bring."""
        for blob, source in self.sources.items():
            self.endpoint.publish(blob, source)

    def share_uplink(self) -> None:
        """Each of them gets its share of what we send."""
        members, shares = self.members, Traffic(self.store.plan).shares(self.me)
        self.endpoint.share_uplink({members[one]: share for one, share in shares.items()})

    async def withdraw(self) -> None:
        """The end of all that, and of streams that nobody has taken."""
        self.endpoint.share_uplink({})
        for blob in self.sources:
            self.endpoint.retract(blob)
        async with asyncio.TaskGroup() as tasks:
            self.close_streams(tasks)

    def close_streams(self, tasks: asyncio.TaskGroup) -> None:
        """Those that are open ahead: what they have brought is forgotten. To say so may take a while, where a member is
        not there any more."""
        for stream in self.ahead.values():
            tasks.create_task(stream.close())
        self.ahead.clear()

    def contributions(self) -> StreamRequest:
        """What a member brings."""
        store = self.store

        def sizes_bytes(chunk: int) -> Collection[int]:
            start, stop = store.bounds(chunk)
            return (store.codec_map.contribution(start, stop).packed_bytes(stop - start),)

        return StreamRequest(contribution_blob(store.plan), sizes_bytes, 0, self.deadlines.contribution_s)

    def partials(self, group: Group) -> StreamRequest:
        """What a relay makes of its row's contributions; ``group`` is that row."""
        store = self.store

        def sizes_bytes(chunk: int) -> Collection[int]:
            start, stop = store.bounds(chunk)
            codec = store.codec_map.result(start, stop, len(group.members))
            return (group.header_bytes, group.result_bytes(codec, stop - start))

        blob = Blob(kind="partial", number=store.plan.round)
        return StreamRequest(blob, sizes_bytes, group.header_bytes, self.deadlines.partial_s)

    async def receive(self, member: int, wanted: StreamRequest, chunks: range, hand_in: ChunkConsumer) -> None:
        """Hand in the chunks one after the other. Raises ``ShoalError``, the other side's too."""
        following = chunks.start

        async def go_on() -> None:
            nonlocal following
            async with aclosing(self._open(member, wanted, range(following, chunks.stop))) as stream:
                async for chunk, data in stream:
                    following = chunk + 1
                    await hand_in(chunk, data)

        await self.patiently(go_on)

    async def _open(self, member: int, wanted: StreamRequest, chunks: range) -> Chunks:
        """By the stream that is open already, if there is one; what it does not bring is asked for anew. Both together
        get the time that one has alone."""
        following, ahead = chunks.start, self.ahead.pop((member, wanted.blob, chunks), None)
        if ahead is not None:
            limit_s, since_s = wanted.wait_s, _now_s()
            try:
                async with aclosing(ahead.chunks(limit_s / 3)) as stream:
                    async for chunk, data in stream:
                        yield chunk, data
                        following, since_s = chunk + 1, _now_s()
            except ShoalError as error:
                log.debug("round %d: %s: %s", self.store.plan.round, self.members[member], error)
                wanted = replace(wanted, wait_s=limit_s - (_now_s() - since_s))
        async with aclosing(self.stream(member, wanted, range(following, chunks.stop))) as stream:
            async for chunk, data in stream:
                yield chunk, data

    async def stream(self, member: int, wanted: StreamRequest, chunks: range) -> Chunks:
        """The chunks as they come. Raises ``ShoalError``, the other side's too."""
        received: dict[int, memoryview] = {}

        def sink(chunk: int, size: int) -> memoryview:
            if size not in wanted.sizes_bytes(chunk):
                raise WireError(f"a {wanted.blob.kind} chunk of {size} bytes does not fit")
            received[chunk] = self.store.buffers.passing.take(size, wanted.header_bytes)
            return received[chunk]

        async with aclosing(self._fetch(member, wanted, chunks, sink)) as stream:
            async for chunk in stream:
                yield chunk, received.pop(chunk)

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

    def _fetch(self, member: int, wanted: StreamRequest, chunks: range, sink: Sink) -> AsyncGenerator[int, None]:
        if member == self.me:
            return _own(self.sources[wanted.blob], chunks, sink)
        return self.endpoint.fetch(self.members[member], wanted.blob, chunks, sink, wanted.wait_s)


async def _own(source: ChunkSource, chunks: range, sink: Sink) -> AsyncGenerator[int, None]:
    for chunk in chunks:
        data = await source.chunk(chunk)
        sink(chunk, data.nbytes)[:] = data
        yield chunk


def _now_s() -> float:
    return asyncio.get_running_loop().time()
