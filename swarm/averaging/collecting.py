"""Bringing together what a reduction adds up: a row's partials from its relay while that works, else contributions."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Set

from shoal.swarm.averaging.reducer import PartReducer
from shoal.swarm.averaging.seat import HandIn, Seat, Wanted
from shoal.swarm.averaging.watch import Watch
from shoal.swarm.changes import Changes
from shoal.swarm.errors import ShoalError

log = logging.getLogger(__name__)

_WINDOW = 16
"""How many chunks a fast contributor may be ahead of the slowest: what bounds an owner's memory."""


class Collection:
    """The streams of some chunks, and the meeting point of those and the reducer. ``failed``: relays whose partials
    did not come, or were none. ``watch``: to be run beside them."""

    def __init__(self, seat: Seat, reducer: PartReducer, chunks: range, tasks: asyncio.TaskGroup) -> None:
        self.reducer = reducer
        self.failed: set[int] = set()
        self.watch = Watch(seat, self._behind)
        self._seat = seat
        self._chunks = chunks
        self._tasks = tasks
        self._relays: dict[int, tuple[int, asyncio.Task[None]]] = {}
        self._next = chunks.start
        self._following: dict[int, int] = {}
        self._changes = Changes()

    def ask_relay(self, row: int, relay: int) -> None:
        """Take the row as partials, from the first chunk on."""
        self._relays[row] = relay, self._tasks.create_task(self._follow(row, relay))

    def ask_members(self, row: int, chunks: range, but: Set[int]) -> None:
        """Take the row as its members' contributions; those in ``but`` are not asked."""
        for member in self.reducer.group.rows[row]:
            if member in but:
                self._give_up(member)
            elif member != self.reducer.own:
                self._tasks.create_task(self._collect(member, chunks))

    def distrust(self, row: int, chunk: int) -> None:
        """The row's partial of this chunk is none: from here on its other members are asked."""
        self._relays[row][1].cancel()
        self._go_without_relay(row, chunk)

    def _go_without_relay(self, row: int, first: int | None = None) -> None:
        relay, chunks = self._relays[row][0], self.reducer.sum_directly(row, first)
        if chunks:
            self.failed.add(relay)
            self.ask_members(row, chunks, {relay})

    async def wait_complete(self, chunk: int) -> None:
        await self._changes.until(lambda: self.reducer.is_complete(chunk))

    def advance(self) -> None:
        self._next += 1
        self._changes.announce()

    async def _follow(self, row: int, relay: int) -> None:
        async def hand_in(chunk: int, packed: memoryview) -> None:
            self._following[relay] = chunk + 1
            await self._take(self.reducer.offer_partial, chunk, row, packed)

        try:
            await self._receive(relay, self._seat.partials(self.reducer.group.row(row)), self._chunks, hand_in)
        except ShoalError as error:
            self._log(relay, error)
            self._go_without_relay(row)

    async def _collect(self, member: int, chunks: range) -> None:
        async def hand_in(chunk: int, packed: memoryview) -> None:
            self._following[member] = chunk + 1
            await self._take(self.reducer.offer, chunk, member, packed)

        try:
            await self._receive(member, self._seat.contributions(), chunks, hand_in)
        except ShoalError as error:  # the other side's errors come out of here, too
            self._log(member, error)
            self._give_up(member)

    async def _receive(self, source: int, wanted: Wanted, chunks: range, hand_in: HandIn) -> None:
        self._following[source] = chunks.start
        stream = functools.partial(self._seat.receive, source, wanted, chunks)
        await self.watch.over(source, wanted.wait_s, len(chunks), hand_in, stream)

    def _behind(self) -> set[int]:
        """Who has not delivered the next chunk to be made."""
        return {source for source, following in self._following.items() if following <= self._next}

    def _log(self, member: int, error: ShoalError) -> None:
        number, peer = self._seat.store.plan.round, self._seat.members[member]
        log.warning("round %d goes on without %s: %s", number, peer, error)

    async def _take(
        self, offer: Callable[[int, int, memoryview], None], chunk: int, source: int, packed: memoryview
    ) -> None:
        """Hand in a chunk; waits when this source is too far ahead of the others."""
        offer(chunk, source, packed)
        if self.reducer.is_complete(self._next):
            self._changes.announce()
        await self._changes.until(lambda: chunk < self._next + _WINDOW)

    def _give_up(self, member: int) -> None:
        self.reducer.give_up(member)
        self._changes.announce()
