"""Contributions to a chunk one after the other, as they are: what all members need who compute with each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compression.codec import Codec, Packed
from shoal.compression.formats import CodecError
from shoal.compression.scratch import zeros
from shoal.compression.weighted_mean import EncodingLoss


class Gathered:
    """Accumulator beside ``WeightedMean``, of contributions that each keep a place of their own.

    Places without a contribution are zeros, so that the size does not depend on who delivered."""

    def __init__(self, n: int, places: int) -> None:
        self._rows = torch.zeros(places, n)

    def put(self, place: int, codec: Codec, packed: Packed) -> None:
        """Put the decoded values in their place. Raises CodecError, and puts nothing, when they cannot be decoded."""
        row = self._rows[place]
        try:
            codec.decode(packed, row.numel(), row)
        except CodecError:
            row.zero_()
            raise

    def encode(self, codec: Codec, left: Tensor, packed: Tensor) -> EncodingLoss:
        """Encode all places into ``packed``; see ``WeightedMean.encode``. ``left``: ``(places * n,) float32``."""
        values = self._rows.view(-1)
        codec.encode_residual(values, zeros(values.numel()), left, packed)
        return EncodingLoss.of(left)
