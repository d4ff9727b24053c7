"""Reduction of a part: contributions in, packed means out, chunk by chunk.

Run by a part's owner, by a stand-in when the owner has failed, and by a row reducer for its row of a grid. In a grid,
an owner takes whole rows as partial sums, the packed means of row reducers, and members one by one where those fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from shoal.compression.codec import Packed
from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError
from shoal.compression.gathered import Gathered
from shoal.compression.robust_mean import RobustMean
from shoal.compression.weighted_mean import EncodingLoss, WeightedMean
from shoal.swarm.aio import Changes, in_thread
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_header import ChunkHeader, Group
from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamRequest
from shoal.swarm.averaging.inclusions import Inclusions
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.partial_sums import is_signed, name_of_sums
from shoal.swarm.averaging.straggler_guard import StragglerGuard
from shoal.swarm.errors import ShoalError, WireError
from shoal.swarm.transport.bulk.link import CREDIT

log = logging.getLogger(__name__)

Accumulator: TypeAlias = WeightedMean | RobustMean | Gathered


_WINDOW, _FEWEST_AHEAD = 16, 2
"""Most chunks that a fast contributor may be ahead of the slowest one, and the fewest."""

WINDOW_BYTES = 2**26
"""Bound on an owner's memory for contributions that it cannot reduce yet, those in flight among them: all in all, down
to ``CREDIT + _FEWEST_AHEAD`` chunks of each."""


@dataclass
class ReducedChunk:
    """Reduced chunk: the encoded mean, its members, and what encoding it lost, None if nobody is in it.

    The member that makes the mean carries the loss on, once the verdict has told that this mean was committed."""

    result: memoryview
    included: list[int]
    loss: EncodingLoss | None


@dataclass
class _Chunk:
    """State of a chunk; ``open``: for each row, how many of its members may still deliver."""

    open: list[int]
    arrived: dict[int, Packed] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    partial_sums: dict[int, memoryview] = field(default_factory=dict)


def window_of(sources: int, chunk_bytes: int) -> int:
    """Return how many chunks of this size each of so many sources may be ahead of the slowest one."""
    fitting = WINDOW_BYTES // max(1, sources * chunk_bytes) - CREDIT
    return max(_FEWEST_AHEAD, min(_WINDOW, fitting))


class PartReducer:
    """Sums one part. A row comes as partial sums or, from some chunk on, member by member.

    A chunk is complete when each row's partial sum is there, or each of its members has delivered or is given up.

    The sum runs in the plan's order of rows and members whatever the order of arrival, so the same contributions always
    give the same bytes.
    """

    def __init__(
        self,
        codec_map: CodecMap,
        norm_bounds: NormBounds,
        group: Group,
        chunks: Mapping[int, tuple[int, int]],
        reduced_rows: Collection[int] = (),
        buffers: RoundBuffers | None = None,
    ) -> None:
        """``chunks``: start and stop of each by its index; ``reduced_rows``: the rows that come as partial sums."""
        self._buffers = buffers or RoundBuffers()
        self.group = group
        self._codec_map = codec_map
        self._norm_bounds = norm_bounds
        self._bounds = chunks
        self._start = min(start for start, _ in chunks.values())
        self._squares = dict.fromkeys(group.members, 0.0)  # what each member has used up of its claim so far
        self._rows = [group.row(row) for row in range(len(group.rows))]
        self._direct_from = [max(chunks) + 1 if row in reduced_rows else min(chunks) for row in range(len(group.rows))]
        self._next_partial_sum = [min(chunks)] * len(group.rows)
        self._chunks = {index: _Chunk([len(members) for members in group.rows]) for index in chunks}

    def offer(self, chunk: int, member: int, packed: Packed) -> None:
        """Take a chunk of a member's contribution."""
        state = self._chunks[chunk]
        if member not in state.arrived and member not in state.missing:
            state.arrived[member] = packed
            state.open[self.group.row_of[member]] -= 1

    def offer_partial_sum(self, chunk: int, row: int, packed: memoryview) -> None:
        """Take a row's partial sum, in the order of chunks; ignored once the row comes member by member."""
        if chunk < self._direct_from[row]:
            self._chunks[chunk].partial_sums[row] = packed
            self._next_partial_sum[row] = chunk + 1

    def give_up(self, member: int) -> None:
        """Continue without this member where it has not delivered."""
        for state in list(self._chunks.values()):  # a worker thread may reduce and remove one meanwhile
            if member not in state.arrived and member not in state.missing:
                state.missing.add(member)
                state.open[self.group.row_of[member]] -= 1

    def sum_directly(self, row: int, first: int | None = None) -> range:
        """Take this row member by member from chunk ``first``, or from the first without a partial sum. Returns the
        chunks that this is new for."""
        first = self._next_partial_sum[row] if first is None else first
        added = range(first, self._direct_from[row])
        self._direct_from[row] = min(first, self._direct_from[row])
        return added

    def is_complete(self, chunk: int) -> bool:
        state = self._chunks.get(chunk)
        return state is None or all(
            row in state.partial_sums if chunk < direct_from else not state.open[row]
            for row, direct_from in enumerate(self._direct_from)
        )

    def reduce(self, chunk: int) -> ReducedChunk | list[int]:
        """Return the weighted mean of a complete chunk, or what else the plan makes of it, encoded once.

        Contributions that do not decode to finite numbers, or are above their member's claim for this chunk or
        for all chunks up to it, are left out. No honest row reducer makes such partial sums: the rows that have one are
        returned, and no mean is made until they have been summed directly.
        """
        state, (start, stop) = self._chunks[chunk], self._bounds[chunk]
        mean = self._accumulator(stop - start)
        included: list[int] = []
        squares: dict[int, float] = {}
        reduced_rows, bad = [], []
        for row, direct_from in enumerate(self._direct_from):
            if chunk >= direct_from:
                included += self._add_members(chunk, row, mean, squares)
            elif members := self._add_partial_sum(state, row, mean, (start, stop)):
                included += members
                reduced_rows.append(row)
            else:
                bad.append(row)
        if bad:
            return bad
        del self._chunks[chunk]
        for member, square in squares.items():
            self._squares[member] += square
        seal = name_of_sums([state.partial_sums[row] for row in reduced_rows]) if reduced_rows else b""
        return self._encode(mean, ChunkHeader(included, reduced_rows, seal), (start, stop))

    def _accumulator(self, size: int) -> Accumulator:
        match self._norm_bounds.kind:
            case "weighted":
                return WeightedMean(size)
            case "gather":
                return Gathered(size, len(self.group.members))
            case method:
                return RobustMean(size, method)

    def _encode(self, mean: Accumulator, header: ChunkHeader, bounds: tuple[int, int]) -> ReducedChunk:
        group, void = self.group, ReducedChunk(memoryview(self.group.pack_header(ChunkHeader())), [], None)
        if not header.included:
            return void
        total = group.weight(header.included)
        size = (bounds[1] - bounds[0]) * self._norm_bounds.copies
        codec = self._codec_map.result(*bounds, len(group.members))
        result = self._buffers.results.take(group.result_bytes(codec, size), group.header_bytes)
        result[: group.header_bytes] = group.pack_header(header)
        packed = torch.frombuffer(result[group.header_bytes :], dtype=torch.uint8)
        try:
            left = self._buffers.passing.floats(size)
            loss = (
                mean.encode(codec, left, packed)
                if isinstance(mean, Gathered)
                else mean.encode(codec, total, left, packed)
            )
        except CodecError:  # the sum overflowed: the chunk is void for all members
            return void
        return ReducedChunk(result, sorted(header.included), loss)

    def _add_members(
        self,
        chunk: int,
        row: int,
        mean: Accumulator,
        squares: dict[int, float],
    ) -> list[int]:
        """Add what a row's members brought to ``mean``, with their factors; returns the members that were added.
        ``squares`` gets what they have used up of their claims."""
        state, (start, stop) = self._chunks[chunk], self._bounds[chunk]
        codec, added, bounds = self._codec_map.contribution(start, stop), [], self._norm_bounds
        for member in self.group.rows[row]:
            weight, packed = float(self.group.weights[member]), state.arrived.get(member)
            if packed is None:
                continue
            try:
                square = codec.squared_norm(packed, stop - start) / codec.growth**2
                if not self._is_claimed(member, square, (start, stop)):
                    continue
                if isinstance(mean, Gathered):
                    mean.put(member, codec, packed)
                else:
                    mean.add_packed(codec, packed, weight, bounds.factors[member], row, bounds.usual_norms[member])
            except CodecError:
                continue
            squares[member] = square
            added.append(member)
        return added

    def _is_claimed(self, member: int, square: float, bounds: tuple[int, int]) -> bool:
        """Whether a chunk with this squared norm is within its member's claims for the chunk, and for all chunks up to
        it: else each of many chunks in one claimed range could use all of its claim."""
        claim, start, whole = self._norm_bounds.contribution, self._start, self._squares[member] + square
        return square <= claim(member, *bounds) and whole <= claim(member, start, bounds[1])

    def _add_partial_sum(self, state: _Chunk, row: int, mean: Accumulator, bounds: tuple[int, int]) -> list[int]:
        """Add a row's mean to ``mean``, times its weight; returns its members, none where it is no valid mean."""
        group, partial = self._rows[row], state.partial_sums[row]
        included, packed = group.header(partial).included, partial[group.header_bytes :]
        if not included:
            return []
        codec = self._codec_map.result(*bounds, len(group.members))
        assert not isinstance(mean, Gathered), "the plan has rows then"
        try:
            square = codec.squared_norm(packed, bounds[1] - bounds[0])
            if not square <= self._norm_bounds.partial_sum(included, *bounds):
                return []
            weight = group.weight(included)
            usual = sum(group.weights[one] * self._norm_bounds.usual_norms[one] for one in included) / weight
            mean.add_packed(codec, packed, weight, row=row, usual_norm=usual)
        except CodecError:
            return []
        return included


class ChunkCollector:
    """Runs the streams of some chunks and hands their chunks to the reducer.

    ``failed``: row reducers whose partial sums did not come, or were none. ``guard``: its ``watch`` is to be run beside
    the streams."""

    def __init__(
        self,
        context: ExchangeContext,
        reducer: PartReducer,
        chunks: range,
        tasks: asyncio.TaskGroup,
        inclusions: Inclusions | None = None,
    ) -> None:
        self.reducer = reducer
        self._inclusions = inclusions
        self.failed: set[int] = set()
        self.guard = StragglerGuard(context, self._behind)
        self._context = context
        self._chunks = chunks
        self._tasks = tasks
        self._row_reducers: dict[int, tuple[int, asyncio.Task[None]]] = {}
        self._next = chunks.start
        bounds = context.store.bounds(chunks.start)
        self._window = window_of(len(reducer.group.members), context.store.leaf_grid.chunk_bytes(*bounds))
        self._following: dict[int, int] = {}  # by source, the chunk that it delivers next
        self._changes = Changes()

    def ask_row_reducer(self, row: int, row_reducer: int) -> None:
        """Fetch the row as partial sums, from the first chunk on."""
        self._row_reducers[row] = row_reducer, self._tasks.create_task(self._fetch_partial_sums(row, row_reducer))

    def ask_members(self, row: int, chunks: range, but: Set[int]) -> None:
        """Fetch the row as its members' contributions; those in ``but`` are not asked."""
        for member in self.reducer.group.rows[row]:
            if member in but:
                self._give_up(member)
            else:
                self._tasks.create_task(self._fetch_contribution(member, chunks))

    def distrust(self, row: int, chunk: int) -> None:
        """Reject the row's partial sum of this chunk: from here on its other members are asked."""
        self._row_reducers[row][1].cancel()
        self._continue_without_row_reducer(row, chunk)

    async def wait_complete(self, chunk: int) -> None:
        """Return when the chunk can be reduced."""
        await self._changes.until(lambda: self.reducer.is_complete(chunk))

    def advance(self) -> None:
        """Note that the next chunk has been reduced."""
        self._next += 1
        self._changes.announce()

    async def _fetch_partial_sums(self, row: int, row_reducer: int) -> None:
        group, inclusions = self.reducer.group.row(row), self._inclusions
        request, member = self._context.partial_sums(group), self._context.store.plan.members[row_reducer]
        plan = self._context.plan_statement
        assert plan is not None, "partial sums come after the plan"

        def take(chunk: int, data: memoryview) -> None:
            if not is_signed(plan, member, group, chunk, data):
                raise WireError(f"its partial sum of chunk {chunk} is not signed by it")
            if inclusions is not None:
                inclusions.keep_partial_sum(chunk, row, data)

        async def offer(chunk: int, data: memoryview) -> None:
            await in_thread(take, chunk, data)
            self.reducer.offer_partial_sum(chunk, row, data)

        try:
            await self._fetch(row_reducer, request, self._chunks, offer)
        except ShoalError as error:
            self._log(row_reducer, error)
            self._continue_without_row_reducer(row)

    def _continue_without_row_reducer(self, row: int, first: int | None = None) -> None:
        row_reducer, chunks = self._row_reducers[row][0], self.reducer.sum_directly(row, first)
        if chunks:
            self.failed.add(row_reducer)
            self.ask_members(row, chunks, {row_reducer})

    async def _fetch_contribution(self, member: int, chunks: range) -> None:
        store, inclusions = self._context.store, self._inclusions
        root = store.plan.members[member].root

        def take(chunk: int, data: memoryview) -> memoryview:
            packed = store.leaf_grid.checked(root, *store.bounds(chunk), data)
            if inclusions is not None:
                inclusions.keep(chunk, member, data)
            return packed

        async def offer(chunk: int, data: memoryview) -> None:
            self.reducer.offer(chunk, member, await in_thread(take, chunk, data))

        try:
            await self._fetch(member, self._context.contributions(), chunks, offer)
        except ShoalError as error:  # the member's errors, too
            self._log(member, error)
            self._give_up(member)

    async def _fetch(
        self,
        source: int,
        request: StreamRequest,
        chunks: range,
        offer: Callable[[int, memoryview], Awaitable[None]],
    ) -> None:
        """Offer a source's chunks to the reducer; waits while the source is too far ahead of the others."""
        meter = self._context.meter_of(source, request, chunks)
        self._following[source] = chunks.start

        async def attempt() -> None:
            rest = range(self._following[source], chunks.stop)
            async with aclosing(self._context.open_stream(source, request, rest, meter)) as stream:
                async for chunk, packed in stream:
                    await offer(chunk, packed)
                    self._following[source] = chunk + 1  # not before: an attempt that fails here is repeated from here
                    if self.reducer.is_complete(self._next):
                        self._changes.announce()
                    await self._changes.until(lambda at=chunk: at < self._next + self._window)  # type: ignore[misc]

        if source == self._context.me:  # nobody waits for a link, nor is any compared with ours
            await attempt()
        else:
            await self.guard.fetch(source, request.wait_s, len(chunks), meter, attempt)

    def _behind(self) -> set[int]:
        """Return the sources that have not delivered the next chunk to be reduced."""
        return {source for source, following in self._following.items() if following <= self._next}

    def _log(self, member: int, error: ShoalError) -> None:
        number, peer = self._context.store.plan.round, self._context.members[member]
        log.warning("round %d continues without %s: %s", number, peer, error)

    def _give_up(self, member: int) -> None:
        self.reducer.give_up(member)
        self._changes.announce()


@dataclass
class Reduction:
    """Means of a group, chunk by chunk, as this member makes them; each is ``put`` where others get it.

    ``without``: members that are not asked. ``failed``: row reducers whose rows had to be asked one by one.
    ``inclusions``: keep what is reduced, for auditors.
    """

    context: ExchangeContext
    group: Group
    put: Callable[[int, memoryview], Awaitable[None]]
    without: frozenset[int] = frozenset()
    inclusions: Inclusions | None = None
    made: dict[int, ReducedChunk] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    @property
    def dropped(self) -> set[int]:
        """Members that some mean made here does without."""
        members = set(self.group.members)
        partly = [one.included for one in self.made.values() if len(one.included) < len(members)]
        return {member for included in partly for member in members.difference(included)}

    async def run(self, chunks: range, row_reducers: Sequence[int | None] = (None,)) -> None:
        """Return when the means of these chunks are put. Members that do not deliver are left out.

        ``row_reducers``: for each row, the member whose partial sums to take; None for its members' contributions."""
        context, store = self.context, self.context.store
        bounds = {index: store.bounds(index) for index in chunks}
        reduced_rows = {row: one for row, one in enumerate(row_reducers) if one is not None}
        reducer = PartReducer(store.codec_map, store.norm_bounds, self.group, bounds, reduced_rows, store.buffers)
        async with asyncio.TaskGroup() as tasks:
            collector = ChunkCollector(context, reducer, chunks, tasks, self.inclusions)
            watch = tasks.create_task(collector.guard.watch())
            for row in range(len(row_reducers)):
                if row in reduced_rows:
                    collector.ask_row_reducer(row, reduced_rows[row])
                else:
                    collector.ask_members(row, chunks, self.without)
            for index in chunks:
                self.made[index] = await self._make(collector, index)
                await self.put(index, self.made[index].result)
                collector.advance()
            watch.cancel()
        self.failed |= collector.failed

    async def _make(self, collector: ChunkCollector, index: int) -> ReducedChunk:
        while True:
            await collector.wait_complete(index)
            match await in_thread(collector.reducer.reduce, index):
                case ReducedChunk() as made:
                    return made
                case rows:
                    for row in rows:
                        collector.distrust(row, index)
