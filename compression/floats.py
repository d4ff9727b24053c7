"""The float codecs: each value cast on its own and stored little-endian; float32 is exact.

Values beyond the range of the smaller type saturate at its largest finite value instead of becoming infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compression.codec import Packed, checked_range, checked_values, packed_tensor


class FloatCodec:
    """Stores each value as one little-endian float of type ``dtype``, rounded to nearest, ties to even.

    For normal values the round trip errs by at most ``|x| * 2**-(p)``, with p = 24 (float32: exact),
    11 (float16, normal from 2**-14 to 65504) or 8 (bfloat16) significant bits.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._name = name
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max

    @property
    def name(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``."""
        return self._name

    def packed_bytes(self, n: int) -> int:
        """``n`` times the size of one float."""
        return n * self._dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """``(n,) float32`` to ``(packed_bytes(n),) uint8``. CodecError for NaN or infinity."""
        values = checked_values(values)
        smallest, largest = checked_range(values)
        if max(-smallest, largest) > self._largest:
            values = values.clamp(-self._largest, self._largest)
        return values.to(self._dtype, copy=True).view(torch.uint8)

    def decode(self, packed: Packed, n: int) -> Tensor:
        """Packed bytes to a new ``(n,) float32``. CodecError for a wrong length, NaN or infinity."""
        stored = packed_tensor(packed, self.packed_bytes(n)).view(self._dtype)
        values = stored.to(torch.float32, copy=True)
        checked_range(values)
        return values
