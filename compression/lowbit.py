"""1-bit and 2-bit codecs: a sign, or a sign and one of two magnitudes, with scales for each block of values.

They lose most of a value, so they are for use with error feedback, which offers the loss again (Seide et al. 2014,
"1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, arXiv:1901.09847). ``int2`` has the levels that minimise
the squared error for its thresholds (Lloyd 1982, "Least squares quantization in PCM").

Wire layouts, ``blocks = ceil(n / block)``, ``groups = ceil(n / 8)``, everything little-endian::

    sign  offset 0            blocks x bfloat16       the magnitude of every value in the block
          offset 2 * blocks   groups x uint8          bit i: the sign of the group's value i, 1 is negative

    int2  offset 0            blocks x 2 x bfloat16   the block's inner and outer magnitude
          offset 4 * blocks   groups x 2 x uint8      first as in ``sign``; then bit i: 1 where value i is outer

Magnitudes are 0, or normal and positive. Bits of a short last group are written as 0 and never read.

Relative L2 error measured on 2**21 values, in the last column normal ones whose scale changes every 1024 values::

                         bytes a value   normal   Laplace   Student t, 3 degrees   changing scale
    sign, block 64           0.156        0.598     0.702          0.761                0.597
    sign, block 512          0.129        0.602     0.707          0.767                0.601
    sign, block 4096         0.125        0.603     0.707          0.767                0.818
    int2, block 64           0.313        0.338     0.405          0.505                0.338
    int2, block 512          0.258        0.345     0.421          0.555                0.345
    int2, block 4096         0.251        0.346     0.422          0.559                0.442

For ``int2`` on the same values, levels of 1/3 and 1 times the largest value gave 0.638, 1.162, 2.733, 0.628 at block
512, and one scale with the levels that are best for normal values 0.342, 0.454, 0.590, 0.343.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.compression.codec import (
    Packed,
    checked_out,
    checked_values,
    in_place,
    not_finite_error,
    packed_tensor,
    rounded_weight,
)
from shoal.compression.formats import BlockFormat, CodecError
from shoal.compression.scratch import scratch
from shoal.compression.tiled import TiledCodec

_Leaf: TypeAlias = tuple[slice, npt.NDArray[Any], npt.NDArray[Any]]

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_SMALLEST_NORMAL_BITS, _LARGEST_FINITE_BITS = 0x0080, 0x7F7F
_LARGEST_MAGNITUDE = torch.finfo(torch.bfloat16).max
# Sums are of |x| * 2**-16, so that no sum of a block of up to 2**16 values overflows.
_DOWN, _UP = 2.0**-16, 2.0**16
# Values above this multiple of the mean |x| make the outer magnitude.
_OUTER = 1.4
_STORED = 1.0 + 2.0**-8
"""Bound on how much a magnitude grows when it is stored as bfloat16."""
TWO_MAGNITUDES_GROWTH = math.sqrt(5.0) * _STORED
"""``Codec.growth`` where values become the nearer of two magnitudes, the lower no larger than the mean.

A value that becomes the upper one is above the middle of both, so more than half of it: their squares grow at most
fourfold. The others become the lower one, whose square, for all values, is no larger than the sum of all squares."""
_ONE_IN_EVERY_BYTE = 0x0101010101010101


def _bytes_of_bits(zero: int, one: int) -> Tensor:
    """``(256,) int64``: byte i of entry b is ``one`` where bit i of b is 1, else ``zero``, both int8."""
    bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and_(1)
    return (bits * (one - zero) + zero).to(torch.int8).view(torch.int64).view(-1)


_MASKS = _bytes_of_bits(0, -1)
_SIGNS = _bytes_of_bits(1, -1)


class _LowBit(TiledCodec):
    """Common base of both codecs: compiled kernels once they are ready, else torch in tiles."""

    kernels = "lowbit"

    def __init__(self, form: BlockFormat, levels: int) -> None:
        super().__init__(form, torch.bfloat16, levels)
        self._how = form.block, levels

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        values = checked_values(values)
        kernels = self.compiled(values.device)
        if kernels is None:
            return super().encode(values)
        packed, array = self._room(values), values.numpy()
        for span, scales, codes in self._arrays(packed, array.size):
            if not kernels.encode(array[span], scales, codes, *self._how):
                raise not_finite_error(values)
        return packed

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """See ``Codec.encode_residual``. Fused: values and residual are read and the residual is written in one go."""
        values, residual = checked_values(values), checked_out(residual, values.numel(), values.device)
        kernels = self.compiled(values.device)
        if kernels is None:
            return super().encode_residual(values, residual, left, packed)
        residual, packed = in_place(residual, left), self._room(values, packed)
        one, two, leaves = values.numpy(), residual.numpy(), list(self._arrays(packed, values.numel()))
        # All sums are looked at before any is replaced: a chunk is small enough to stay in the cache in between.
        for span, scales, _ in leaves:
            if not kernels.measure_sums(one[span], two[span], scales, *self._how):
                raise not_finite_error(values + residual)
        for span, scales, codes in leaves:
            kernels.pack_sums(one[span], two[span], scales, codes, *self._how)
        return packed

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        packed = packed_tensor(packed, self.packed_bytes(n))
        kernels = self.compiled(packed.device)
        if kernels is None:
            return super().decode(packed, n, out)
        out = torch.empty(n, dtype=torch.float32) if out is None else out
        values = checked_out(out, n, packed.device)
        array = values.numpy()
        for span, scales, codes in self._checked_arrays(packed, n, kernels):
            kernels.decode(scales, codes, array[span], *self._how)
        return out

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``. Fused: the decoded values never get to memory."""
        n, weight = total.numel(), rounded_weight(weight)
        packed = packed_tensor(packed, self.packed_bytes(n))
        kernels = self.compiled(packed.device)
        if kernels is None:
            super().accumulate(packed, total, weight)
            return
        total = checked_out(total, n, packed.device)
        array = total.numpy()
        for span, scales, codes in self._checked_arrays(packed, n, kernels):
            kernels.accumulate(scales, codes, array[span], weight, *self._how)

    def _check(self, scales: Tensor, codes: Tensor) -> None:
        """Raise CodecError unless all bits of ``scales``, bfloat16, are those of 0 or of a normal positive number."""
        bits = scales.view(torch.int16)
        low, high = torch.aminmax(bits)
        if int(low) < 0 or int(high) > _LARGEST_FINITE_BITS:
            raise CodecError("a magnitude is negative, NaN or infinite")
        if int(low) < _SMALLEST_NORMAL_BITS and bool(((bits > 0) & (bits < _SMALLEST_NORMAL_BITS)).any()):
            raise CodecError("a magnitude is subnormal")

    def _arrays(self, packed: Tensor, n: int) -> Iterator[_Leaf]:
        """Yield each leaf's range of values, the bits of its scales, int16, and its codes, uint8: views of
        ``packed``."""
        array = packed.numpy()
        for span, room in self.format.leaves(n):
            codes = room.start + self.format.scale_bytes(span.stop - span.start)
            yield span, array[room.start : codes].view(np.int16), array[codes : room.stop]

    def _checked_arrays(self, packed: Tensor, n: int, kernels: ModuleType) -> list[_Leaf]:
        leaves = list(self._arrays(packed, n))
        for _, scales, _ in leaves:
            if not kernels.are_plain(scales):
                self._check(torch.from_numpy(scales).view(torch.bfloat16), packed)
        return leaves


class Sign(_LowBit):
    """One bit a value: ``decoded = ± mean|x|`` of its block. -0.0 is negative.

    The mean is the magnitude with the least squared error. It is summed in float32 in halves (the block's first half
    plus its second, elementwise, until one number is left), a short block as if zeros followed, divided by the number
    of values, and rounded to bfloat16; below ``2**-126`` it is 0.
    """

    def __init__(self, form: BlockFormat) -> None:
        super().__init__(form, 1)

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: the mean of magnitudes is not above their quadratic mean; it is stored in bfloat16."""
        return _STORED

    def _measure(self, rows: Tensor, n: int, scales: Tensor) -> Tensor:
        sums = _sum_in_halves(_sizes(rows))
        scales.copy_(_magnitudes(sums / _counts(rows, n)))
        return sums

    def _pack(self, rows: Tensor, scales: Tensor, codes: Tensor) -> None:
        codes.copy_(_sign_bits(rows))

    def _unpack(self, codes: Tensor, scales: Tensor, rows: Tensor) -> None:
        _spread(codes, _SIGNS, rows)
        rows.mul_(scales.to(torch.float32))


class Int2(_LowBit):
    """Two bits a value: ``decoded = ± inner`` or ``± outer`` of its block, whichever is nearer (ties: inner).

    ``outer`` is the mean of the block's ``|x|`` above 1.4 times their mean, ``inner`` the mean of the others; both
    from sums in halves, as in ``Sign``. A block with nothing above has ``outer = inner``.
    """

    def __init__(self, form: BlockFormat) -> None:
        super().__init__(form, 2)

    @property
    def growth(self) -> float:
        """See ``Codec.growth`` and ``TWO_MAGNITUDES_GROWTH``."""
        return TWO_MAGNITUDES_GROWTH

    def _measure(self, rows: Tensor, n: int, scales: Tensor) -> Tensor:
        sizes = _sizes(rows)
        counts = _counts(rows, n)
        sums = _sum_in_halves(sizes)
        limits = sums / counts * _OUTER
        # The sign of the difference, over all bits: faster than a comparison and a choice.
        above = torch.sub(limits, sizes, out=_scratch_like("low_above", rows)).view(torch.int32)
        above.bitwise_right_shift_(31)
        outer_counts = above.sum(1, keepdim=True, dtype=torch.int32).neg_()
        outer_sums = _sum_in_halves(above.bitwise_and_(sizes.view(torch.int32)).view(torch.float32))
        inner = (sums - outer_sums).clamp_(min=0.0) / (counts - outer_counts).clamp_(min=1.0)
        outer = torch.where(outer_counts == 0, inner, outer_sums / outer_counts.clamp(min=1))
        scales.copy_(_magnitudes(torch.cat([inner, outer], dim=1)))
        return sums

    def _pack(self, rows: Tensor, scales: Tensor, codes: Tensor) -> None:
        halves = scales.to(torch.float32) * 0.5
        middle = halves[:, :1] + halves[:, 1:]
        groups = codes.view(-1, 2)
        groups[:, 0] = _sign_bits(rows)
        below = torch.abs(rows, out=_scratch_like("low_sizes", rows))
        groups[:, 1] = _sign_bits(torch.sub(middle, below, out=below))

    def _unpack(self, codes: Tensor, scales: Tensor, rows: Tensor) -> None:
        groups = codes.view(-1, 2)
        magnitudes = _float_bits(scales)
        inner, outer = magnitudes[:, :1], magnitudes[:, 1:]
        bits, signs = rows.view(torch.int32), _scratch_like("low_signs", rows)
        _spread(groups[:, 1], _MASKS, bits)
        # Where the mask is all ones, the bits of inner become those of outer.
        bits.bitwise_and_(inner ^ outer).bitwise_xor_(inner)
        _spread(groups[:, 0], _SIGNS, signs)
        rows.mul_(signs)


def _scratch_like(purpose: str, rows: Tensor) -> Tensor:
    return scratch(purpose, rows.numel(), rows.device).view_as(rows)


def _sizes(rows: Tensor) -> Tensor:
    """Return ``|rows| * 2**-16``, in scratch memory."""
    return torch.mul(rows, _DOWN, out=_scratch_like("low_sizes", rows)).abs_()


def _sum_in_halves(rows: Tensor) -> Tensor:
    """Sum each row of ``(r, block)`` to ``(r, 1)``: the same additions in the same order on every device."""
    half = rows.shape[1] // 2
    first = scratch("low_halves", len(rows) * half, rows.device).view(-1, half)
    rows = torch.add(rows[:, :half], rows[:, half:], out=first)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows


def _counts(rows: Tensor, n: int) -> Tensor:
    """Count the values, of the first ``n``, that stand in each of ``rows``: ``(r, 1) float32``."""
    blocks, block = rows.shape
    counts = torch.full((blocks, 1), float(block), device=rows.device)
    counts[-1] = n - (blocks - 1) * block
    return counts


def _magnitudes(means: Tensor) -> Tensor:
    """Convert means of ``|x| * 2**-16`` to magnitudes that can be stored: bfloat16, finite, 0 or normal."""
    means = (means * _UP).clamp_(max=_LARGEST_MAGNITUDE)
    return means.masked_fill_(means < _SMALLEST_NORMAL, 0.0).to(torch.bfloat16)


def _float_bits(scales: Tensor) -> Tensor:
    """The float32 bits of stored magnitudes, int32."""
    return scales.to(torch.float32).view(torch.int32)


def _sign_bits(rows: Tensor) -> Tensor:
    """The sign bits of ``rows``, ``(r, 8 * k) float32``, eight a byte: ``(r * k,) int64`` of 0 .. 255."""
    masks = _scratch_like("low_sizes", rows).view(torch.int32)  # In place, where ``rows`` is that already.
    torch.bitwise_right_shift(rows.view(torch.int32), 31, out=masks)
    bits = scratch("low_bits", rows.numel() // 4, rows.device).view(torch.int64)
    bits.view(torch.int8).copy_(masks.view(-1))
    bits.bitwise_and_(_ONE_IN_EVERY_BYTE)
    # Byte i holds bit i: moved down by 7 i it falls into its place of the lowest byte, and nothing else does.
    shifted = masks.view(-1)[: rows.numel() // 4].view(torch.int64)
    for shift in (7, 14, 28):
        bits.bitwise_or_(torch.bitwise_right_shift(bits, shift, out=shifted))
    return bits.bitwise_and_(0xFF)


def _spread(codes: Tensor, bytes_of_bits: Tensor, out: Tensor) -> None:
    """Fill ``out``, ``(r, block)``, with the entry of ``bytes_of_bits`` for each bit of ``codes``,
    ``(r * block / 8,) uint8``."""
    spread = scratch("low_bits", out.numel() // 4, out.device).view(torch.int64)
    torch.index_select(bytes_of_bits.to(codes.device), 0, codes.to(torch.int32), out=spread)
    out.view(-1).copy_(spread.view(torch.int8))
