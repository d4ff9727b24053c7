"""Weighted mean of the members' contributions to a chunk, encoded once by its owner.

Sums run in the order of the calls and every operation rounds once, so the same contributions give the same bytes
wherever and however they are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.blockwise import Blockwise, Summand
from shoal.compression.codec import Codec, Packed, largest_of, rounded_weight
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
        self._packed_codec: Blockwise | None = None  # the codec of those noted down that are packed
        self._total: Tensor | None = None  # of everything, once something could not be noted down

    def add_packed(self, codec: Codec, packed: Packed, weight: float) -> None:
        """Add ``weight`` times the decoded values. Raises CodecError, and adds nothing, when they cannot be decoded.

        ``packed`` is not to change before ``encode``."""
        weight = rounded_weight(weight)
        if self._total is None and isinstance(codec, Blockwise) and codec.decodes_like(self._packed_codec or codec):
            self._summands.append(Summand(weight, packed=codec.checked(packed, self._n)))
            self._packed_codec = codec
        else:
            codec.accumulate(packed, self._sum(), weight)

    def add_values(self, values: Tensor, residual: Tensor, weight: float) -> None:
        """Add ``weight`` times ``values + residual``, ``(n,) float32`` each; at most once, before ``encode``."""
        summand = Summand(rounded_weight(weight), values=(values, residual))
        if self._total is None:
            self._summands.append(summand)
        else:
            self._add(summand, self._total)

    def encode(self, codec: Codec, divisor: float, left: Tensor, packed: Tensor, times: float = 1.0) -> EncodingLoss:
        """Encode the sum over ``divisor`` into ``packed``, ``(packed_bytes(n),) uint8``; its loss goes into ``left``.

        ``left``, ``(n,) float32``, becomes the loss multiplied by ``times``.

        Raises CodecError when the mean is not finite: ``left`` and ``packed`` are undefined then. Ends this object."""
        divisor = rounded_weight(divisor)
        if self._total is None and isinstance(codec, Blockwise) and codec.decodes_like(self._packed_codec or codec):
            largest = codec.encode_mean(self._summands, (divisor, times), left, packed)
            if largest is not None:
                return EncodingLoss(left, largest * abs(times))
        mean = self._sum().div_(divisor)
        codec.encode_residual(mean, zeros(self._n), left, packed)
        return EncodingLoss.of(left if times == 1.0 else left.mul_(times))

    def _sum(self) -> Tensor:
        if self._total is None:
            self._total = scratch("total", self._n, _CPU).zero_()
            for summand in self._summands:
                self._add(summand, self._total)
            self._summands.clear()
        return self._total

    def _add(self, summand: Summand, total: Tensor) -> None:
        if summand.values is not None:
            added = torch.add(*summand.values, out=scratch("added", self._n, _CPU))
            total.add_(added.mul_(summand.weight))
        else:
            assert summand.packed is not None
            assert self._packed_codec is not None
            self._packed_codec.accumulate(summand.packed, total, summand.weight)
