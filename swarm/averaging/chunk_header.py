"""Header of every result chunk and partial sum: which members are in the mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from shoal.compression.codec import Codec
from shoal.swarm.protocol.rounds import Part, RoundPlan

_NAME_BYTES, _SIGNATURE_BYTES = 32, 64

_OTHERS_FIRST = 2
"""Most members that are asked before those to be avoided: each may cost the time-out for results."""


@dataclass(frozen=True)
class ChunkHeader:
    """Members in a mean, ``included``, in the plan's order, and the rows that came into it as partial sums.

    ``seal``: in a grid, of a mean the name of those partial sums, zeros where there is none, and of a partial sum its
    row reducer's signature (``partial_sums.py``); in a secure round the name of all masked sums of the part
    (``secure/sum_names.py``); empty in any other flat group."""

    included: list[int] = field(default_factory=list)
    reduced_rows: list[int] = field(default_factory=list)
    seal: bytes = b""


@dataclass(frozen=True)
class Group:
    """Members whose contributions make one mean, by row, as indices of the plan: all members, or one row.

    ``weights``: of all members of the plan. A packed header has one bit for each member of the group and then, if there
    are several rows, one bit for each row that came as a partial sum; the first member has the lowest bit of the first
    byte. After these bytes it has the seal, of ``seal_bytes``.
    """

    rows: tuple[tuple[int, ...], ...]
    weights: tuple[int, ...]
    seal_bytes: int = 0

    @classmethod
    def of(cls, plan: RoundPlan) -> Group:
        rows: list[list[int]] = [[] for _ in range(1 + max(member.row for member in plan.members))]
        for index, member in enumerate(plan.members):
            rows[member.row].append(index)
        weights = tuple(member.weight for member in plan.members)
        return cls(tuple(map(tuple, rows)), weights, _NAME_BYTES if plan.columns or plan.secure is not None else 0)

    def row(self, index: int) -> Group:
        """Return one row as a group of its own: its mean is that row's partial sum."""
        return Group((self.rows[index],), self.weights, _SIGNATURE_BYTES)

    @cached_property
    def members(self) -> list[int]:
        return sorted(member for row in self.rows for member in row)

    @cached_property
    def bits_bytes(self) -> int:
        """Bytes of the header before its seal."""
        flags = len(self.rows) if len(self.rows) > 1 else 0
        return (len(self.members) + flags + 7) // 8

    @property
    def header_bytes(self) -> int:
        return self.bits_bytes + self.seal_bytes

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {member: bit for bit, member in enumerate(self.members)}

    @cached_property
    def row_of(self) -> dict[int, int]:
        """The row of each member."""
        return {member: row for row, members in enumerate(self.rows) for member in members}

    def summed_directly(self, header: ChunkHeader) -> list[int]:
        """Return the members in a mean whose row did not come into it as a partial sum."""
        return [member for member in header.included if self.row_of[member] not in header.reduced_rows]

    def weight(self, included: Iterable[int]) -> int:
        """Return the weight of these members together."""
        return sum(self.weights[member] for member in included)

    def pack_header(self, header: ChunkHeader) -> bytes:
        place = self._place_of
        bits = sum(1 << place[member] for member in header.included)
        bits |= sum(1 << len(place) + row for row in header.reduced_rows)
        return bits.to_bytes(self.bits_bytes, "little") + header.seal.ljust(self.seal_bytes, b"\0")

    def header(self, data: memoryview) -> ChunkHeader:
        """Return the header of a result chunk or partial sum."""
        bits = int.from_bytes(data[: self.bits_bytes], "little")
        rows = bits >> len(self.members) if len(self.rows) > 1 else 0
        return ChunkHeader(
            [member for bit, member in enumerate(self.members) if bits >> bit & 1],
            [row for row in range(len(self.rows)) if rows >> row & 1],
            bytes(data[self.bits_bytes : self.header_bytes]),
        )

    def includes(self, data: memoryview, member: int) -> bool:
        """Whether a member is in a result chunk or partial sum, without a look at all others."""
        return _bit(data, self._place_of[member])

    def came_reduced(self, data: memoryview, row: int) -> bool:
        """Whether a row came into a result chunk as a partial sum."""
        return len(self.rows) > 1 and _bit(data, len(self.members) + row)

    def result_bytes(self, codec: Codec, elements: int) -> int:
        """Return the size of a chunk with at least one member; an empty one is the header alone."""
        return self.header_bytes + codec.packed_bytes(elements)


def _bit(data: memoryview, place: int) -> bool:
    return bool(data[place // 8] >> place % 8 & 1)


def holders(plan: RoundPlan, part: Part, me: int) -> list[int]:
    """Return the members to ask for the results of a part, in order: the row reducer, the owner, the stand-ins.

    ``me`` among the stand-ins means that this member makes the results itself. If the first of them is among the
    member's ``detours``, other members that get the results are asked before it; only such that make no detour
    themselves, as members that ask each other wait for nobody."""
    usual = _usual_holders(plan, part, me)
    if not _makes_detour(plan, part, me):
        return usual
    avoided = plan.members[me].detours
    for nearby in (usual, may_hold(plan, part)):
        others = [one for one in nearby if one != me and one not in avoided and not _makes_detour(plan, part, one)]
        if others:
            return list(dict.fromkeys([*others[:_OTHERS_FIRST], *[one for one in usual if one in avoided], *usual]))
    return usual


def _usual_holders(plan: RoundPlan, part: Part, member: int) -> list[int]:
    row_reducers = plan.row_reducers(part)
    first = row_reducers[plan.members[member].row] if row_reducers else part.owner
    return list(dict.fromkeys([*([first] if first != member else []), part.owner, *part.stand_ins]))


def _makes_detour(plan: RoundPlan, part: Part, member: int) -> bool:
    """Whether a member that gets the part's results avoids the one that it would ask first."""
    return member != part.owner and _usual_holders(plan, part, member)[0] in plan.members[member].detours


def may_hold(plan: RoundPlan, part: Part) -> list[int]:
    """Return the members that fetch a part's results from its owner: the row reducers and the owner's row."""
    row = plan.members[part.owner].row
    served = [index for index, member in enumerate(plan.members) if member.row == row]
    return list(dict.fromkeys([*plan.row_reducers(part), *served]))
