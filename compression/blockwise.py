"""Block-wise quantization to int8 and int4, each block of values with a scale of its own.

After Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), but linear. On the CPU it
uses compiled kernels once they are ready (``kernels/loader.py``), else torch in tiles that stay in the cache; on other
devices torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import (
    Codec,
    Packed,
    checked_out,
    checked_values,
    not_finite_error,
    packed_buffer,
    packed_tensor,
    rounded_weight,
)
from shoal.compression.formats import BlockFormat, CodecError
from shoal.compression.scratch import scratch

_How: TypeAlias = tuple[int, int, int, int]
_ABSOLUTE = 0x7FFFFFFF
_LARGEST_FINITE_BITS = 0x7F7FFFFF
_SMALLEST_NORMAL_BITS = 0x00800000
_FLOAT_MAX = torch.finfo(torch.float32).max
_TINY = torch.finfo(torch.float32).tiny
_CPU = torch.device("cpu")
_TILE = 1 << 18
"""Values per tile of the torch path on the CPU, as many as a chunk has. Smaller tiles are slower: calls cost time."""


class Summand(NamedTuple):
    """Weighted term of a mean: a packed vector that was checked; ``weight`` is a float32."""

    weight: float
    packed: Tensor


class Blockwise(Codec):
    """Symmetric int8 or int4, one float32 scale a block: ``scale = max|x| / q``, ``code = round(x * (q / max|x|))``.

    ``q`` is 127 or 7. Rounds to nearest, ties to even: ``|x - decoded| <= scale / 2``, but for the rounding of
    float32 itself. With a ``seed`` rounding is stochastic: up with the probability of the fraction, drawn from a hash
    of seed, block maximum and position, so that the same values give the same bytes. The last block may be short. A
    block whose scale would be subnormal gets scale 0 and decodes to zeros, so machines that flush subnormals agree
    with those that do not.

    Packed layout, version 1, ``blocks = ceil(n / block)``, everything little-endian::

        offset 0            blocks x float32   the scales: 0, or normal and positive
        offset 4 * blocks   int8: n x int8, the codes -127 .. 127
                            int4: ceil(n / 2) x uint8, two codes + 8 each (1 .. 15), the even position's in the
                            low four bits; after an odd last one the high bits are 8

    Each leaf (``BlockFormat.leaf``) is packed so by itself.
    """

    kernels = "blockwise"
    format: BlockFormat

    def __init__(self, form: BlockFormat) -> None:
        super().__init__(form)
        self.bits = {"int8": 8, "int4": 4}[form.kind]
        self.block = form.block
        self.seed = form.seed
        self._largest = 2 ** (self.bits - 1) - 1
        self._smallest = self._largest * _TINY
        self._smallest_bits = _bits_of(self._smallest)
        # The largest float32 whose product with the largest code is still finite.
        self._largest_scale = float(torch.nextafter(torch.tensor(_FLOAT_MAX / self._largest), torch.tensor(0.0)))
        # From this block maximum on a scale may exceed it; far enough below to need no care about rounding.
        self._largest_scale_absmax_bits = _bits_of(_FLOAT_MAX * 0.99)
        # Up to here no code, the lowest included, can decode to infinity.
        self._safe_bits = _bits_of(_FLOAT_MAX / (self._largest + 1))

    @property
    def growth(self) -> float:
        """See ``Codec.growth`` and ``linear_growth``."""
        return linear_growth(self._largest, self.block, 0.5 if self.seed is None else 1.0)

    # Encoding -----------------------------------------------------------------------------------------------

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        values = checked_values(values)
        packed = self._room(values)
        kernels = self.compiled(values.device)
        if kernels is None:
            self._encode_leaves(values, packed)
        elif not kernels.encode(values.numpy(), packed.numpy(), self._how(values.numel())):
            raise not_finite_error(values)
        return packed

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """See ``Codec.encode_residual``. Fused: values and residual are read and what is left is written in one go."""
        values, residual = checked_values(values), checked_out(residual, values.numel(), values.device)
        left = residual if left is None else checked_out(left, values.numel(), values.device)
        packed = self._room(values, packed)
        kernels = self.compiled(values.device)
        if kernels is not None:
            arrays = values.numpy(), residual.numpy()
            # What is overwritten is to be as before when a sum anywhere is not finite.
            is_bad = left is residual and not kernels.are_sums_finite(*arrays)
            how = self._how(values.numel())
            if is_bad or not kernels.encode_residual(*arrays, left.numpy(), packed.numpy(), how):
                raise not_finite_error(values + residual)
            return packed
        corrected = torch.add(values, residual, out=scratch("corrected", values.numel(), values.device))
        self._encode_leaves(corrected, packed)
        torch.sub(corrected, self.decode(packed, values.numel(), left), out=left)
        return packed

    def _encode_leaves(self, values: Tensor, packed: Tensor) -> None:
        for span, scales, codes in self._leaves(packed, values.numel()):
            if not self._encode_tiles(values[span], scales, codes):
                raise not_finite_error(values)

    def _encode_tiles(self, values: Tensor, scales: Tensor, codes: Tensor) -> bool:
        """Encode a leaf; False when a value is not finite."""
        for start, stop, rows in self._tiles(values):
            first = start // self.block
            row_scales = scales[first : first + len(rows)].unsqueeze(1)
            absmax = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
            largest = absmax.view(torch.int32).bitwise_and_(_ABSOLUTE)
            low, high = (int(one) for one in torch.aminmax(largest))
            if high > _LARGEST_FINITE_BITS:
                return False
            # Divided by a tensor: CUDA multiplies by the inverse of a plain number, which rounds twice.
            codes_a_scale = torch.full_like(absmax, self._largest)
            torch.div(absmax, codes_a_scale, out=row_scales)
            inverse = codes_a_scale.div_(absmax)
            if high >= self._largest_scale_absmax_bits:
                row_scales.clamp_(max=self._largest_scale)
            if low < self._smallest_bits:
                empty = largest < self._smallest_bits
                row_scales.masked_fill_(empty, 0.0)
                inverse.masked_fill_(empty, 0.0)
            scaled = torch.mul(rows, inverse, out=scratch("scaled", stop - start, rows.device).view_as(rows))
            if self.seed is not None:
                scaled += _dither(largest, self.seed, first, rows.shape[1])
                scaled.clamp_(-self._largest, self._largest)
            self._write_codes(scaled.round_().view(-1), self._codes(codes, start, stop))
        return True

    def _write_codes(self, rounded: Tensor, codes: Tensor) -> None:
        if self.bits == 8:
            codes.view(torch.int8).copy_(rounded)
            return
        shifted = rounded.add_(8.0).to(torch.uint8)
        if shifted.numel() % 2:
            shifted = torch.cat([shifted, shifted.new_full((1,), 8)])
        codes.copy_(shifted[1::2]).bitwise_left_shift_(4).bitwise_or_(shifted[0::2])

    # Decoding -----------------------------------------------------------------------------------------------

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``. Raises CodecError for a wrong length or a bad scale."""
        tensor = packed_tensor(packed, self.packed_bytes(n))
        out = torch.empty(n, dtype=torch.float32, device=tensor.device) if out is None else out
        values = checked_out(out, n, tensor.device)
        kernels = self.compiled(values.device)
        if kernels is not None:
            self._check(tensor, n, kernels)
            kernels.decode(tensor.numpy(), values.numpy(), self._how(n))
            return out
        for span, scales, codes in self._leaves(tensor, n):
            self._check_scales(scales, codes)
            for start, stop, rows in self._tiles(values[span]):
                self._read_codes(self._codes(codes, start, stop), rows.view(-1))
                first = start // self.block
                rows.mul_(scales[first : first + len(rows)].unsqueeze(1))
        return out

    def decode_all(self, packed: Sequence[Packed], outs: Sequence[Tensor]) -> list[int]:
        """Decode many vectors into ``outs``, ``(n,) float32`` each on the CPU, in one call of the kernels.

        Returns the indices that are left for ``decode``: vectors with invalid or unusual scales, and all of them where
        no kernels are compiled."""
        kernels = self.compiled(_CPU)
        if kernels is None or not outs:
            return list(range(len(outs)))
        tensors = [packed_tensor(one, self.packed_bytes(out.numel())) for one, out in zip(packed, outs, strict=True)]
        sources = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        rooms = np.array([checked_out(out, out.numel(), _CPU).data_ptr() for out in outs], np.int64)
        sizes, is_left = np.array([out.numel() for out in outs], np.int64), np.zeros(len(outs), np.bool_)
        kernels.decode_all(sources, rooms, sizes, is_left, self._safe_bits, self._how(int(sizes.max())))
        return [int(index) for index in is_left.nonzero()[0]]

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``. Fused: the decoded values never get to memory."""
        n, weight = total.numel(), rounded_weight(weight)
        tensor = packed_tensor(packed, self.packed_bytes(n))
        total = checked_out(total, n, tensor.device)
        kernels = self.compiled(total.device)
        if kernels is not None:
            self._check(tensor, n, kernels)
            kernels.accumulate(tensor.numpy(), total.numpy(), weight, self._how(n))
            return
        self._check(tensor, n)
        for span, scales, codes in self._leaves(tensor, n):
            for start, stop, rows in self._tiles(total[span]):
                tile = scratch("decoded", stop - start, total.device)
                self._read_codes(self._codes(codes, start, stop), tile)
                first = start // self.block
                tile.view_as(rows).mul_(scales[first : first + len(rows)].unsqueeze(1)).mul_(weight)
                rows.add_(tile.view_as(rows))

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``. By kernels the codes' squares are summed exactly, as they are packed."""
        tensor = packed_tensor(packed, self.packed_bytes(n))
        kernels = self.compiled(tensor.device)
        if kernels is not None:
            return float(kernels.squared_norm(tensor.numpy(), n, self._how(n)))
        return sum(
            self._squared_norm(scales, codes, span.stop - span.start) for span, scales, codes in self._leaves(tensor, n)
        )

    def _squared_norm(self, scales: Tensor, codes: Tensor, n: int) -> float:
        total = 0.0
        for start in range(0, n, step := self.block * max(1, _TILE // self.block)):
            stop, first = min(start + step, n), start // self.block
            blocks = self.format.blocks(stop - start)
            rows = scratch("decoded", blocks * self.block, codes.device).zero_()
            self._read_codes(self._codes(codes, start, stop), rows[: stop - start])
            squares = rows.view(blocks, self.block).square_().sum(1, dtype=torch.float64)
            total += float(torch.dot(squares, scales[first : first + blocks].double().square_()))
        return total

    def decodes_like(self, other: Blockwise) -> bool:
        """Whether the same bytes decode to the same values."""
        return (self.bits, self.block, self.format.leaf) == (other.bits, other.block, other.format.leaf)

    def checked(self, packed: Packed, n: int) -> Tensor:
        """See ``Codec.checked``. Only the scales are read, unless they are unusual."""
        tensor = packed_tensor(packed, self.packed_bytes(n))
        self._check(tensor, n, self.compiled(tensor.device))
        return tensor

    def encode_mean(self, summands: Sequence[Summand], divisor: float, left: Tensor, packed: Tensor) -> float | None:
        """Encode a mean, the sum of ``summands`` over ``divisor``, into ``packed``; its loss goes into ``left``.

        Fused: every value is read once, and only the codes and the loss are written. All summands are on the CPU.

        Returns a bound on the absolute values of the loss; None, with nothing done, where no kernels are compiled.
        Raises CodecError when the mean is not finite: ``left`` and ``packed`` are undefined then."""
        kernels = self.compiled(left.device)
        if kernels is None:
            return None
        left, packed = checked_out(left, left.numel(), left.device), self._room(left, packed)
        addresses = np.array([one.packed.data_ptr() for one in summands], np.int64)
        weights = np.array([one.weight for one in summands], np.float32)
        how = self._how(left.numel())
        largest = kernels.encode_mean(addresses, weights, divisor, left.numpy(), packed.numpy(), how)
        if largest < 0:
            raise CodecError("the mean holds NaN or infinity")
        return float(max(largest, self._smallest))

    def _read_codes(self, codes: Tensor, values: Tensor) -> None:
        if self.bits == 8:
            values.copy_(codes.view(torch.int8))
            return
        values[0::2].copy_(codes.bitwise_and(15))
        values[1::2].copy_(codes[: values.numel() // 2].bitwise_right_shift(4))
        values.sub_(8.0)

    def _check(self, packed: Tensor, n: int, kernels: ModuleType | None = None) -> None:
        """Check all scales; ``_check_scales`` costs as much as decoding and is seldom needed with kernels."""
        if kernels is None or not kernels.are_plain(packed.numpy(), n, self._safe_bits, self._how(n)):
            for _, scales, codes in self._leaves(packed, n):
                self._check_scales(scales, codes)

    def _check_scales(self, scales: Tensor, codes: Tensor) -> None:
        """Raise CodecError unless each scale is 0 or normal and positive, and no value decodes to infinity.

        The bits are compared, as integers: this holds also where the processor flushes subnormals.
        """
        if scales.numel() == 0:
            return
        bits = scales.view(torch.int32)
        low, high = (int(one) for one in torch.aminmax(bits))
        if low < 0 or high > _LARGEST_FINITE_BITS:
            raise CodecError("a scale is negative, NaN or infinite")
        if low < _SMALLEST_NORMAL_BITS and bool(((bits > 0) & (bits < _SMALLEST_NORMAL_BITS)).any()):
            raise CodecError("a scale is subnormal")
        if high > self._safe_bits and float(scales.max()) > self._largest_scale:
            raise CodecError("a scale is so large that values would be infinite")
        if high > self._safe_bits and self._has_lowest(codes):
            raise CodecError("a code is too low for its scale")

    def _has_lowest(self, codes: Tensor) -> bool:
        if self.bits == 8:
            return bool((codes.view(torch.int8) == -128).any())
        return bool((codes.bitwise_and(15) == 0).any() or (codes < 16).any())

    # Shapes -------------------------------------------------------------------------------------------------

    def _how(self, n: int) -> _How:
        """Leaf, block, bits and seed (-1 for none), the form in which kernels take them for up to ``n`` values."""
        return max(1, min(self.format.leaf, n)), self.block, self.bits, -1 if self.seed is None else self.seed

    def _room(self, values: Tensor, packed: Tensor | None = None) -> Tensor:
        return packed_buffer(self.packed_bytes(values.numel()), values.device, packed)

    def _codes(self, codes: Tensor, start: int, stop: int) -> Tensor:
        """The codes of values [start, stop) of a leaf."""
        return codes[self.format.code_bytes(start) : self.format.code_bytes(stop)]

    def _leaves(self, packed: Tensor, n: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each leaf's range of values, its scales ``(blocks,) float32`` and its codes ``(code bytes,) uint8``,
        views of ``packed``."""
        for span, room in self.format.leaves(n):
            codes = room.start + self.format.scale_bytes(span.stop - span.start)
            yield span, packed[room.start : codes].view(torch.float32), packed[codes : room.stop]

    def _tile_values(self, values: Tensor) -> int:
        whole = self.block * max(1, _TILE // self.block) if values.device.type == "cpu" else values.numel()
        return min(whole, values.numel())

    def _tiles(self, values: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(start, stop, values[start:stop])`` tile by tile, the values as ``(blocks, block)`` views."""
        full = values.numel() // self.block * self.block
        step = max(self.block, self._tile_values(values) // self.block * self.block)
        for start in range(0, full, step):
            stop = min(start + step, full)
            yield start, stop, values[start:stop].view(-1, self.block)
        if full < values.numel():
            yield full, values.numel(), values[full:].view(1, -1)


def linear_growth(largest: int, block: int, error: float) -> float:
    """``Codec.growth`` of codes up to ``largest``, a block's largest value exact, the others wrong by up to ``error``.

    The largest of ``(largest**2 + m * (a + error)**2) / (largest**2 + m * a**2)`` for ``m = block - 1`` other values
    that are all ``a`` codes large: where its derivative is zero it is ``1 + error / a``."""
    if block < 2:
        return 1.0
    a = (math.sqrt(error**2 + 4 * largest**2 / (block - 1)) - error) / 2
    return math.sqrt(1.0 + error / a)


def _bits_of(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _dither(largest: Tensor, seed: int, first_block: int, width: int) -> Tensor:
    """Deterministic dither for stochastic rounding; identical on every device.

    Uniform in [-1/2, 1/2), ``(rows, width) float32``, multiples of 2**-24, drawn from a hash of ``seed``, ``largest``
    (the bits of each block's maximum) and the position."""
    blocks = torch.arange(first_block, first_block + len(largest), device=largest.device).unsqueeze(1)
    keys = _mix(_mix(largest.to(torch.int64) ^ seed) ^ (blocks & 0xFFFFFFFF))
    drawn = _mix((keys + torch.arange(width, device=largest.device)) & 0xFFFFFFFF)
    return (drawn >> 8).to(torch.float32).mul_(2.0**-24).sub_(0.5)


def _mix(x: Tensor) -> Tensor:
    """Hash of 32 bits, held in int64, to 32 well-mixed bits; multiplied in halves, as int64 must not overflow."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        x = ((x & 0xFFFF) * factor + (((x >> 16) * (factor & 0xFFFF)) << 16)) & 0xFFFFFFFF
    return x ^ (x >> 16)
