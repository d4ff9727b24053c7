"""Chunked top-k: of every chunk only the largest magnitudes are sent, for use with error feedback.

As in SparseLoCo (Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706);
the indices after Elias 1974, "Efficient Storage and Retrieval by Content and Address of Static Files", and Fano 1971.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.compression import fast, sparse_torch
from shoal.compression.codec import CodecError, Packed, checked_values, packed_tensor
from shoal.compression.sparse_format import REASONS, ChunkFormat

_VALUE_BITS = {"2bit": 2, "int8": 8}
_LARGEST_CHUNK = 65536


class TopK:
    """Of every ``chunk`` values the ``k`` of largest magnitude; of equal ones the lower index. The rest decode to 0.

    The last chunk, of m < ``chunk`` values, keeps ``ceil(k * m / chunk)``. The packed chunks stand one after
    another, each by itself, little-endian, bits filled in from the lowest; ``keep`` values of ``size``::

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

    def __init__(self, k: int = 64, values: Literal["2bit", "int8"] = "2bit", chunk: int = 4096) -> None:
        if not 1 <= chunk <= _LARGEST_CHUNK:
            raise CodecError(f"chunk is the number of values that are compared, 1 to {_LARGEST_CHUNK}, not {chunk}")
        if not 1 <= k <= chunk:
            raise CodecError(f"k is how many of the {chunk} values of a chunk are sent, 1 to {chunk}, not {k}")
        if values not in _VALUE_BITS:
            raise CodecError(f"values is one of {', '.join(_VALUE_BITS)}, not {values!r}")
        self.k = k
        self.values = values
        self.chunk = chunk

    @property
    def name(self) -> str:
        """``topk``, with the options that are not the default ones: ``topk(k=32, values=int8)``."""
        options = [("k", self.k, 64), ("values", self.values, "2bit"), ("chunk", self.chunk, 4096)]
        shown = ", ".join(f"{option}={value}" for option, value, default in options if value != default)
        return f"topk({shown})" if shown else "topk"

    def packed_bytes(self, n: int) -> int:
        """Exact; 84 bytes for each 4096 values with the default options, for the last few as many as they need."""
        return sum((stop - start) // form.size * form.packed_bytes for start, stop, form in self._parts(n))

    def encode(self, values: Tensor) -> Tensor:
        """``(n,) float32`` to ``(packed_bytes(n),) uint8``. CodecError, with the index, for NaN or infinity."""
        return self._encode(checked_values(values), None)

    def encode_residual(self, values: Tensor, residual: Tensor) -> Tensor:
        """See ``Codec.encode_residual``. What was not chosen stays in ``residual`` whole."""
        values, residual = checked_values(values), _checked_like(residual, values.numel())
        packed = self._encode(values, residual)
        # Only now, for ``residual`` is to be as before when a value anywhere is not finite.
        residual.add_(values)
        self._add(packed, residual, -1.0)
        return packed

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """Packed bytes to ``(n,) float32``. CodecError for a wrong length and for whatever no encoder writes."""
        raw = packed_tensor(packed, self.packed_bytes(n))
        values = torch.empty(n, dtype=torch.float32) if out is None else _checked_like(out, n)
        kernels = fast.kernels("sparse_kernels")
        for part, chunks, form in self._split(raw, n):
            span = values[part]
            if kernels is None:
                wrong = sparse_torch.decode(chunks, span, form)
            else:
                wrong = kernels.decode(chunks.numpy(), span.numpy(), form.shape)
            if wrong:
                raise CodecError(f"packed top-k: {REASONS[wrong]}")
        return values if out is None else out

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``. Only chosen values are added: a -0.0 in ``total`` stays where nothing was sent."""
        total = _checked_like(total, total.numel())
        raw = packed_tensor(packed, self.packed_bytes(total.numel()))
        kernels = fast.kernels("sparse_kernels")
        for part, chunks, form in self._split(raw, total.numel()):
            count = (part.stop - part.start) // form.size
            if kernels is None:
                wrong = sparse_torch.check(chunks, count, form)
            else:
                wrong = kernels.check(chunks.numpy(), count, form.shape)
            if wrong:
                raise CodecError(f"packed top-k: {REASONS[wrong]}")
        self._add(raw, total, weight)

    def _encode(self, values: Tensor, residual: Tensor | None) -> Tensor:
        packed = torch.empty(self.packed_bytes(values.numel()), dtype=torch.uint8)
        none = np.empty(0, np.float32)
        kernels = fast.kernels("sparse_kernels")
        for part, chunks, form in self._split(packed, values.numel()):
            span, rest = values[part], None if residual is None else residual[part]
            if kernels is None:
                bad = sparse_torch.encode(span, rest, chunks, form)
            else:
                bad = kernels.encode(span.numpy(), none if rest is None else rest.numpy(), chunks.numpy(), form.shape)
            if bad >= 0:
                raise CodecError(f"the value at index {part.start + bad} is NaN or infinite")
        return packed

    def _add(self, raw: Tensor, total: Tensor, weight: float) -> None:
        """Add ``weight`` times what ``raw``, found right, holds to ``total``."""
        kernels = fast.kernels("sparse_kernels")
        factor = np.float32(weight)
        for part, chunks, form in self._split(raw, total.numel()):
            if kernels is None:
                sparse_torch.accumulate(chunks, total[part], float(factor), form)
            else:
                kernels.accumulate(chunks.numpy(), total[part].numpy(), factor, form.shape)

    def _parts(self, n: int) -> Iterator[tuple[int, int, ChunkFormat]]:
        """The range of the full chunks and that of the short one, where there are any, with each chunk's format."""
        full = n // self.chunk * self.chunk
        value_bits = _VALUE_BITS[self.values]
        if full:
            yield 0, full, ChunkFormat(self.chunk, self.k, value_bits)
        if n > full:
            yield full, n, ChunkFormat(n - full, -(-self.k * (n - full) // self.chunk), value_bits)

    def _split(self, packed: Tensor, n: int) -> Iterator[tuple[slice, Tensor, ChunkFormat]]:
        """For each of ``_parts``: its range of values, its packed chunks, its format."""
        at = 0
        for start, stop, form in self._parts(n):
            end = at + (stop - start) // form.size * form.packed_bytes
            yield slice(start, stop), packed[at:end], form
            at = end


def _checked_like(tensor: Tensor, n: int) -> Tensor:
    """``tensor`` without autograd history. CodecError unless it is contiguous ``(n,) float32`` on the CPU."""
    if tensor.numel() != n:
        raise CodecError(f"{tensor.numel()} values where there should be {n}")
    return checked_values(tensor)
