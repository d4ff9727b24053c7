"""Chunked top-k: of every chunk only the largest magnitudes are sent, for use with error feedback.

As in SparseLoCo (Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706);
the indices after Elias 1974, "Efficient Storage and Retrieval by Content and Address of Static Files", and Fano 1971.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from shoal.compression import topk_torch
from shoal.compression.blockwise import linear_growth
from shoal.compression.codec import (
    Codec,
    Packed,
    checked_out,
    checked_values,
    in_place,
    not_finite_error,
    packed_buffer,
    packed_tensor,
    rounded_weight,
)
from shoal.compression.formats import CodecError, TopKFormat
from shoal.compression.lowbit import TWO_MAGNITUDES_GROWTH
from shoal.compression.norms import squared_norm
from shoal.compression.topk_format import REASONS, ChunkFormat


class TopK(Codec):
    """Of every ``chunk`` values the ``k`` of largest magnitude; of equal ones the lower index. The rest decode to 0.

    The last chunk, of m < ``chunk`` values, keeps ``ceil(k * m / chunk)``. Layout version 1: the packed
    chunks stand one after another, each by itself, little-endian, bits filled in from the lowest; ``keep`` values of
    ``size``::

        4 bytes                            the scales
        ceil(upper_bits / 8) bytes         Elias-Fano's upper parts: bit (index_j >> low_bits) + j is set, for
                                           j = 0 .. keep - 1; upper_bits = keep + ((size - 1) >> low_bits)
        ceil(keep * low_bits / 8) bytes    the low parts, low_bits = floor(log2(size / keep)) each
        ceil(keep * value_bits / 8) bytes  the codes

    Indices increase strictly; bits between fields are 0. At k = 64, 2 bits, a full chunk takes 84 bytes.

    ``values="2bit"``: scales are two bfloat16, the small and the large magnitude, each 0 or normal and positive;
    a code's bit 0 is the sign, bit 1 says large. The magnitudes are the means of the two classes into which
    Lloyd's iteration (1957, published 1982), begun at the mean, splits the chosen magnitudes in four steps. It runs
    on integers: magnitudes in units of 2**-23 of the largest one's binade, so its sums have no order.

    ``values="int8"``: one float32 scale ``max|x| / 127``, 0 or normal and positive; codes -127 .. 127.
    """

    kernels = "topk"
    format: TopKFormat

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: a part of the values is sent, as two magnitudes or linearly, as one block."""
        return TWO_MAGNITUDES_GROWTH if self.format.values == "2bit" else linear_growth(127, self.format.k, 0.5)

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        return self._encode(checked_values(values), None, self.compiled(values.device))

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """See ``Codec.encode_residual``. Values that were not chosen stay in ``residual`` whole."""
        values = checked_values(values)
        residual = checked_out(residual, values.numel(), values.device)
        # First of all, for ``residual`` is to be as before when a value anywhere is not finite.
        kernels = self.compiled(values.device)
        if kernels is None:
            finite = topk_torch.finite_sums(values, residual, self.format.chunk)
        else:
            finite = kernels.finite_sums(values.numpy(), residual.numpy())
        if not finite:
            raise not_finite_error(values + residual)
        return self._encode(values, in_place(residual, left), kernels, packed)

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``. Raises CodecError also for bytes that no encoder writes."""
        raw = packed_tensor(packed, self.packed_bytes(n))
        device = raw.device
        if out is None:
            out = torch.empty(n, dtype=torch.float32, device=device)
        values = checked_out(out, n, device)
        kernels = self.compiled(device)
        for part, chunks, form in self._split(raw, n):
            if kernels is None:
                wrong = topk_torch.decode(chunks, values[part], form)
            else:
                wrong = kernels.decode(chunks.numpy(), values[part].numpy(), form.shape)
            _refuse(wrong)
        return out

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``. Only chosen values are added: a -0.0 in ``total`` stays where nothing was sent."""
        raw = packed_tensor(packed, self.packed_bytes(total.numel()))
        device = raw.device
        total, weight = checked_out(total, total.numel(), device), rounded_weight(weight)
        kernels = self.compiled(device)
        if kernels is None:
            self._accumulate_by_torch(raw, total, weight)
            return
        # All are unpacked before one is added, for ``total`` is to be as before when a chunk anywhere is wrong.
        unpacked = []
        for part, chunks, form in self._split(raw, total.numel()):
            sent = (part.stop - part.start) // form.size * form.keep
            indices, values = np.empty(sent, np.uint16), np.empty(sent, np.float32)
            _refuse(kernels.unpack(chunks.numpy(), indices, values, form.shape))
            unpacked.append((part, indices, values, form))
        for part, indices, values, form in unpacked:
            kernels.add(indices, values, total[part].numpy(), np.float32(weight), form.shape)

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``. Of the values that were sent: all others are zero."""
        raw, total = packed_tensor(packed, self.packed_bytes(n)), 0.0
        kernels = self.compiled(raw.device)
        for part, chunks, form in self._split(raw, n):
            rows = (part.stop - part.start) // form.size
            if kernels is None:
                wrong, tiles = topk_torch.unpack(chunks, rows, form)
                _refuse(wrong)
                total += sum(squared_norm(values) for _, values in tiles)
            else:
                indices, values = np.empty(rows * form.keep, np.uint16), np.empty(rows * form.keep, np.float32)
                _refuse(kernels.unpack(chunks.numpy(), indices, values, form.shape))
                total += squared_norm(torch.from_numpy(values))
        return total

    def _accumulate_by_torch(self, raw: Tensor, total: Tensor, weight: float) -> None:
        unpacked = []
        for part, chunks, form in self._split(raw, total.numel()):
            wrong, tiles = topk_torch.unpack(chunks, (part.stop - part.start) // form.size, form)
            _refuse(wrong)
            unpacked.append((part, tiles, form))
        for part, tiles, form in unpacked:
            topk_torch.add(tiles, total[part], weight, form)

    def _encode(
        self, values: Tensor, residual: Tensor | None, kernels: ModuleType | None, packed: Tensor | None = None
    ) -> Tensor:
        """Pack ``values``, or ``values + residual``, which are finite then, and leave in ``residual`` what is lost."""
        packed = packed_buffer(self.packed_bytes(values.numel()), values.device, packed)
        none = np.empty(0, np.float32)
        for part, chunks, form in self._split(packed, values.numel()):
            span, rest = values[part], None if residual is None else residual[part]
            if kernels is None:
                finite = topk_torch.encode(span, rest, chunks, form)
            else:
                kept = none if rest is None else rest.numpy()
                finite = kernels.encode(span.numpy(), kept, chunks.numpy(), form.shape)
            if not finite:
                raise not_finite_error(values if residual is None else values + residual)
        return packed

    def _split(self, packed: Tensor, n: int) -> Iterator[tuple[slice, Tensor, ChunkFormat]]:
        """Yield for each part of the format its range of values, its packed chunks, and a chunk's format."""
        at = 0
        for start, stop, form in self.format.parts(n):
            end = at + (stop - start) // form.size * form.packed_bytes
            yield slice(start, stop), packed[at:end], form
            at = end


def _refuse(wrong: int) -> None:
    """Raise CodecError unless ``wrong``, a kernel's verdict on packed bytes (an index of ``REASONS``), is 0."""
    if wrong:
        raise CodecError(f"packed top-k: {REASONS[wrong]}")
