"""An owner's side of a part: packed contributions in, packed means out, chunk by chunk. Pure but for torch.

A relay's side of its row is the same; in a grid, an owner takes whole rows as partials, the packed means of relays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.compression.codec import CodecError, Packed
from shoal.compression.coding import Coding
from shoal.compression.weighted_mean import Lost, WeightedMean
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_header import Group, Header
from shoal.swarm.averaging.norm_bounds import NormBounds

Brought = tuple[Tensor, Tensor]
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
    error: Lost | None


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
        coding: Coding,
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
        self._coding = coding
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

    def reduce(self, chunk: int, own: Brought | None, room: Room | None = None) -> Reduced | list[int]:
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
        return self._encode(mean, Header(included, relayed), (start, stop), room)

    def _encode(self, mean: WeightedMean, header: Header, bounds: tuple[int, int], room: Room | None) -> Reduced:
        group, void = self.group, Reduced(memoryview(self.group.pack_header(Header())), [], None)
        if not header.included:
            return void
        size, total = bounds[1] - bounds[0], group.weight(header.included)
        codec = self._coding.result(*bounds, len(group.members))
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
        own: Brought | None,
        squares: dict[int, float],
    ) -> list[int]:
        """Add what a row's members brought to ``mean``, times their pulls; returns whose there was. ``squares`` gets
        what they have used up of their claims."""
        state, (start, stop) = self._chunks[chunk], self._bounds[chunk]
        codec, added = self._coding.contribution(start, stop), []
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
        codec = self._coding.result(*bounds, len(group.members))
        try:
            square = codec.squared_norm(packed, bounds[1] - bounds[0])
            if not square <= self._norm_bounds.partial(included, *bounds):
                return []
            mean.add_packed(codec, packed, group.weight(included))
        except CodecError:
            return []
        return included
