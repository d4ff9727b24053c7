"""Float codecs: each value cast to a smaller float, with a power of two a block where the range is small.

Wire layouts, version 1, everything little-endian::

    float32, bfloat16     offset 0            n x float32 or bfloat16   the values

    float16, float8_e4m3  offset 0            blocks x int16            the exponents e, one a block of 4096 values
                          offset 2 * blocks   n x float16 or uint8      the codes; value = code * 2**e

``blocks = ceil(n / block)``; the last one may be short. float8 is OCP e4m3fn (Micikevicius et al. 2022, "FP8 Formats
for Deep Learning", arXiv:2209.05433): no infinities, and NaN is 0x7f and 0xff.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.compression.codec import checked_range
from shoal.compression.formats import BlockFormat, CodecError
from shoal.compression.tiled import TiledCodec

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
# float8 e4m3 bits shifted into a float16 are the float8's value times 2**-8, exactly.
_FLOAT8_SHIFT = 7
_FLOAT8_TO_FLOAT16 = -8
_FLOAT16_WITHOUT_TOP_EXPONENT_BIT = 0xBFFF - (1 << 16)
_FLOAT8_NAN = 0x7F


class FloatCodec(TiledCodec):
    """Codec that stores each value as float32 or bfloat16, rounded to nearest, ties to even; float32 is exact.

    For normal values bfloat16 errs by at most ``|x| * 2**-8``. What is beyond its largest value saturates.
    """

    def __init__(self, form: BlockFormat) -> None:
        super().__init__(form)
        self._dtype = _DTYPES[form.kind]
        self._largest = torch.finfo(self._dtype).max

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: no value grows by more than half a unit in its last place."""
        return 1.0 if self._dtype == torch.float32 else 1.0 + torch.finfo(self._dtype).eps / 2

    def _measure(self, rows: Tensor, n: int, scales: Tensor) -> Tensor:
        return torch.stack(torch.aminmax(rows))

    def _pack(self, rows: Tensor, scales: Tensor, codes: Tensor) -> None:
        # Clamping costs a pass in the cache, knowing whether it is needed would cost one as well.
        rows = rows if self._dtype == torch.float32 else rows.clamp(-self._largest, self._largest)
        codes.view(self._dtype).copy_(rows.view(-1))

    def _unpack(self, codes: Tensor, scales: Tensor, rows: Tensor) -> None:
        rows.view(-1).copy_(codes.view(self._dtype))

    def _check(self, scales: Tensor, codes: Tensor) -> None:
        checked_range(codes.view(self._dtype))


class ScaledFloatCodec(TiledCodec):
    """Codec to float16 or float8_e4m3 with one power of two a block, so that none overflows and few underflow.

    The exponent is the smallest with ``max|x| <= largest * 2**e`` (largest: 65504 or 448), so scaling is exact and
    ``|x - decoded| <= max(|x| * 2**-p, max|x| * s)`` with p, s = 11, 2**-24 / 65504 (float16) or 4, 2**-9 / 448
    (float8_e4m3). Rounds to nearest, ties to even. Exponents stay within the range where every code but 0 decodes
    to a normal float32, and where none decodes to infinity: machines that flush subnormals agree with those that do
    not, a block below ``2**-102`` (float16) or ``2**-117`` (float8_e4m3) loses bits, and what is beyond ``largest *
    2**112`` (float16: 3.401e38) or ``largest * 2**119`` (float8_e4m3: 2.977e38) saturates.
    """

    def __init__(self, form: BlockFormat) -> None:
        super().__init__(form, torch.int16, 1)
        self._dtype = _DTYPES[form.kind]
        info = torch.finfo(self._dtype)
        self._largest = info.max
        self._largest_mantissa, self._largest_exponent = math.frexp(self._largest)
        self._exponents = -126 - round(math.log2(info.tiny * info.eps)), 128 - self._largest_exponent

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: half a unit in each value's last place, and for values that are small in their block
        half the smallest code, which is known as a share of the block's largest value."""
        info = torch.finfo(self._dtype)
        smallest_share = info.smallest_normal * info.eps / info.max  # the largest value has a code of max / 2 at least
        return 1.0 + info.eps / 2 + math.sqrt(self.format.block) * smallest_share

    def _measure(self, rows: Tensor, n: int, scales: Tensor) -> Tensor:
        largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
        mantissas, exponents = torch.frexp(largest)
        exponents = exponents - self._largest_exponent + (mantissas > self._largest_mantissa)
        lowest, highest = self._exponents
        scales.copy_(exponents.clamp_(lowest, highest).masked_fill_(largest == 0.0, lowest))
        return largest

    def _pack(self, rows: Tensor, scales: Tensor, codes: Tensor) -> None:
        scaled = rows * _power_of_two(scales, sign=-1)
        if int(scales.amax()) == self._exponents[1]:
            scaled.clamp_(-self._largest, self._largest)
        codes.view(self._dtype).copy_(scaled.view(-1))

    def _unpack(self, codes: Tensor, scales: Tensor, rows: Tensor) -> None:
        if self._dtype == torch.float16:
            rows.view(-1).copy_(codes.view(torch.float16))
            rows.mul_(_power_of_two(scales))
            return
        # Through float16, which is exact; torch's own cast from float8 takes five times as long as all of this.
        halves = codes.view(torch.int8).to(torch.int16)
        halves.bitwise_left_shift_(_FLOAT8_SHIFT).bitwise_and_(_FLOAT16_WITHOUT_TOP_EXPONENT_BIT)
        rows.view(-1).copy_(halves.view(torch.float16))
        rows.mul_(_power_of_two(scales, plus=-_FLOAT8_TO_FLOAT16))

    def _check(self, scales: Tensor, codes: Tensor) -> None:
        lowest, highest = self._exponents
        low, high = torch.aminmax(scales)
        if int(low) < lowest or int(high) > highest:
            raise CodecError(f"an exponent of {self.format.kind} is outside {lowest} .. {highest}")
        if self._dtype == torch.float16:
            checked_range(codes.view(torch.float16))
        elif int((codes & _FLOAT8_NAN).amax()) == _FLOAT8_NAN:
            raise CodecError("the values hold NaN")


def _power_of_two(exponents: Tensor, *, sign: int = 1, plus: int = 0) -> Tensor:
    """``2**(sign * exponents + plus)``, float32, made of its bits: exact on every device. Normal numbers only."""
    return (exponents.to(torch.int32) * sign + (plus + 127)).bitwise_left_shift_(23).view(torch.float32)
