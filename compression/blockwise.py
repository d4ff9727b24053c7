"""Block-wise quantization to int8, each block of values with a scale of its own.

After Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), but linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compression.codec import CodecError, Packed, checked_range, checked_values, packed_tensor

_LARGEST_CODE = 127
_FLOAT_MAX = torch.finfo(torch.float32).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The largest float32 whose product with 127 is still finite; one bit more would decode to infinity.
_LARGEST_SCALE = float(torch.nextafter(torch.tensor(_FLOAT_MAX / _LARGEST_CODE), torch.tensor(0.0)))
# Up to here no code, -128 included, can decode to infinity.
_SAFE_SCALE = _FLOAT_MAX / 128
_SMALLEST_SCALE_BITS = 0x00800000
_LARGEST_FINITE_BITS = 0x7F7FFFFF


class Int8Blockwise:
    """Symmetric int8 with one float32 scale a block: ``scale = max|x| / 127``, ``code = round(x / scale)``.

    Rounds to nearest, ties to even; ``|x - decoded| <= scale / 2``, but for the rounding of float32 itself.
    The last block may be short. A block whose scale would be subnormal (``max|x| < 127 * 2**-126``) gets
    scale 0 and decodes to zeros, so machines that flush subnormals agree with those that do not.

    Packed layout, ``blocks = ceil(n / block)``, everything little-endian::

        offset 0            blocks x float32   the scales: 0, or normal and positive
        offset 4 * blocks   n x int8           the codes, -127 .. 127
    """

    def __init__(self, block: int = 256) -> None:
        if block < 1:
            raise ValueError(f"block is the number of values that share a scale, at least 1, not {block}")
        self.block = block

    @property
    def name(self) -> str:
        """``int8`` with the block that runs use, 256; other blocks, which the registry lacks, show theirs."""
        return "int8" if self.block == 256 else f"int8/{self.block}"

    def packed_bytes(self, n: int) -> int:
        """One byte a value and four a block."""
        return 4 * self._blocks(n) + n

    def encode(self, values: Tensor) -> Tensor:
        """``(n,) float32`` to ``(packed_bytes(n),) uint8``. CodecError for NaN or infinity."""
        values = checked_values(values)
        n = values.numel()
        packed = torch.empty(self.packed_bytes(n), dtype=torch.uint8)
        scales, codes = self._split(packed, n)
        for rows, row_scales, row_codes in zip(
            self._rows(values), self._rows_of_scales(scales, n), self._rows(codes), strict=True
        ):
            _encode_rows(rows, row_scales, row_codes)
        return packed

    def decode(self, packed: Packed, n: int) -> Tensor:
        """Packed bytes to a new ``(n,) float32``. CodecError for a wrong length or a bad scale."""
        scales, codes = self._split(packed_tensor(packed, self.packed_bytes(n)), n)
        largest_scale = _check_scales(scales)
        values = codes.to(torch.float32)
        for rows, row_scales in zip(self._rows(values), self._rows_of_scales(scales, n), strict=True):
            rows.mul_(row_scales)
        if largest_scale > _SAFE_SCALE:
            checked_range(values)
        return values

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)

    def _split(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of ``packed``: the scales ``(blocks,) float32`` and the codes ``(n,) int8``."""
        scales_bytes = 4 * self._blocks(n)
        return packed[:scales_bytes].view(torch.float32), packed[scales_bytes:].view(torch.int8)

    def _rows(self, values: Tensor) -> list[Tensor]:
        """``(n,)`` as views ``(full blocks, block)`` and, if the last block is short, ``(1, rest)``."""
        full = values.numel() // self.block * self.block
        parts = [values[:full].view(-1, self.block), values[full:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def _rows_of_scales(self, scales: Tensor, n: int) -> list[Tensor]:
        """``(blocks,)`` as views ``(rows, 1)``, one for each of ``_rows``."""
        full = n // self.block
        return [part.unsqueeze(1) for part in (scales[:full], scales[full:]) if part.numel()]


def _encode_rows(rows: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Quantize ``rows``, ``(r, c) float32``, into ``scales``, ``(r, 1)``, and ``codes``, ``(r, c) int8``."""
    # amax and amin hand on NaN, so the block maxima tell of every value that is not finite.
    largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
    checked_range(largest)
    largest.div_(_LARGEST_CODE).clamp_(max=_LARGEST_SCALE)
    largest.masked_fill_(largest < _SMALLEST_SCALE, 0.0)
    scales.copy_(largest)
    # A scale of 0 stands for values below 127 * 2**-126: divided by 1 they round to the code 0.
    largest.masked_fill_(largest == 0.0, 1.0)
    codes.copy_(torch.div(rows, largest).round_())


def _check_scales(scales: Tensor) -> float:
    """The largest of ``scales``, ``(blocks,) float32``. CodecError unless each is 0 or normal and positive.

    The bits are compared, as integers: this holds also where the processor flushes subnormals.
    """
    if scales.numel() == 0:
        return 0.0
    bits = scales.view(torch.int32)
    low, high = torch.aminmax(bits)
    if int(low) < 0 or int(high) > _LARGEST_FINITE_BITS:
        raise CodecError("a scale is negative, NaN or infinite")
    if bool(((bits > 0) & (bits < _SMALLEST_SCALE_BITS)).any()):
        raise CodecError("a scale is subnormal")
    return float(scales.max())
