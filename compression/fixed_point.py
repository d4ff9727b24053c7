"""Fixed-point codes with scales that all members share, whose sums are exact: for secure averaging.

Members send their codes under masks that are uniform modulo 2**k and cancel in the sum (``swarm/secure``), so such a
sum may not lose a bit: it is made of small integers, all in the same unit. The unit of a block of values is a power of
two that follows from the committed means, which all have: nobody says what it is to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from shoal.compression.kernels import loader

Codes = NDArray[np.int8]
"""``(n,)`` int8: integers from ``-largest`` to ``largest``, those of 4 bits too."""

Exponents = NDArray[np.int8]
"""``(blocks,)`` int8: a code of a block is worth ``2**exponent``."""

_LARGE, _SMALL = 28, 8
"""Where values of a committed mean are large or small, in 64ths of the range of its codes, for the mean of one member.
With more it is less by their number's fourth root: halfway between members that agree and such that do not."""

KERNELS = "fixed_point", "lanes"
"""Names of the compiled kernels that secure averaging uses, beside those of the codec of means."""

_SPREAD = 12
_LOWEST, _HIGHEST = -100, 60
"""A unit is at most 2**_SPREAD below the one in the middle, so that a block of zeros comes back within a few rounds."""


def largest_code(bits: int) -> int:
    """Return the largest code of so many bits."""
    return (1 << bits - 1) - 1


@dataclass(frozen=True)
class FixedPointFormat:
    """Format of one member's codes before they are masked: a byte each."""

    bits: int

    @property
    def name(self) -> str:
        """See ``CodecFormat.name``."""
        return f"fixed_point(bits={self.bits})"

    def packed_bytes(self, n: int) -> int:
        """See ``CodecFormat.packed_bytes``."""
        return n


class FixedPoint(Codec):
    """Codec of a range of values that begins with a block. ``code = round(value * factor / 2**exponent)``, cut off at
    the largest code.

    Unlike other codecs it has no scales in its bytes: ``exponents`` are those of its blocks, ``block`` values each.
    ``factor``: a member's weight over that of the heaviest member of its sum, as weights are multiplied in before
    masks are added. ``least``: blocks whose largest code is below it are encoded as zeros."""

    kernels = "fixed_point"

    def __init__(self, bits: int, block: int, exponents: Exponents, factor: float, least: int = 1) -> None:
        super().__init__(FixedPointFormat(bits))
        assert 0.0 < factor <= 1.0
        self._least = least
        self.largest = largest_code(bits)
        self._block = block
        units = np.ldexp(np.float64(1.0), exponents.astype(np.int64)) / factor
        self._units = torch.from_numpy(units.astype(np.float32))
        self._rates = torch.from_numpy((1.0 / units).astype(np.float32))

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: a value of half a unit becomes one of a whole unit."""
        return 2.0

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        values = checked_values(values)
        kernels = self.compiled(values.device)
        if kernels is not None:
            codes = self._room(values)
            if not kernels.encode(values.numpy(), self._by_block(values, self._rates), *self._how, codes.numpy()):
                raise not_finite_error(values)
            return codes.view(torch.uint8)
        scaled = self._times(values, self._rates)
        if not math.isfinite(float(scaled.sum())) and not torch.isfinite(values).all():
            raise not_finite_error(values)
        scaled.round_().clamp_(-self.largest, self.largest)
        self._drop_faint(scaled)
        return scaled.to(torch.int8).view(torch.uint8)

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """See ``Codec.encode_residual``. By kernels fused: both are read and what is left is written in one go."""
        kernels = self.compiled(values.device)
        if kernels is None:
            return super().encode_residual(values, residual, left, packed)
        values, residual = checked_values(values), checked_out(residual, values.numel(), values.device)
        left = residual if left is None else checked_out(left, values.numel(), values.device)
        codes, arrays = self._room(values, packed), (values.numpy(), residual.numpy())
        # What is overwritten is to be as before when a sum anywhere is not finite.
        is_bad = left is residual and not kernels.are_sums_finite(*arrays)
        units, rates = self._by_block(values, self._units), self._by_block(values, self._rates)
        if is_bad or not kernels.encode_residual(*arrays, left.numpy(), units, rates, *self._how, codes.numpy()):
            raise not_finite_error(values + residual)
        return codes.view(torch.uint8)

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        codes = packed_tensor(packed, n).view(torch.int8)
        kernels = self.compiled(codes.device)
        if kernels is not None:
            decoded = torch.empty(n) if out is None else checked_out(out, n, codes.device)
            kernels.decode(codes.numpy(), self._by_block(decoded, self._units), self._block, decoded.numpy())
            return decoded
        decoded = self._times(codes.to(torch.float32), self._units)
        return decoded if out is None else checked_out(out, n, decoded.device).copy_(decoded)

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``."""
        kernels = self.compiled(total.device)
        if kernels is None:
            super().accumulate(packed, total, weight)
            return
        total, codes = checked_values(total), packed_tensor(packed, total.numel()).view(torch.int8)
        units = self._by_block(total, self._units)
        kernels.accumulate(codes.numpy(), units, self._block, total.numpy(), rounded_weight(weight))

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``."""
        return float(self.decode(packed, n).double().square().sum())

    def _drop_faint(self, codes: Tensor) -> None:
        """Set blocks without a code of ``least`` or more to zeros, in place: others that bring as much with less weight
        would be rounded to nothing, and hide nothing. Error feedback brings such values when they have become more."""
        whole = codes.numel() // self._block * self._block
        for part in (codes[:whole].view(-1, self._block), codes[whole:].view(1, -1)):
            if part.numel():
                part.mul_(part.abs().amax(1, keepdim=True) >= self._least)

    def _times(self, values: Tensor, by_block: Tensor) -> Tensor:
        """Return a new vector of the values, each times the factor of its block."""
        assert by_block.numel() == -(-values.numel() // self._block), "an exponent for each block"
        whole = values.numel() // self._block * self._block
        product = torch.empty_like(values)
        blocks = values[:whole].view(-1, self._block)
        torch.mul(blocks, by_block[: blocks.shape[0], None], out=product[:whole].view(-1, self._block))
        if whole < values.numel():
            torch.mul(values[whole:], by_block[-1], out=product[whole:])
        return product

    @property
    def _how(self) -> tuple[int, tuple[np.float32, np.int32]]:
        """Values of a block, and the limits of codes, as kernels take them."""
        return self._block, (np.float32(self.largest), np.int32(self._least))

    def _by_block(self, values: Tensor, factors: Tensor) -> NDArray[np.float32]:
        """Return the factors of blocks, one for each block of these values."""
        assert factors.numel() == -(-values.numel() // self._block), "an exponent for each block"
        of_blocks: NDArray[np.float32] = factors.numpy()
        return of_blocks

    def _room(self, values: Tensor, packed: Tensor | None = None) -> Tensor:
        return packed_buffer(values.numel(), values.device, packed).view(torch.int8)


def packed_codes(packed: Tensor) -> Codes:
    """Return the codes that ``FixedPoint`` has packed."""
    codes: Codes = packed_buffer(packed.numel(), packed.device, packed).view(torch.int8).numpy()
    return codes


def moves_of(mean: Tensor, block: int, exponents: Exponents, bits: int, members: int) -> NDArray[np.int8]:
    """Return by how many powers of two the units of a committed mean's blocks are to move: -1, 0 or 1.

    ``mean``: ``(n,)`` float32, as decoded from committed bytes, of so many members. Up where a quarter of the values
    that are not small are large, as codes are cut off then; down where hardly any but zeros are not small. Shares of
    values, and not their size, so that one large value decides nothing. Comparisons and counts alone: the same bits on
    every machine."""
    share = math.isqrt(math.isqrt(2**20 // members))  # 32 over the fourth root
    units = np.ldexp(np.float64(largest_code(bits) * share), exponents.astype(np.int64) - 11).astype(np.float32)
    limits = units * np.float32(_LARGE), units * np.float32(_SMALL), np.zeros_like(units)
    counts, kernels = np.zeros((3, units.size), dtype=np.int64), loader.kernels("fixed_point")
    if kernels is not None:
        kernels.count_sizes(mean.numpy(), block, np.stack(limits), counts)
    else:
        for blocks, rows in _blocks(mean.abs().numpy(), block):
            for count, limit in zip(counts, limits, strict=True):
                count[blocks] = np.count_nonzero(rows > limit[blocks, None], axis=1)
    large, rest, some = counts
    grow, shrink = 4 * large > rest, (16 * rest < some) | (some == 0)
    return np.where(grow, 1, np.where(shrink, -1, 0)).astype(np.int8)


def next_exponents(exponents: Exponents, moves: NDArray[np.int8]) -> Exponents:
    """Return the exponents after a committed round, whose mean moves them so."""
    moved = exponents.astype(np.int64) + moves
    floor = max(_LOWEST, int(np.sort(moved)[moved.size // 2]) - _SPREAD)
    following: Exponents = np.clip(moved, floor, _HIGHEST).astype(np.int8)
    return following


def mean_of(sums: NDArray[np.float64], block: int, exponents: Exponents, factor: float) -> Tensor:
    """Return sums of codes times weights, ``(n,)``, in values, times ``factor``: a new ``(n,) float32``.

    One float64 multiplication and its rounding to float32 a value, so the bits are the same everywhere."""
    units = np.ldexp(np.float64(factor), exponents.astype(np.int64))
    values = np.empty(sums.size, dtype=np.float32)
    for (blocks, rows), (_, out) in zip(_blocks(sums, block), _blocks(values, block), strict=True):
        np.multiply(rows, units[blocks, None], out=out, casting="same_kind")
    return torch.from_numpy(values)


def _blocks(values: NDArray[Any], block: int) -> list[tuple[slice, NDArray[Any]]]:
    """Return views of ``(n,)`` values with a row a block, and which blocks: all whole ones, then the shorter last."""
    whole = values.size // block
    views = [(slice(0, whole), values[: whole * block].reshape(whole, block))]
    if whole * block < values.size:
        views.append((slice(whole, whole + 1), values[None, whole * block :]))
    return views
