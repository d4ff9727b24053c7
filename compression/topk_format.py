"""Packed format of one chunk of top-k: the offsets of its fields, and constants of all paths."""

from __future__ import annotations

from dataclasses import dataclass

TOO_LARGE_BITS = 0x7F800000
"""Infinity's float32 bits; the magnitude bits of whatever is not finite are at least these."""

LARGEST_SCALE_BITS = 0x7C010203
"""The largest float32 scale whose product with 127 is finite, as bits."""

MAX_BFLOAT16_BITS = 0x7F7F
"""The largest finite bfloat16."""

SPLIT_STEPS = 4
"""Steps of Lloyd's iteration that place the two magnitudes of 2-bit values."""

REASONS = (
    "",
    "the indices of a chunk do not increase within it",
    "a scale is negative, NaN, infinite, too large or subnormal",
    "a code or padding holds what no encoder writes",
)
"""Messages for a kernel's verdict on packed bytes; index 0 means that nothing is wrong."""


Shape = tuple[int, int, int, int, int, int, int, int]
"""The format as the compiled kernels take it; see ``ChunkFormat.shape``."""


@dataclass(frozen=True)
class ChunkFormat:
    """A chunk of ``size`` values of which ``keep`` are sent, each in ``value_bits``, 2 or 8."""

    size: int
    keep: int
    value_bits: int

    @property
    def low_bits(self) -> int:
        """Elias-Fano's width of the low part of an index: floor(log2(size / keep))."""
        return (self.size // self.keep).bit_length() - 1

    @property
    def upper_bits(self) -> int:
        """Bits of the upper part: a one for each index, a zero for each step of the upper parts' value."""
        return self.keep + ((self.size - 1) >> self.low_bits)

    @property
    def low_at(self) -> int:
        """Offset of the low parts in bytes: after the scales and the upper bits."""
        return 4 + -(-self.upper_bits // 8)

    @property
    def code_at(self) -> int:
        """Offset of the codes in bytes."""
        return self.low_at + -(-self.keep * self.low_bits // 8)

    @property
    def packed_bytes(self) -> int:
        """The size of the packed chunk."""
        return self.code_at + -(-self.keep * self.value_bits // 8)

    @property
    def shape(self) -> Shape:
        """``(size, keep, low_bits, upper_bits, value_bits, low_at, code_at, packed_bytes)``."""
        widths = (self.size, self.keep, self.low_bits, self.upper_bits, self.value_bits)
        return (*widths, self.low_at, self.code_at, self.packed_bytes)
