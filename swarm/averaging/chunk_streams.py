"""Streams of chunks between one member and the others of a round, and how fast each other member delivers.

Time-outs and retries of an exchange are decided in three places, from the inside out. ``Endpoint.fetch`` resumes a
stream over broken links until ``wait_s`` have passed without a chunk. ``StragglerGuard.fetch`` repeats a stream that
failed while the coordinator was away, and cuts off stragglers. Whoever wanted the chunks then asks the next source, or
continues without them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.contribution import contribution_blob
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.traffic import Traffic
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import LinkError, ShoalError, WireError
from shoal.swarm.protocol.statements import PlanStatement
from shoal.swarm.protocol.types import MAX_DELIVERIES, Blob, Delivery
from shoal.swarm.transport.bulk.link import ChunkSink
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_FEWEST_BYTES = 2**18
"""Fewest bytes that a rate is computed from: less says more about delays than about a link."""

Chunks = AsyncGenerator[tuple[int, memoryview], None]
"""Chunks of a stream with their indices, in order."""


# Measuring ----------------------------------------------------------------------------------------------------


@dataclass
class DeliveryMeter:
    """Bytes that arrived, and the time that we waited for them."""

    size_bytes: int = 0
    seconds: float = 0.0
    _beside_bytes: int = 0
    _arrived_s: float = -math.inf

    def began(self, now_s: float) -> None:
        """Note a stream's first chunk. Its delay says when everybody started, nothing about the link."""
        self._beside_bytes, self._arrived_s = 0, now_s

    def arrived(self, size_bytes: int, now_s: float, waited_s: float, paused_s: float) -> None:
        """Note a later chunk, ``waited_s`` after we asked for it and ``paused_s`` between the previous one and that.

        If the pause was longer than the wait, the chunk had been lying here and tells nothing. Streams run beside each
        other: no moment counts twice."""
        if waited_s >= paused_s:
            self.size_bytes += size_bytes + self._beside_bytes
            self.seconds += min(waited_s + paused_s, now_s - self._arrived_s)
        self._beside_bytes, self._arrived_s = 0, now_s

    def arrived_beside(self, size_bytes: int) -> None:
        """Note a chunk that we do not wait for but that shares the link."""
        self._beside_bytes += size_bytes

    @property
    def bps(self) -> float | None:
        """Rate in bits a second; None while too little has arrived to tell."""
        if self.size_bytes < _FEWEST_BYTES or not self.seconds:
            return None
        return max(1.0, 8 * self.size_bytes / self.seconds)


class StreamMeter:
    """Delivery rate of one stream; what it measures counts for the member that sends it, too.

    A first chunk counts in nothing: when it comes depends on everybody's start, and it has a deadline of its own. All
    moments are of one clock, in seconds."""

    def __init__(self, member: DeliveryMeter | None = None, *, is_contribution: bool = False) -> None:
        """``member``: the sender's meter. Only contributions are waited for there; partial sums and results depend on
        other members, too, but share the link."""
        self._stream = DeliveryMeter()
        self._member = member
        self._is_contribution = is_contribution
        self._arrived_s = 0.0
        self._asked_s: float | None = None
        self.chunk_bytes = 0
        """Size of the largest chunk; 0 before any has arrived."""

    def begin(self) -> None:
        """Expect the first chunk, or the first one since the stream was opened anew."""
        self._asked_s = None

    def arrived(self, size_bytes: int, now_s: float) -> None:
        """Note a chunk; the next one is not asked for before ``asked``."""
        meters = [self._stream]
        if self._member is not None and self._is_contribution:
            meters.append(self._member)
        elif self._member is not None:
            self._member.arrived_beside(size_bytes)
        for meter in meters:
            if self._asked_s is None:
                meter.began(now_s)
            else:
                meter.arrived(size_bytes, now_s, now_s - self._asked_s, self._asked_s - self._arrived_s)
        self.chunk_bytes, self._arrived_s = max(self.chunk_bytes, size_bytes), now_s

    def asked(self, now_s: float) -> None:
        """Note that we are ready for the next chunk."""
        self._asked_s = now_s

    @property
    def chunk_s(self) -> float | None:
        """Seconds for a chunk that we waited for; None while there was none."""
        one = self._stream
        return one.seconds * self.chunk_bytes / one.size_bytes if one.size_bytes else None


class MemberMeters(dict[str, DeliveryMeter]):
    """Delivery meters of a round's members, by peer id, for the round's report."""

    def deliveries(self, members: Sequence[str], me: str, round_number: int) -> tuple[Delivery, ...]:
        """Rates of the plan's ``members``; others in every round when there are more than a report has room for."""
        known = [(index, self[peer].bps) for index, peer in enumerate(members) if peer in self]
        seen = [Delivery(member=index, bps=bps) for index, bps in known if bps is not None]
        if not seen:
            return ()
        first = (members.index(me) + round_number * MAX_DELIVERIES) % len(seen)
        return tuple((seen[first:] + seen[:first])[:MAX_DELIVERIES])


# Receiving ----------------------------------------------------------------------------------------------------


async def receive_chunks(
    fetch: Callable[[ChunkSink], AsyncGenerator[int, None]], room: Callable[[int, int], memoryview], meter: StreamMeter
) -> Chunks:
    """Yield each chunk of a stream as it arrives, measured by ``meter``. Raises ``ShoalError``, the sender's too.

    ``fetch`` writes to a sink; ``room`` gives the memory for a chunk of an index and size."""
    received: dict[int, memoryview] = {}
    now_s = asyncio.get_running_loop().time

    def sink(chunk: int, size: int) -> memoryview:  # on the data plane's thread
        received[chunk] = data = room(chunk, size)
        return data

    meter.begin()
    async with aclosing(fetch(sink)) as stream:
        async for chunk in stream:
            data = received.pop(chunk)
            meter.arrived(data.nbytes, now_s())
            yield chunk, data
            meter.asked(now_s())


class PrefetchedStream:
    """A stream whose first chunk is requested before anybody takes it; no more arrive than its window allows."""

    def __init__(self, stream: Chunks, meter: StreamMeter, tasks: asyncio.TaskGroup) -> None:
        self.meter = meter
        self._stream = stream
        self._first = tasks.create_task(self._fetch_first())

    async def _fetch_first(self) -> tuple[int, memoryview] | ShoalError | None:
        try:
            return await anext(self._stream, None)
        except ShoalError as error:
            return error

    async def chunks(self, wait_s: float) -> Chunks:
        """Yield all chunks from the first on. Raises ``ShoalError``; ``LinkError`` after ``wait_s`` without one."""
        try:
            done, _ = await asyncio.wait([self._first], timeout=wait_s)
            if not done or self._first.cancelled():
                raise LinkError(f"no chunk was prefetched, and none came for {wait_s:.1f} s")
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
        """Stop the stream, wherever it is."""
        self._first.cancel()
        await asyncio.wait([self._first])
        await self._stream.aclose()


@dataclass(frozen=True)
class StreamRequest:
    """Chunks of ``blob``: which sizes each may have, the size of its header, and how long to wait for one."""

    blob: Blob
    sizes_bytes: Callable[[int], Collection[int]]
    header_bytes: int
    wait_s: float


@dataclass(frozen=True)
class ExchangeContext:
    """One member's view of an exchange: the plan's members, and how to get chunks from them, or from itself.

    ``was_away``: whether the coordinator was unreachable at some time since a moment of the loop's clock; then others
    may not have heard of this round, and without a verdict waiting for them costs nothing. ``sources``: what we offer.
    ``prefetched``: streams that are open already. ``plan_statement``: by which partial sums are signed; None before
    there is a plan."""

    endpoint: Endpoint
    store: ResultStore
    me: int
    deadlines: Deadlines
    was_away: Callable[[float], bool]
    sources: dict[Blob, ChunkSource]
    prefetched: dict[tuple[int, Blob, range], PrefetchedStream] = field(default_factory=dict)
    meters: MemberMeters = field(default_factory=MemberMeters)
    plan_statement: PlanStatement | None = None

    @property
    def members(self) -> list[str]:
        return [member.peer for member in self.store.plan.members]

    # What we offer

    def publish(self) -> None:
        """Offer our sources to the other members."""
        for blob, source in self.sources.items():
            self.endpoint.publish(blob, source)

    def share_uplink(self) -> None:
        """Give each member its share of what we send."""
        members, shares = self.members, Traffic(self.store.plan).shares(self.me)
        self.endpoint.share_uplink({members[one]: share for one, share in shares.items()})

    async def withdraw(self) -> None:
        """Offer nothing more, and close prefetched streams that nobody has taken."""
        self.endpoint.share_uplink({})
        for blob in self.sources:
            self.endpoint.retract(blob)
        async with asyncio.TaskGroup() as tasks:
            self.close_streams(tasks)

    def close_streams(self, tasks: asyncio.TaskGroup) -> None:
        """Close the prefetched streams and forget their chunks. A member that is gone may take a while to be told."""
        for stream in self.prefetched.values():
            tasks.create_task(stream.close())
        self.prefetched.clear()

    # What others offer

    def contributions(self) -> StreamRequest:
        """Request for a member's contribution."""
        store = self.store

        def sizes_bytes(chunk: int) -> Collection[int]:
            return (store.leaf_grid.chunk_bytes(*store.bounds(chunk)),)

        return StreamRequest(contribution_blob(store.plan), sizes_bytes, 0, self.deadlines.contribution_s)

    def partial_sums(self, group: Group) -> StreamRequest:
        """Request for what a row reducer makes of its row's contributions; ``group`` is that row."""
        store = self.store

        def sizes_bytes(chunk: int) -> Collection[int]:
            start, stop = store.bounds(chunk)
            codec = store.codec_map.result(start, stop, len(group.members))
            return (group.header_bytes, group.result_bytes(codec, stop - start))

        blob = Blob(kind="partial", number=store.plan.round)
        return StreamRequest(blob, sizes_bytes, group.header_bytes, self.deadlines.partial_s)

    def meter(self, member: int, blob: Blob) -> StreamMeter:
        """Return a meter for a new stream from a member."""
        if member == self.me:
            return StreamMeter()
        sender = self.meters.setdefault(self.members[member], DeliveryMeter())
        return StreamMeter(sender, is_contribution=blob.kind == "contribution")

    def meter_of(self, member: int, request: StreamRequest, chunks: range) -> StreamMeter:
        """Return the meter of the prefetched stream of these chunks, or a new one."""
        prefetched = self.prefetched.get((member, request.blob, chunks))
        return self.meter(member, request.blob) if prefetched is None else prefetched.meter

    def prefetch(self, member: int, request: StreamRequest, chunks: range, tasks: asyncio.TaskGroup) -> None:
        """Open a stream whose chunks are taken later, by ``open_stream``."""
        meter = self.meter(member, request.blob)
        stream = self._stream(member, request, chunks, meter)
        self.prefetched[member, request.blob, chunks] = PrefetchedStream(stream, meter, tasks)

    def open_stream(self, member: int, request: StreamRequest, chunks: range, meter: StreamMeter) -> Chunks:
        """Take the prefetched stream of these chunks, or open one. It raises ``ShoalError``, the sender's too."""
        prefetched = self.prefetched.pop((member, request.blob, chunks), None)
        if prefetched is None:
            return self._stream(member, request, chunks, meter)
        return self._continued(prefetched, member, request, chunks)

    async def _continued(
        self, prefetched: PrefetchedStream, member: int, request: StreamRequest, chunks: range
    ) -> Chunks:
        """Yield what a prefetched stream delivers, and request the rest anew. Both together wait as long as one does
        alone."""
        following, limit_s, now_s = chunks.start, request.wait_s, asyncio.get_running_loop().time
        since_s = now_s()
        try:
            async with aclosing(prefetched.chunks(limit_s / 3)) as stream:
                async for chunk, data in stream:
                    yield chunk, data
                    following, since_s = chunk + 1, now_s()
        except ShoalError as error:
            log.debug("round %d: %s: %s", self.store.plan.round, self.members[member], error)
            request = replace(request, wait_s=limit_s - (now_s() - since_s))
        rest = range(following, chunks.stop)
        async with aclosing(self._stream(member, request, rest, prefetched.meter)) as stream:
            async for chunk, data in stream:
                yield chunk, data

    def _stream(self, member: int, request: StreamRequest, chunks: range, meter: StreamMeter) -> Chunks:
        if member == self.me:
            return _own(self.sources[request.blob], chunks)

        def fetch(sink: ChunkSink) -> AsyncGenerator[int, None]:
            return self.endpoint.fetch(self.members[member], request.blob, chunks, sink, request.wait_s)

        def room(chunk: int, size: int) -> memoryview:
            if size not in request.sizes_bytes(chunk):
                raise WireError(f"a {request.blob.kind} chunk of {size} bytes does not fit")
            return self.store.buffers.passing.take(size, request.header_bytes)

        return receive_chunks(fetch, room, meter)


async def _own(source: ChunkSource, chunks: range) -> Chunks:
    """Yield our own chunks, without a copy."""
    for chunk in chunks:
        yield chunk, await source.chunk(chunk)
