"""Fixed-point codes modulo 2^16 or 2^32, whose sums are exact and whose masks cancel: for secure averaging.

After Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning": peers send their
codes under masks that are uniform modulo 2^k and add up to zero. Such a sum may not lose a bit, so it is made of
integers.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.compression.codec import Packed, checked_values, packed_tensor
from shoal.compression.formats import CodecError

Codes: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""``(n,)`` uint16 or uint32: integers modulo 2^bits, little-endian in memory as on the wire."""

_TYPES: dict[int, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]]]] = {
    16: (np.uint16, np.int16),
    32: (np.uint32, np.int32),
}
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_FLOAT_MAX = torch.finfo(torch.float32).max
_LARGEST_LIMIT = 2.0**126  # Rounding may at most double a mean, which then still fits into float32.
_SMALLEST_DIVISOR = 1e-300
_TILE = 2**15  # even: one 64-bit draw rounds two values. The float64 temporaries of a tile stay in the cache.


class FixedPoint:
    """Fixed-point scale that all peers of one sum share, chosen so that the sum of their codes cannot wrap.

    A peer encodes ``x * weight`` as ``code = round(x * weight * scale)`` modulo 2^bits, with ::

        scale = (2**(bits - 1) - 1 - peers) / (limit * total_weight)

    With ``|x| <= limit`` and the weights of all peers adding up to no more than ``total_weight``, the exact sum of
    ``x * weight * scale`` stays within ``2**(bits - 1) - 1 - peers``, and rounding adds less than 1 a peer. So the
    sum, read as a signed integer, is right whoever of the peers is in it and however often intermediate sums wrap.
    All peers are to be given equal arguments. The packed form of n codes is the codes, little-endian.

    ``limit``: the largest magnitude that a value may have, rounded up to a float32; within 2^-126 and 2^126. A larger
    value is refused and not clamped, because that would bias the mean silently; a caller who wants it clamps, and
    carries the rest over.
    ``peers``: how many at most are summed, less than 2^(bits - 2). ``total_weight``: of all of them; with the default
    weight of 1 each, ``peers``.
    """

    def __init__(self, bits: int, limit: float, peers: int, total_weight: float | None = None) -> None:
        if bits not in _TYPES:
            raise CodecError(f"a fixed point has 16 or 32 bits, not {bits}")
        if not _SMALLEST_NORMAL <= limit <= _LARGEST_LIMIT:
            raise CodecError(f"the limit of a fixed point is within 2**-126 and 2**126, not {limit}")
        if not 1 <= peers < 2 ** (bits - 2):
            raise CodecError(f"{bits} bits sum 1 to {2 ** (bits - 2) - 1} peers, not {peers}")
        self.bits = bits
        # Up to a float32, as values are compared with it in float32.
        rounded = np.float32(limit)
        self.limit = float(rounded if rounded >= limit else np.nextafter(rounded, np.float32(math.inf)))
        self.peers = peers
        self.total_weight = _checked_weight(peers if total_weight is None else total_weight)
        self._scale: float = (2 ** (bits - 1) - 1 - peers) / (self.limit * self.total_weight)
        if not 0.0 < self._scale < math.inf:
            raise CodecError(f"limit {limit} and total weight {total_weight} give no scale")
        self._unsigned, self._signed = _TYPES[bits]

    @property
    def step(self) -> float:
        """The value of one unit of a code, in ``weight * x``. Encoding errs by less than one step."""
        return 1.0 / self._scale

    def packed_bytes(self, n: int) -> int:
        """The exact size of ``n`` codes, in bytes."""
        return n * self.bits // 8

    def encode(self, values: Tensor, seed: int, weight: float = 1.0) -> Codes:
        """Return ``weight * values``, ``(n,) float32``, as new ``(n,)`` codes.

        Rounds stochastically, up with the probability of the fraction (to 2^-32), so a code's expectation is
        exact. Value i takes the 32-bit half ``i % 2`` (low half first) of draw ``i // 2`` of NumPy's Philox with the
        key ``seed``, 0 to 2^128 - 1; two encodings with equal seed and arguments are equal on every machine.
        A seed is for one use: equal seeds round alike, and then errors add up instead of averaging out.

        Raises CodecError, which says where, when a value is NaN, infinite or beyond the limit, and for a weight that
        is not within (0, total_weight].
        """
        values_np = checked_values(values).numpy()
        factor = _checked_weight(weight) * self._scale
        if weight > self.total_weight:
            raise CodecError(f"weight {weight} of a total of {self.total_weight}")
        if not 0 <= seed < 2**128:
            raise CodecError("a seed has at most 128 bits and no sign")
        random = np.random.Philox(key=seed)
        codes = np.empty(values_np.size, dtype=self._unsigned)
        for start in range(0, values_np.size, _TILE):
            tile = values_np[start : start + _TILE]
            self._check_limit(tile, start)
            draws = random.random_raw((tile.size + 1) // 2).astype("<u8", copy=False).view("<u4")[: tile.size]
            scaled = tile.astype(np.float64)
            scaled *= factor
            below = np.floor(scaled)
            scaled -= below
            # 2^32 times the fraction is exact, so comparing there is comparing with a uniform number in [0, 1).
            scaled *= 2.0**32
            below += draws < scaled
            codes[start : start + _TILE] = below.astype(np.int64).astype(self._unsigned)
        return codes

    def unpack(self, packed: Packed, n: int) -> Codes:
        """Return ``n`` codes from their bytes, copied. Raises CodecError for a wrong length; any bytes are codes."""
        return packed_tensor(packed, self.packed_bytes(n)).numpy().view(self._unsigned).copy()

    def add(self, total: Codes, codes: Codes) -> None:
        """Add codes or masks to ``total`` modulo 2^bits. Raises CodecError for other types or lengths."""
        self._check_codes(total, codes)
        np.add(total, codes, out=total)

    def subtract(self, total: Codes, codes: Codes) -> None:
        """Subtract codes or masks from ``total`` modulo 2^bits. Raises CodecError as ``add`` does."""
        self._check_codes(total, codes)
        np.subtract(total, codes, out=total)

    def decode_sum(self, total: Codes, weight: float = 1.0) -> Tensor:
        """Return the sum of ``weight * x`` over the peers in ``total``, divided by ``weight``; a new ``(n,) float32``.

        With the weight of all who are in ``total`` it is their weighted mean; with 1 the weighted sum. One float64
        multiplication and its rounding to float32 a value, and what would be subnormal is 0, so the bits are the
        same everywhere. Raises CodecError when a value does not fit into float32 (only hostile codes or a weight far
        below the true one bring that about).
        """
        self._check_codes(total)
        divisor = self._scale * _checked_weight(weight)
        if not _SMALLEST_DIVISOR < divisor < 1 / _SMALLEST_DIVISOR:
            raise CodecError(f"nothing can be divided by a weight of {weight}")
        signed = total.view(self._signed)
        if signed.size and max(-int(signed.min()), int(signed.max())) > _FLOAT_MAX * divisor:
            raise CodecError("a decoded sum does not fit into float32")
        unit = 1.0 / divisor
        values = np.empty(total.size, dtype=np.float32)
        for start in range(0, total.size, _TILE):
            decoded = signed[start : start + _TILE].astype(np.float64)
            decoded *= unit
            if unit < _SMALLEST_NORMAL:
                decoded[np.abs(decoded) < _SMALLEST_NORMAL] = 0.0
            values[start : start + _TILE] = decoded
        return torch.from_numpy(values)

    def _check_limit(self, tile: NDArray[np.float32], start: int) -> None:
        # NaN compares false, so it fails this as infinity does.
        inside = np.abs(tile) <= self.limit
        if not inside.all():
            at = int(np.argmin(inside))
            raise CodecError(f"value {start + at} is {tile[at]}, beyond the shared limit of {self.limit}")

    def _check_codes(self, *arrays: Codes) -> None:
        for array in arrays:
            if array.dtype != self._unsigned or array.ndim != 1 or array.size != arrays[0].size:
                found = " and ".join(f"{array.shape} {array.dtype}" for array in arrays)
                raise CodecError(f"codes are (n,) uint{self.bits} of one length, not {found}")


def _checked_weight(weight: float) -> float:
    if not 0.0 < weight < math.inf:
        raise CodecError(f"a weight is positive and finite, not {weight}")
    return float(weight)
