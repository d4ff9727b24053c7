"""Reducing a part, or what is missing of it: collect from every member, sum in order, put the means into the store.

Done by a part's owner, and by a stand-in when the owner has failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from torch import Tensor

from shoal.swarm.averaging.reducer import PartReducer, Reduced
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import LinkError, MemberGone, ShoalError, WireError
from shoal.swarm.links import in_thread
from shoal.swarm.messages import Blob
from shoal.swarm.transport import Endpoint

log = logging.getLogger(__name__)

_WINDOW = 16
"""How many chunks a fast contributor may be ahead of the slowest: what bounds an owner's memory."""


@dataclass(frozen=True)
class Seat:
    """One member's place in an exchange. ``was_away``: whether the coordinator was, since that moment of the loop's
    clock. Then others may not have heard of this round, and without a verdict it costs nothing to wait for them."""

    endpoint: Endpoint
    store: ResultStore
    me: int
    deadlines: Deadlines
    was_away: Callable[[float], bool]

    @property
    def members(self) -> list[str]:
        return [member.peer for member in self.store.plan.members]

    @property
    def contribution(self) -> Blob:
        return Blob(kind="contribution", number=self.store.plan.round)

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


@dataclass
class Reduction:
    """Means of some chunks as they were made here. ``without``: members that are not even asked."""

    seat: Seat
    own: Callable[[int, int], Tensor]
    """Our own values of [start, stop), a new (stop - start,) float32; called in worker threads."""
    without: frozenset[int] = frozenset()
    made: dict[int, Reduced] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)

    async def run(self, chunks: range) -> None:
        """Returns when the means of these chunks are in the store. Whoever does not deliver is left out."""
        store, me = self.seat.store, self.seat.me
        weights = [member.weight_tokens for member in store.plan.members]
        reducer = PartReducer(store.coding, weights, {index: store.bounds(index) for index in chunks}, me)
        work = _Collection(reducer, chunks)
        async with asyncio.TaskGroup() as tasks:
            for member in range(len(weights)):
                if member in self.without:
                    await work.give_up(member)
                elif member != me:
                    tasks.create_task(self._collect(work, member))
            for index in chunks:
                await work.wait_complete(index)
                self.made[index] = await in_thread(self._reduce, reducer, index)
                await store.put(index, self.made[index].result)
                await work.advance()
        self.dropped |= reducer.dropped()

    def _reduce(self, reducer: PartReducer, index: int) -> Reduced:
        return reducer.reduce(index, self.own(*self.seat.store.bounds(index)))

    async def _collect(self, work: _Collection, member: int) -> None:
        seat, store = self.seat, self.seat.store
        received: dict[int, memoryview] = {}

        def sink(chunk: int, size: int) -> memoryview:
            start, stop = store.bounds(chunk)
            if size != store.coding.contribution(start, stop).packed_bytes(stop - start):
                raise WireError(f"a contribution chunk of {size} bytes does not fit")
            received[chunk] = memoryview(bytearray(size))
            return received[chunk]

        peer, wait_s = seat.members[member], seat.deadlines.contribution_s
        following = work.chunks.start

        async def collect() -> None:
            nonlocal following
            rest = range(following, work.chunks.stop)
            async with aclosing(seat.endpoint.fetch(peer, seat.contribution, rest, sink, wait_s)) as stream:
                async for chunk in stream:
                    following = chunk + 1
                    await work.offer(chunk, member, received.pop(chunk))

        try:
            await seat.patiently(collect)
        except ShoalError as error:  # the other side's errors come out of here, too
            log.warning("round %d goes on without %s: %s", store.plan.round, peer, error)
            await work.give_up(member)


class _Collection:
    """The meeting point of the collectors and the reducer."""

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
