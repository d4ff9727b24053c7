"""The weighted mean of what several members bring, encoded once: an owner's arithmetic on a chunk.

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
class Lost:
    """What encoding a mean lost, ``(n,) float32``, on the CPU; no absolute value of it is above ``largest``."""

    values: Tensor
    largest: float

    @classmethod
    def of(cls, values: Tensor) -> Lost:
        """Looks at all of them; ``largest`` is NaN when one is."""
        return cls(values, largest_of(values))


class WeightedMean:
    """A mean of ``(n,) float32`` vectors on the CPU that is still being added up, in one thread.

    Block-wise contributions are noted down only, and read once, block by block, when the mean is encoded the same way:
    sums of a chunk's size, written to memory and read again for each member, cost more than all that is done with them.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._noted: list[Summand] = []
        self._alike: Blockwise | None = None  # the codec of those noted down that are packed
        self._total: Tensor | None = None  # of everything, once something could not be noted down

    def add_packed(self, codec: Codec, packed: Packed, weight: float) -> None:
        """``weight`` times the decoded values. Raises CodecError, and adds nothing, when they cannot be decoded.

        ``packed`` is not to change before ``encode``."""
        weight = rounded_weight(weight)
        if self._total is None and isinstance(codec, Blockwise) and codec.unpacks_like(self._alike or codec):
            self._noted.append(Summand(weight, packed=codec.checked(packed, self._n)))
            self._alike = codec
        else:
            codec.accumulate(packed, self._sum(), weight)

    def add_values(self, values: Tensor, residual: Tensor, weight: float) -> None:
        """``weight`` times ``values + residual``, ``(n,) float32`` each; to be called once, before ``encode``."""
        summand = Summand(rounded_weight(weight), values=(values, residual))
        if self._total is None:
            self._noted.append(summand)
        else:
            self._add(summand, self._total)

    def encode(self, codec: Codec, divisor: float, left: Tensor, packed: Tensor, times: float = 1.0) -> Lost:
        """The sum over ``divisor``, encoded into ``packed``, ``(packed_bytes(n),) uint8``; what that lost, so many
        ``times`` over, is in ``left``, ``(n,) float32``.

        Raises CodecError when the mean is not finite: ``left`` and ``packed`` are undefined then. Ends this object."""
        divisor = rounded_weight(divisor)
        if self._total is None and isinstance(codec, Blockwise) and codec.unpacks_like(self._alike or codec):
            largest = codec.encode_mean(self._noted, (divisor, times), left, packed)
            if largest is not None:
                return Lost(left, largest * abs(times))
        mean = self._sum().div_(divisor)
        codec.encode_residual(mean, zeros(self._n), left, packed)
        return Lost.of(left if times == 1.0 else left.mul_(times))

    def _sum(self) -> Tensor:
        if self._total is None:
            self._total = scratch("total", self._n, _CPU).zero_()
            for summand in self._noted:
                self._add(summand, self._total)
            self._noted.clear()
        return self._total

    def _add(self, summand: Summand, total: Tensor) -> None:
        if summand.values is not None:
            added = torch.add(*summand.values, out=scratch("added", self._n, _CPU))
            total.add_(added.mul_(summand.weight))
        else:
            assert summand.packed is not None
            assert self._alike is not None
            self._alike.accumulate(summand.packed, total, summand.weight)
