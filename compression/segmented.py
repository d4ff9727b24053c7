"""Several codecs one after another, as one: for a range of values that more than one tensor has a part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.compression.codec import (
    Codec,
    CodecError,
    Packed,
    WholeTensorCodec,
    checked_out,
    checked_values,
    packed_tensor,
)


class Segmented(WholeTensorCodec):
    """The first ``n_0`` values with the first codec, the next ``n_1`` with the second, and so on; for that many only.

    Packed layout: each segment as its own codec packs it, one after the other, with nothing between.
    """

    def __init__(self, segments: Sequence[tuple[int, Codec]]) -> None:
        self._segments = tuple(segments)
        self.n = sum(n for n, _ in segments)

    @property
    def name(self) -> str:
        """The segments in their order: ``int4*8192+float16*64``."""
        return "+".join(f"{codec.name}*{n}" for n, codec in self._segments)

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: the largest of the segments'."""
        return max(codec.growth for _, codec in self._segments)

    def packed_bytes(self, n: int) -> int:
        """The sum over the segments. CodecError for another number of values."""
        if n != self.n:
            raise CodecError(f"{n} values where there should be {self.n}")
        return sum(codec.packed_bytes(count) for count, codec in self._segments)

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        values = checked_values(values)
        packed = torch.empty(self.packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        for span, room, codec in self._spans():
            try:
                packed[room] = codec.encode(values[span])
            except CodecError as error:
                raise CodecError(f"from value {span.start} on: {error}") from error
        return packed

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        packed = packed_tensor(packed, self.packed_bytes(n))
        out = torch.empty(n, device=packed.device) if out is None else checked_out(out, n, packed.device)
        for span, room, codec in self._spans():
            codec.decode(packed[room], span.stop - span.start, out[span])
        return out

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``."""
        packed = packed_tensor(packed, self.packed_bytes(n))
        return sum(codec.squared_norm(packed[room], span.stop - span.start) for span, room, codec in self._spans())

    def _spans(self) -> Iterator[tuple[slice, slice, Codec]]:
        """For each segment: where its values are, where its bytes are, its codec."""
        at, byte = 0, 0
        for n, codec in self._segments:
            size = codec.packed_bytes(n)
            yield slice(at, at + n), slice(byte, byte + size), codec
            at, byte = at + n, byte + size
