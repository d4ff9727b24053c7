"""Weighted mean of the members' contributions to a chunk, encoded once by its owner.

Sums run in the order of the calls and every operation rounds once, so the same contributions give the same bytes
wherever and however they are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from shoal.compression.blockwise import Blockwise, Summand
from shoal.compression.codec import Codec, Packed, largest_of, rounded_weight
from shoal.compression.codec_map import Span, spans
from shoal.compression.scratch import scratch, zeros

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class EncodingLoss:
    """Loss of encoding a mean, ``(n,) float32`` on the CPU, and a bound on its absolute values, ``largest``."""

    values: Tensor
    largest: float

    @classmethod
    def of(cls, values: Tensor) -> EncodingLoss:
        """Make it from values; ``largest`` is measured, NaN when a value is."""
        return cls(values, largest_of(values))


class WeightedMean:
    """Accumulator of a mean of ``(n,) float32`` vectors on the CPU, for one thread.

    Block-wise contributions are noted down only, and read once, block by block, when the mean is encoded the same way:
    sums of a chunk's size, written to memory and read again for each member, cost more than all that is done with them.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._summands: list[Summand] = []
        self._packed_codec: Codec | None = None  # the codec of those noted down
        self._total: Tensor | None = None  # of everything, once something could not be noted down

    def add_packed(
        self, codec: Codec, packed: Packed, weight: float, factor: float = 1.0, row: int = 0, usual_norm: float = 1.0
    ) -> None:
        """Add ``weight * factor`` times the decoded values, whatever their row and usual norm.

        Raises CodecError, and adds nothing, when they cannot be decoded.

        ``packed`` is not to change before ``encode``."""
        weight = rounded_weight(weight * factor)
        if self._total is None and self._is_noted(codec):
            self._summands.append(Summand(weight, codec.checked(packed, self._n)))
            self._packed_codec = codec
        else:
            codec.accumulate(packed, self._sum(), weight)

    def encode(self, codec: Codec, divisor: float, left: Tensor, packed: Tensor) -> EncodingLoss:
        """Encode the sum over ``divisor`` into ``packed``, ``(packed_bytes(n),) uint8``; its loss goes into ``left``.

        ``left``: ``(n,) float32``. Raises CodecError when the mean is not finite: ``left`` and ``packed`` are undefined
        then. Ends this object."""
        divisor = rounded_weight(divisor)
        if self._total is None and self._is_noted(codec):
            largest = self._encode_noted(codec, divisor, left, packed)
            if largest is not None:
                return EncodingLoss(left, largest)
        mean = self._sum().div_(divisor)
        codec.encode_residual(mean, zeros(self._n), left, packed)
        return EncodingLoss.of(left)

    def _is_noted(self, codec: Codec) -> bool:
        """Whether contributions of this codec can be noted down with those that were, and read block by block."""
        before = self._packed_codec
        if before is None:
            return all(isinstance(one, Blockwise) and room.start % 4 == 0 for _, room, one in spans(codec, self._n))
        if before.format == codec.format:
            return True
        pairs = zip_longest(spans(codec, self._n), spans(before, self._n))
        return all(one is not None and two is not None and _are_alike(one, two) for one, two in pairs)

    def _encode_noted(self, codec: Codec, divisor: float, left: Tensor, packed: Tensor) -> float | None:
        """See ``Blockwise.encode_mean``, segment by segment."""
        largest = 0.0
        for span, room, one in spans(codec, self._n):
            assert isinstance(one, Blockwise)
            summands = [Summand(weight, whole[room]) for weight, whole in self._summands]
            lost = one.encode_mean(summands, divisor, left[span], packed[room])
            if lost is None:
                return None
            largest = max(largest, lost)
        return largest

    def _sum(self) -> Tensor:
        if self._total is None:
            self._total = scratch("total", self._n, _CPU).zero_()
            for summand in self._summands:
                assert self._packed_codec is not None
                self._packed_codec.accumulate(summand.packed, self._total, summand.weight)
            self._summands.clear()
        return self._total


def _are_alike(one: Span, two: Span) -> bool:
    if not isinstance(one.codec, Blockwise) or not isinstance(two.codec, Blockwise):
        return False
    return one[:2] == two[:2] and one.codec.decodes_like(two.codec)
