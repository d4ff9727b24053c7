"""An owner's side of a part: packed contributions in, packed means out, chunk by chunk. Pure but for torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CodecError, Packed
from shoal.compression.coding import Coding

Values = Packed | None
"""A member's packed chunk; None stands for a contribution that will not come."""


def mask_bytes(members: int) -> int:
    """Length of the bit mask in front of every result chunk: bit ``i`` is set when member ``i`` is in the mean."""
    return (members + 7) // 8


def pack_mask(included: Sequence[int], members: int) -> bytes:
    return sum(1 << index for index in included).to_bytes(mask_bytes(members), "little")


def unpack_mask(result: memoryview, members: int) -> list[int]:
    """The members in the mean of a result chunk."""
    bits = int.from_bytes(result[: mask_bytes(members)], "little")
    return [index for index in range(members) if bits >> index & 1]


def result_bytes(codec: Codec, elements: int, members: int) -> int:
    """The length of a result chunk that has anybody in it; without, it is the mask alone."""
    return mask_bytes(members) + codec.packed_bytes(elements)


@dataclass
class Reduced:
    """A finished chunk: what everybody gets, and the owner's own quantization error on it (None: no mean)."""

    result: memoryview
    included: list[int]
    error: Tensor | None


@dataclass
class _Chunk:
    arrived: dict[int, Packed] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    reduced: bool = False


class PartReducer:
    """Collects one part. Chunks are complete when every member has delivered or is given up.

    The sum runs in the plan's order of members whatever the order of arrival, so the same contributions always
    give the same bytes.
    """

    def __init__(self, coding: Coding, weights: Sequence[int], chunks: Mapping[int, tuple[int, int]], own: int) -> None:
        """``chunks``: start and stop of each by its index; ``own``: the owner's index, whose values come unpacked."""
        self._coding = coding
        self._weights = list(weights)
        self._bounds = chunks
        self._own = own
        self._chunks = {index: _Chunk() for index in chunks}

    def offer(self, chunk: int, member: int, packed: Packed) -> bool:
        """A delivery; returns whether the chunk is complete now."""
        self._chunks[chunk].arrived[member] = packed
        return self.is_complete(chunk)

    def give_up(self, member: int) -> list[int]:
        """Go on without this member where it has not delivered; returns the chunks that this completes."""
        completed = []
        for index, chunk in self._chunks.items():
            if not chunk.reduced and member not in chunk.arrived and member not in chunk.missing:
                chunk.missing.add(member)
                if self.is_complete(index):
                    completed.append(index)
        return completed

    def is_complete(self, chunk: int) -> bool:
        state = self._chunks[chunk]
        return len(state.arrived) + len(state.missing) == len(self._weights) - 1

    def dropped(self) -> set[int]:
        """Members that some chunk does without."""
        return {member for chunk in self._chunks.values() for member in chunk.missing}

    def reduce(self, chunk: int, own: Tensor) -> Reduced:
        """The weighted mean of a complete chunk, encoded once. ``own``: (size,) float32, this owner's values.

        Contributions with bytes that do not decode, or not to finite numbers, are left out.
        """
        state, (start, stop) = self._chunks[chunk], self._bounds[chunk]
        state.reduced = True
        codec = self._coding.contribution(start, stop)
        total = torch.zeros(stop - start)
        included, weight = [], 0
        for member, member_weight in enumerate(self._weights):
            if member == self._own:
                total += own * float(member_weight)
            elif not self._accumulate(state, member, codec, total):
                continue
            included.append(member)
            weight += member_weight
        state.arrived.clear()
        mean, error = total.div_(float(weight)), torch.zeros(stop - start)
        try:
            packed = self._coding.result(start, stop, len(self._weights)).encode_residual(mean, error)
        except CodecError:  # the sum overflowed: void for everybody
            return Reduced(memoryview(pack_mask([], len(self._weights))), [], None)
        result = bytearray(mask_bytes(len(self._weights)) + packed.numel())
        result[: mask_bytes(len(self._weights))] = pack_mask(included, len(self._weights))
        result[mask_bytes(len(self._weights)) :] = packed.numpy().data
        return Reduced(memoryview(result), included, error)

    def _accumulate(self, state: _Chunk, member: int, codec: Codec, total: Tensor) -> bool:
        """Add a member's weighted values to ``total``; returns False, with nothing added, where there are none."""
        packed = state.arrived.get(member)
        if packed is None:
            return False
        try:
            codec.accumulate(packed, total, float(self._weights[member]))
        except CodecError:
            state.missing.add(member)
            return False
        return True
