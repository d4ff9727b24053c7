"""Reduction of a part: contributions in, packed means out, chunk by chunk.

Run by a part's owner, by a stand-in when the owner has failed, and by a row reducer for its row of a grid. In a grid,
an owner takes whole rows as partial sums, the packed means of row reducers, and members one by one where those fail.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.compression.codec import Packed
from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError
from shoal.compression.weighted_mean import EncodingLoss, WeightedMean
from shoal.swarm.aio import Changes, in_thread
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_header import ChunkHeader, Group
from shoal.swarm.averaging.chunk_streams import ChunkConsumer, ExchangeContext, StreamRequest
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.straggler_guard import StragglerGuard
from shoal.swarm.errors import ShoalError

log = logging.getLogger(__name__)

OwnValues = tuple[Tensor, Tensor]
"""Contribution and residual of a member in a chunk, ``(size,) float32`` each: their sum is what it brings."""

Room = tuple[Tensor, float]
"""Where what a mean loses goes, ``(size,) float32``, for the member that brings something as it is to carry it: as many
times over as only its share of what it adds reaches the mean, and times this factor."""


@dataclass
class Reduced:
    """A finished chunk: what everybody gets, and what encoding it lost (None: no mean), for whoever made it: as it is,
    or in the ``Room`` that there was."""

    result: memoryview
    included: list[int]
    error: EncodingLoss | None


@dataclass
class _Chunk:
    """``open``: of each row, how many of its members may still deliver."""

    open: list[int]
    arrived: dict[int, Packed] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    partials: dict[int, memoryview] = field(default_factory=dict)


class PartReducer:
    """Collects one part. A row comes as its relay's partials or, from some chunk on, member by member; chunks are
    complete when each row's partial is there, or each of its members has delivered or is given up.

    The sum runs in the plan's order of rows and members whatever the order of arrival, so the same contributions always
    give the same bytes.
    """

    def __init__(
        self,
        codec_map: CodecMap,
        norm_bounds: NormBounds,
        group: Group,
        chunks: Mapping[int, tuple[int, int]],
        own: int | None,
        relayed: Collection[int] = (),
        buffers: RoundBuffers | None = None,
    ) -> None:
        """``chunks``: start and stop of each by its index; ``own``: the member whose values come unpacked, if any does;
        ``relayed``: the rows that come as partials."""
        self._buffers = buffers or RoundBuffers()
        self.group = group
        self.own = own
        self._codec_map = codec_map
        self._norm_bounds = norm_bounds
        self._bounds = chunks
        self._start = min(start for start, _ in chunks.values())
        self._squares = dict.fromkeys(group.members, 0.0)  # of its claim, used up by each member until here
        self._row_of = {member: row for row, members in enumerate(group.rows) for member in members}
        self._rows = [group.row(row) for row in range(len(group.rows))]
        self._direct_from = [max(chunks) + 1 if row in relayed else min(chunks) for row in range(len(group.rows))]
        self._next_partial = [min(chunks)] * len(group.rows)
        awaited = [len(members) - (own in members) for members in group.rows]
        self._chunks = {index: _Chunk(list(awaited)) for index in chunks}

    def offer(self, chunk: int, member: int, packed: Packed) -> None:
        """A member's delivery."""
        state = self._chunks[chunk]
        if member not in state.arrived and member not in state.missing:
            state.arrived[member] = packed
            state.open[self._row_of[member]] -= 1

    def offer_partial(self, chunk: int, row: int, packed: memoryview) -> None:
        """A relay's delivery, in the order of chunks; once its row comes member by member, nobody needs it."""
        if chunk < self._direct_from[row]:
            self._chunks[chunk].partials[row] = packed
            self._next_partial[row] = chunk + 1

    def give_up(self, member: int) -> None:
        """Go on without this member where it has not delivered."""
        for state in list(self._chunks.values()):  # one may be reduced, and gone, meanwhile
            if member not in state.arrived and member not in state.missing:
                state.missing.add(member)
                state.open[self._row_of[member]] -= 1

    def sum_directly(self, row: int, first: int | None = None) -> range:
        """From now on this row comes member by member: from chunk ``first``, or from the first without a partial.
        Returns the chunks that this is new for."""
        first = self._next_partial[row] if first is None else first
        added = range(first, self._direct_from[row])
        self._direct_from[row] = min(first, self._direct_from[row])
        return added

    def is_complete(self, chunk: int) -> bool:
        state = self._chunks.get(chunk)
        return state is None or all(
            row in state.partials if chunk < direct_from else not state.open[row]
            for row, direct_from in enumerate(self._direct_from)
        )

    def reduce(self, chunk: int, own: OwnValues | None, room: Room | None = None) -> Reduced | list[int]:
        """The weighted mean of a complete chunk, encoded once. ``own``: what we bring, if that comes unpacked, and
        ``room`` for what the mean loses, if not in memory of its own.

        Contributions with bytes that do not decode, or not to finite numbers, or above what their member claims of
        these values, or with those before of all until here, are left out. Partials like that cannot be: the rows that
        have one are returned, and nothing is made, until those have been summed directly.
        """
        state, (start, stop) = self._chunks[chunk], self._bounds[chunk]
        mean = WeightedMean(stop - start)
        included: list[int] = []
        squares: dict[int, float] = {}
        relayed, bad = [], []
        for row, direct_from in enumerate(self._direct_from):
            if chunk >= direct_from:
                included += self._add_members(chunk, row, mean, own, squares)
            elif members := self._add_partial(state, row, mean, (start, stop)):
                included += members
                relayed.append(row)
            else:
                bad.append(row)
        if bad:
            return bad
        del self._chunks[chunk]
        for member, square in squares.items():
            self._squares[member] += square
        return self._encode(mean, ChunkHeader(included, relayed), (start, stop), room)

    def _encode(self, mean: WeightedMean, header: ChunkHeader, bounds: tuple[int, int], room: Room | None) -> Reduced:
        group, void = self.group, Reduced(memoryview(self.group.pack_header(ChunkHeader())), [], None)
        if not header.included:
            return void
        size, total = bounds[1] - bounds[0], group.weight(header.included)
        codec = self._codec_map.result(*bounds, len(group.members))
        if room is None:
            left, times = self._buffers.passing.floats(size), 1.0
        else:
            assert self.own in header.included
            left, times = room[0], total / group.weights[self.own] * room[1]
        result = self._buffers.results.take(group.result_bytes(codec, size), group.header_bytes)
        result[: group.header_bytes] = group.pack_header(header)
        packed = torch.frombuffer(result[group.header_bytes :], dtype=torch.uint8)
        try:
            error = mean.encode(codec, total, left, packed, times)
        except CodecError:  # the sum overflowed: void for everybody
            return void
        return Reduced(result, sorted(header.included), error)

    def _add_members(
        self,
        chunk: int,
        row: int,
        mean: WeightedMean,
        own: OwnValues | None,
        squares: dict[int, float],
    ) -> list[int]:
        """Add what a row's members brought to ``mean``, times their pulls; returns whose there was. ``squares`` gets
        what they have used up of their claims."""
        state, (start, stop) = self._chunks[chunk], self._bounds[chunk]
        codec, added = self._codec_map.contribution(start, stop), []
        for member in self.group.rows[row]:
            pull, packed = self._norm_bounds.pulls[member], state.arrived.get(member)
            if member == self.own:
                assert own is not None
                mean.add_values(*own, pull)
            elif packed is None:
                continue
            else:
                try:
                    square = codec.squared_norm(packed, stop - start) / codec.growth**2
                    if not self._is_claimed(member, square, (start, stop)):
                        continue
                    mean.add_packed(codec, packed, pull)
                except CodecError:
                    continue
                squares[member] = square
            added.append(member)
        return added

    def _is_claimed(self, member: int, square: float, bounds: tuple[int, int]) -> bool:
        """Whether a chunk with this squared norm is within what its member claims, of the chunk, and of all from the
        first until here: else each of many chunks in one claimed range could use all of its claim."""
        claim, start, whole = self._norm_bounds.contribution, self._start, self._squares[member] + square
        return square <= claim(member, *bounds) and whole <= claim(member, start, bounds[1])

    def _add_partial(self, state: _Chunk, row: int, mean: WeightedMean, bounds: tuple[int, int]) -> list[int]:
        """Add a row's mean to ``mean``, times its weight; returns who is in it, nobody where there is none."""
        group, partial = self._rows[row], state.partials[row]
        included, packed = group.header(partial).included, partial[group.header_bytes :]
        if not included:
            return []
        codec = self._codec_map.result(*bounds, len(group.members))
        try:
            square = codec.squared_norm(packed, bounds[1] - bounds[0])
            if not square <= self._norm_bounds.partial(included, *bounds):
                return []
            mean.add_packed(codec, packed, group.weight(included))
        except CodecError:
            return []
        return included


_WINDOW = 16
"""How many chunks a fast contributor may be ahead of the slowest: what bounds an owner's memory."""


class ChunkCollector:
    """The streams of some chunks, and the meeting point of those and the reducer. ``failed``: relays whose partials
    did not come, or were none. ``guard``: to be run beside them."""

    def __init__(self, context: ExchangeContext, reducer: PartReducer, chunks: range, tasks: asyncio.TaskGroup) -> None:
        self.reducer = reducer
        self.failed: set[int] = set()
        self.guard = StragglerGuard(context, self._behind)
        self._context = context
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
            await self._receive(relay, self._context.partials(self.reducer.group.row(row)), self._chunks, hand_in)
        except ShoalError as error:
            self._log(relay, error)
            self._go_without_relay(row)

    async def _collect(self, member: int, chunks: range) -> None:
        async def hand_in(chunk: int, packed: memoryview) -> None:
            self._following[member] = chunk + 1
            await self._take(self.reducer.offer, chunk, member, packed)

        try:
            await self._receive(member, self._context.contributions(), chunks, hand_in)
        except ShoalError as error:  # the other side's errors come out of here, too
            self._log(member, error)
            self._give_up(member)

    async def _receive(self, source: int, wanted: StreamRequest, chunks: range, hand_in: ChunkConsumer) -> None:
        self._following[source] = chunks.start
        stream = functools.partial(self._context.receive, source, wanted, chunks)
        await self.guard.over(source, wanted.wait_s, len(chunks), hand_in, stream)

    def _behind(self) -> set[int]:
        """Who has not delivered the next chunk to be made."""
        return {source for source, following in self._following.items() if following <= self._next}

    def _log(self, member: int, error: ShoalError) -> None:
        number, peer = self._context.store.plan.round, self._context.members[member]
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


@dataclass
class Reduction:
    """Means of a group, of some chunks, as they were made here; each is ``put`` where others get it.

    ``without``: members that are not even asked. ``failed``: relays whose rows had to be asked one by one.
    """

    context: ExchangeContext
    group: Group
    put: Callable[[int, memoryview], Awaitable[None]]
    own: Callable[[int, int], OwnValues] | None = None
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
        context, own = self.context, None if self.own is None else self.context.me
        bounds = {index: context.store.bounds(index) for index in chunks}
        relayed = {row: relay for row, relay in enumerate(relays) if relay is not None}
        store = context.store
        reducer = PartReducer(store.codec_map, store.norm_bounds, self.group, bounds, own, relayed, store.buffers)
        async with asyncio.TaskGroup() as tasks:
            work = ChunkCollector(context, reducer, chunks, tasks)
            guard = tasks.create_task(work.guard.run())
            for row in range(len(relays)):
                if row in relayed:
                    work.ask_relay(row, relayed[row])
                else:
                    work.ask_members(row, chunks, self.without)
            for index in chunks:
                self.made[index] = await self._make(work, index)
                await self.put(index, self.made[index].result)
                work.advance()
            guard.cancel()
        self.failed |= work.failed

    async def _make(self, work: ChunkCollector, index: int) -> Reduced:
        while True:
            await work.wait_complete(index)
            match await in_thread(self._reduce, work.reducer, index):
                case Reduced() as made:
                    return made
                case rows:
                    for row in rows:
                        work.distrust(row, index)

    def _reduce(self, reducer: PartReducer, index: int) -> Reduced | list[int]:
        bounds = self.context.store.bounds(index)
        own, room = self.own and self.own(*bounds), self.room and self.room(*bounds)
        return reducer.reduce(index, own, room)
