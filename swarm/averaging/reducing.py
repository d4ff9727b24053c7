"""Reducing a part, or what is missing of it: collect, sum in order, hand out the means.

Done by a part's owner, by a stand-in when the owner has failed, and by a relay for its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.collecting import Collection
from shoal.swarm.averaging.reducer import Brought, PartReducer, Reduced, Room
from shoal.swarm.averaging.seat import Seat
from shoal.swarm.transport.links import in_thread


@dataclass
class Reduction:
    """Means of a group, of some chunks, as they were made here; each is ``put`` where others get it.

    ``without``: members that are not even asked. ``failed``: relays whose rows had to be asked one by one.
    """

    seat: Seat
    group: Group
    put: Callable[[int, memoryview], Awaitable[None]]
    own: Callable[[int, int], Brought] | None = None
    """What we bring in [start, stop), as it is; called in worker threads. Without, it comes packed, as everybody's."""
    room: Callable[[int, int], Room] | None = None
    """Where what our means lose goes, as ``own``."""
    without: frozenset[int] = frozenset()
    made: dict[int, Reduced] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    @property
    def dropped(self) -> set[int]:
        """Members that some mean made here does without."""
        members = set(self.group.members)
        partly = [one.included for one in self.made.values() if len(one.included) < len(members)]
        return {member for included in partly for member in members.difference(included)}

    async def run(self, chunks: range, relays: Sequence[int | None] = (None,)) -> None:
        """Returns when the means of these chunks are put. Whoever does not deliver is left out.

        ``relays``: of each row, whose partials to take; None for its members' contributions."""
        seat, own = self.seat, None if self.own is None else self.seat.me
        bounds = {index: seat.store.bounds(index) for index in chunks}
        relayed = {row: relay for row, relay in enumerate(relays) if relay is not None}
        store = seat.store
        reducer = PartReducer(store.coding, store.norm_bounds, self.group, bounds, own, relayed, store.buffers)
        async with asyncio.TaskGroup() as tasks:
            work = Collection(seat, reducer, chunks, tasks)
            watch = tasks.create_task(work.watch.run())
            for row in range(len(relays)):
                if row in relayed:
                    work.ask_relay(row, relayed[row])
                else:
                    work.ask_members(row, chunks, self.without)
            for index in chunks:
                self.made[index] = await self._make(work, index)
                await self.put(index, self.made[index].result)
                work.advance()
            watch.cancel()
        self.failed |= work.failed

    async def _make(self, work: Collection, index: int) -> Reduced:
        while True:
            await work.wait_complete(index)
            match await in_thread(self._reduce, work.reducer, index):
                case Reduced() as made:
                    return made
                case rows:
                    for row in rows:
                        work.distrust(row, index)

    def _reduce(self, reducer: PartReducer, index: int) -> Reduced | list[int]:
        bounds = self.seat.store.bounds(index)
        own, room = self.own and self.own(*bounds), self.room and self.room(*bounds)
        return reducer.reduce(index, own, room)
