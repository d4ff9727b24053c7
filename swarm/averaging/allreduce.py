"""The exchange of one round: butterfly all-reduce by pulling, every mean encoded once and decoded by all alike.

Each owner pulls its part from every member and reduces it; every member pulls every other part's results from
their owners (reduce-scatter and all-gather, overlapping chunk by chunk). Nothing is applied here: results are kept
until the coordinator's verdict.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.averaging.reducer import PartReducer
from shoal.swarm.averaging.results import ResultStore, fetch_part
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import BlobUnavailable, LinkError, MemberGone, ShoalError, WireError
from shoal.swarm.links import in_thread
from shoal.swarm.messages import Blob, Part
from shoal.swarm.transport import Endpoint

__all__ = ["AllReduce", "Exchange", "ResultStore"]

log = logging.getLogger(__name__)

_WINDOW = 16
"""How many chunks a fast contributor may be ahead of the slowest: what bounds an owner's memory."""


class _ContributionSource:
    """Our contribution, encoded when the first owner asks for a chunk and kept until ``close``.

    Without the chunks that we reduce ourselves: they go into the mean as they are, and who asks for them is up to
    no good.
    """

    def __init__(self, store: ResultStore, feedback: ErrorFeedback, me: int) -> None:
        self.chunks = store.chunks
        self._own = {index for part in store.plan.parts if part.owner == me for index in store.chunks_of(part)}
        self._store = store
        self._feedback = feedback
        self._encoded: dict[int, memoryview] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closed = False

    async def chunk(self, index: int) -> memoryview:
        """Raises ``BlobUnavailable`` for our own, and once closed: streams outlive the round."""
        if index in self._own:
            raise BlobUnavailable(f"chunk {index} is reduced here")
        async with self._locks.setdefault(index, asyncio.Lock()):
            if self._closed:
                raise BlobUnavailable(f"round {self._store.plan.round} is over")
            if index not in self._encoded:
                bounds = self._store.bounds(index)
                codec = self._store.coding.contribution(*bounds)
                packed = await in_thread(self._feedback.encode_chunk, codec, *bounds)
                self._encoded[index] = packed.numpy().data
            return self._encoded[index]

    async def close(self) -> None:
        """Returns when nothing is being encoded any more."""
        self._closed = True
        for lock in list(self._locks.values()):
            async with lock:
                pass
        self._encoded.clear()


@dataclass
class Exchange:
    """How the exchange went on this member: ``dropped`` members in our own parts, and why a part is missing."""

    dropped: set[int] = field(default_factory=set)
    trouble: str = ""


class AllReduce:
    """One member's part in one round's exchange."""

    def __init__(
        self,
        endpoint: Endpoint,
        store: ResultStore,
        me: str,
        feedback: ErrorFeedback,
        deadlines: Deadlines,
        was_away: Callable[[float], bool] = lambda since_s: False,
    ) -> None:
        """``feedback``: in a round that has begun with our contribution, (elements,) float32.

        ``was_away``: whether the coordinator was, since that moment of the loop's clock. Then others may not have
        heard of this round, and without a verdict it costs nothing to wait for them."""
        self._endpoint = endpoint
        self._store = store
        self._plan = store.plan
        self._members = [member.peer for member in store.plan.members]
        self._me = self._members.index(me)
        self._feedback = feedback
        self._deadlines = deadlines
        self._was_away = was_away
        self._exchange = Exchange()
        self._source = _ContributionSource(store, feedback, self._me)

    @property
    def blob(self) -> Blob:
        return Blob(kind="contribution", number=self._plan.round)

    async def run(self) -> Exchange:
        """Returns when every part has arrived or is given up; results are in the store."""
        self._endpoint.publish(self.blob, self._source)
        async with asyncio.TaskGroup() as tasks:
            for part in self._rotated():
                if part.owner == self._me:
                    tasks.create_task(self._own(part))
                else:
                    tasks.create_task(self._gather(part))
        return self._exchange

    async def close(self) -> None:
        """After ``run`` and before the feedback is settled, committed or discarded: hand out no contribution more."""
        self._endpoint.retract(self.blob)
        await self._source.close()

    def settle(self, *, keep: bool) -> None:
        """After ``store.mean`` of a committed verdict: what the mean left out of ours is the next round's.

        Unless not to ``keep``, because others have our samples by now. Runs in a worker thread. Own chunks went in
        as they are, so only the owner's encoding error stays."""
        settle_chunk = self._feedback.keep_chunk if keep else self._feedback.include_exactly
        for index in range(self._store.chunks):
            if self._me not in self._store.included(index):
                settle_chunk(*self._store.bounds(index))

    def _rotated(self) -> list[Part]:
        """Parts beginning with our own: so that not everybody asks the same owner first."""
        parts = list(self._plan.parts)
        first = next((i for i, part in enumerate(parts) if part.owner >= self._me), 0)
        return parts[first:] + parts[:first]

    # Our own part -----------------------------------------------------------------------------------------

    async def _own(self, part: Part) -> None:
        chunks = self._store.chunks_of(part)
        bounds = {index: self._store.bounds(index) for index in chunks}
        weights = [member.weight_tokens for member in self._plan.members]
        work = _OwnedPart(PartReducer(self._store.coding, weights, bounds, self._me), chunks)
        async with asyncio.TaskGroup() as tasks:
            for member in range(len(self._members)):
                if member != self._me:
                    tasks.create_task(self._collect(work, member))
            for index in chunks:
                await work.wait_complete(index)
                await self._reduce(work.reducer, index, weights)
                await work.advance()
        self._exchange.dropped |= work.reducer.dropped()

    async def _collect(self, work: _OwnedPart, member: int) -> None:
        received: dict[int, memoryview] = {}

        def sink(chunk: int, size: int) -> memoryview:
            start, stop = self._store.bounds(chunk)
            if size != self._store.coding.contribution(start, stop).packed_bytes(stop - start):
                raise WireError(f"a contribution chunk of {size} bytes does not fit")
            received[chunk] = memoryview(bytearray(size))
            return received[chunk]

        peer, wait_s = self._members[member], self._deadlines.contribution_s
        following = work.chunks.start

        async def collect() -> None:
            nonlocal following
            rest = range(following, work.chunks.stop)
            async with aclosing(self._endpoint.fetch(peer, self.blob, rest, sink, wait_s)) as stream:
                async for chunk in stream:
                    following = chunk + 1
                    await work.offer(chunk, member, received.pop(chunk))

        try:
            await self._patiently(collect)
        except ShoalError as error:  # the other side's errors come out of here, too
            log.warning("round %d goes on without %s: %s", self._plan.round, peer, error)
            await work.give_up(member)

    async def _reduce(self, reducer: PartReducer, index: int, weights: list[int]) -> None:
        def work() -> memoryview:
            start, stop = self._store.bounds(index)
            reduced = reducer.reduce(index, self._feedback.corrected(start, stop))
            self._feedback.include_exactly(start, stop)
            if reduced.error is not None:
                # Only 1/share of what we add reaches the mean, so the error is added that many times over. It stays
                # finite: the weighted sum was, and is larger.
                total = sum(weights[member] for member in reduced.included)
                self._feedback.add_owner_error(start, reduced.error.mul_(total / weights[self._me]))
            return reduced.result

        await self._store.put(index, await in_thread(work))

    # Everybody else's ---------------------------------------------------------------------------------------

    async def _gather(self, part: Part) -> None:
        owner = self._members[part.owner]
        try:
            await self._patiently(
                lambda: fetch_part(self._endpoint, self._store, part, owner, self._deadlines.result_s)
            )
        except ShoalError as error:
            log.warning("round %d: no result from %s: %s", self._plan.round, owner, error)
            self._exchange.trouble = f"{owner} did not deliver its part: {error}"

    async def _patiently(self, fetch: Callable[[], Awaitable[None]]) -> None:
        """Fetch; again when that took too long while the coordinator was away. Raises ``ShoalError``."""
        while True:
            start_s = asyncio.get_running_loop().time()
            try:
                return await fetch()
            except MemberGone:
                raise
            except LinkError:
                if not self._was_away(start_s):
                    raise


class _OwnedPart:
    """The meeting point of the collectors and the reducer of one part."""

    def __init__(self, reducer: PartReducer, chunks: range) -> None:
        self.reducer = reducer
        self.chunks = chunks
        self._next = chunks.start
        self._changed = asyncio.Condition()

    async def offer(self, chunk: int, member: int, packed: memoryview) -> None:
        """Hand in a chunk; waits when this member is too far ahead of the others."""
        async with self._changed:
            if self.reducer.offer(chunk, member, packed):
                self._changed.notify_all()
            await self._changed.wait_for(lambda: chunk < self._next + _WINDOW)

    async def give_up(self, member: int) -> None:
        async with self._changed:
            self.reducer.give_up(member)
            self._changed.notify_all()

    async def wait_complete(self, chunk: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.reducer.is_complete(chunk))

    async def advance(self) -> None:
        async with self._changed:
            self._next += 1
            self._changed.notify_all()
