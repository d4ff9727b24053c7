"""Chunked top-k: of every chunk only the largest magnitudes are sent, for use with error feedback.

As in SparseLoCo (Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706);
the indices after Elias 1974, "Efficient Storage and Retrieval by Content and Address of Static Files", and Fano 1971.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from shoal.compression.formats import (
    LARGEST_SCALE_BITS,
    MAX_BFLOAT16_BITS,
    SPLIT_STEPS,
    TOO_LARGE_BITS,
    ChunkFormat,
    CodecError,
    TopKFormat,
)
from shoal.compression.lowbit import TWO_MAGNITUDES_GROWTH
from shoal.compression.norms import squared_norm

_LEVELS = 8
"""Parts of a row; a column has one value of each part. First the columns compete, then the values."""
_TILE_VALUES = 1 << 18
"""Values per tile on a CPU, whose temporaries stay in its cache."""
_DEVICE_TILE_VALUES = 1 << 24
"""Values per tile on other devices, where each operation costs a launch."""
_LARGEST_SCALE = float(torch.tensor(LARGEST_SCALE_BITS, dtype=torch.int32).view(torch.float32))
_SIGN = -0x80000000

_REASONS = (
    "",
    "the indices of a chunk do not increase within it",
    "a scale is negative, NaN, infinite, too large or subnormal",
    "a code or padding holds what no encoder writes",
)
"""Messages for a kernel's verdict on packed bytes; index 0 means that nothing is wrong."""


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
        return self._pack(checked_values(values), None, self.compiled(values.device))

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """See ``Codec.encode_residual``. Values that were not chosen stay in ``residual`` whole."""
        values = checked_values(values)
        residual = checked_out(residual, values.numel(), values.device)
        # First of all, for ``residual`` is to be as before when a value anywhere is not finite.
        kernels = self.compiled(values.device)
        if kernels is None:
            finite = _finite_sums(values, residual, len(list(self.format.parts(values.numel()))))
        else:
            finite = kernels.finite_sums(values.numpy(), residual.numpy())
        if not finite:
            raise not_finite_error(values + residual)
        return self._pack(values, in_place(residual, left), kernels, packed)

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``. Raises CodecError also for bytes that no encoder writes."""
        raw = packed_tensor(packed, self.packed_bytes(n))
        out = torch.empty(n, dtype=torch.float32, device=raw.device) if out is None else out
        values = checked_out(out, n, raw.device)
        kernels = self.compiled(raw.device)
        if kernels is None:
            for part, _, indices, sent in self._unpacked(raw, n):
                values[part].zero_().scatter_(0, indices, sent)
        else:
            for part, chunks, form in self._split(raw, n):
                _refuse(kernels.decode(chunks.numpy(), values[part].numpy(), form.shape))
        return out

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``. Only chosen values are added: a -0.0 in ``total`` stays where nothing was sent."""
        raw = packed_tensor(packed, self.packed_bytes(total.numel()))
        total, weight = checked_out(total, total.numel(), raw.device), rounded_weight(weight)
        kernels = self.compiled(raw.device)
        # All are unpacked before one is added, for ``total`` is to be as before when a chunk anywhere is wrong.
        for part, form, indices, sent in list(self._unpacked(raw, total.numel())):
            if kernels is None:
                added = total[part]
                added.scatter_(0, indices, added.index_select(0, indices) + sent.mul_(weight))
            else:
                kernels.add(indices, sent, total[part].numpy(), np.float32(weight), form.shape)

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``. Of the values that were sent: all others are zero."""
        raw = packed_tensor(packed, self.packed_bytes(n))
        return sum(squared_norm(torch.as_tensor(sent)) for _, _, _, sent in self._unpacked(raw, n))

    def _unpacked(self, raw: Tensor, n: int) -> Iterator[tuple[slice, ChunkFormat, Any, Any]]:
        """Yield for each part of the format its range of values, a chunk's format, and the indices and values sent.

        Tensors, the indices within the part; with kernels arrays, each index within its chunk. Raises CodecError."""
        kernels = self.compiled(raw.device)
        for part, chunks, form in self._split(raw, n):
            indices: Any
            sent: Any
            if kernels is None:
                wrong, indices, sent = _unpack(chunks.view(-1, form.packed_bytes), form)
            else:
                count = (part.stop - part.start) // form.size * form.keep
                indices, sent = np.empty(count, np.uint16), np.empty(count, np.float32)
                wrong = kernels.unpack(chunks.numpy(), indices, sent, form.shape)
            _refuse(wrong)
            yield part, form, indices, sent

    def _pack(
        self, values: Tensor, residual: Tensor | None, kernels: ModuleType | None, packed: Tensor | None = None
    ) -> Tensor:
        """Pack ``values``, or ``values + residual``, which are finite then, and leave in ``residual`` what is lost."""
        packed = packed_buffer(self.packed_bytes(values.numel()), values.device, packed)
        none = np.empty(0, np.float32)
        for part, chunks, form in self._split(packed, values.numel()):
            span, rest = values[part], None if residual is None else residual[part]
            if kernels is None:
                finite = _encode(span, rest, chunks, form)
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
    """Raise CodecError unless ``wrong``, a kernel's verdict on packed bytes (an index of ``_REASONS``), is 0."""
    if wrong:
        raise CodecError(f"packed top-k: {_REASONS[wrong]}")


# By torch: the same bits as ``kernels/topk.py``, on any device ---------------------------------------------------
#
# numpy is used on the CPU where it is faster, and only for operations whose result has no choice of rounding or order.


def _finite_sums(values: Tensor, residual: Tensor, parts: int) -> bool:
    """Return whether ``values + residual`` are finite; True, unchecked, where ``_encode`` checks before it writes."""
    step = _tile_values(values)
    if values.numel() <= step and parts == 1:
        return True
    for start in range(0, values.numel(), step):
        tile = slice(start, start + step)
        low, high = torch.aminmax(values[tile] + residual[tile])
        if not (math.isfinite(float(low)) and math.isfinite(float(high))):
            return False
    return True


def _encode(values: Tensor, residual: Tensor | None, packed: Tensor, chunk: ChunkFormat) -> bool:
    """Pack whole chunks of ``values + residual`` into ``packed``; what is lost stays in ``residual``.

    False when a sum is not finite; of ``residual`` only tiles before it have changed then.
    """
    for rows, start in _tiles(values.view(-1, chunk.size), chunk):
        tile = slice(start, start + len(rows))
        kept = None if residual is None else residual.view(-1, chunk.size)[tile]
        if kept is not None:
            rows = rows + kept
        bits = rows.abs().view(torch.int32)
        tops = _column_tops(bits)
        if int(tops.max()) >= TOO_LARGE_BITS:
            return False
        indices = _largest(bits, tops, chunk.keep)
        flat = (indices + _starts(indices, chunk.size)).view(-1)
        chosen = rows.view(-1).index_select(0, flat).view(-1, chunk.keep)
        scales, codes, sent = (_two_bits if chunk.value_bits == 2 else _bytes)(chosen)
        records = packed.view(-1, chunk.packed_bytes)[tile]
        records[:, :4] = scales
        records[:, 4 : chunk.low_at] = _packed_bits(_upper_bits(indices, chunk))
        records[:, chunk.low_at : chunk.code_at] = _packed_bits(_low_bits(indices, chunk.low_bits))
        records[:, chunk.code_at :] = codes
        if kept is not None:
            kept.copy_(rows).view(-1).scatter_(0, flat, (chosen - sent).view(-1))
    return True


def _tiles(rows: Tensor, chunk: ChunkFormat) -> Iterator[tuple[Tensor, int]]:
    """Yield views of ``rows``, one row a chunk, tile by tile, each with the number of its first row."""
    step = max(1, _tile_values(rows) // chunk.size)
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step], start


def _tile_values(tensor: Tensor) -> int:
    return _TILE_VALUES if tensor.device.type == "cpu" else _DEVICE_TILE_VALUES


def _starts(rows: Tensor, width: int) -> Tensor:
    """Offsets of ``rows``, ``(r, ...)``, that are ``width`` apart: ``(r, 1) int64``."""
    return torch.arange(0, len(rows) * width, width, device=rows.device).view(-1, 1)


def _upper_bits(indices: Tensor, chunk: ChunkFormat) -> Tensor:
    """Elias-Fano's upper bits of ``indices``, ``(r, keep) int64``: ``(r, upper_bits) uint8`` of 0 and 1."""
    bits = torch.zeros((len(indices), chunk.upper_bits), dtype=torch.uint8, device=indices.device)
    first = _starts(indices, chunk.upper_bits) + torch.arange(chunk.keep, device=indices.device)
    places = (first + (indices >> chunk.low_bits)).view(-1)
    bits.view(-1).scatter_(0, places, torch.ones_like(places, dtype=torch.uint8))
    return bits


def _low_bits(indices: Tensor, width: int) -> Tensor:
    """The ``width`` low bits of each of ``indices``, ``(r, keep) int64``: ``(r, keep * width) uint8`` of 0 and 1."""
    held = indices.to(torch.uint8 if width <= 8 else torch.int32).view(torch.uint8)
    bits = _unpacked_bits(held).view(*indices.shape, -1)
    return bits[:, :, :width].reshape(len(indices), -1)


def _low_parts(bits: Tensor, keep: int, width: int) -> Tensor:
    """Inverse of ``_low_bits``: ``(r, keep) int64``."""
    room = 8 if width <= 8 else 32
    held = torch.zeros((len(bits), keep, room), dtype=torch.uint8, device=bits.device)
    held[:, :, :width] = bits.reshape(len(bits), keep, width)
    numbers = _packed_bits(held.view(len(bits), -1))
    return (numbers if width <= 8 else numbers.view(torch.int32)).to(torch.int64)


def _two_bits(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two scales, ``(r, 4) uint8``, the packed codes of ``chosen``, ``(r, keep) float32``, and their values."""
    keep = chosen.shape[1]
    magnitudes = chosen.abs()
    exponent = (magnitudes.amax(1, keepdim=True).view(torch.int32) >> 23).clamp_(min=1).to(torch.int64)
    # Powers of two made of their bits, as float64: products with them are exact, and the conversion truncates.
    fixed = magnitudes.to(torch.float64).mul_(_power_of_two(150 - exponent)).to(torch.int64)
    total, nothing = fixed.sum(1, keepdim=True), torch.zeros_like(fixed)
    split = total // keep
    over = fixed > split
    # Where all are equal nothing is over their mean, which stays the split then.
    stay = torch.where(over.any(1, keepdim=True), 0, split)
    for step in range(SPLIT_STEPS):
        if step:
            over = fixed > split
        count, upper = over.sum(1, keepdim=True), torch.where(over, fixed, nothing).sum(1, keepdim=True)
        rest, lower = keep - count, total - upper
        doubled = (lower * count + upper * rest) // (rest * count).clamp_(min=1)
        split = torch.maximum(doubled >> 1, stay)
    sums, counts = torch.cat([lower, upper], dim=1), torch.cat([rest, count], dim=1)
    scales = _bfloat16(sums.to(torch.float64) / counts.clamp_(min=1) * _power_of_two(exponent - 150))
    scales[:, 1:] = torch.where(count > 0, scales[:, 1:], scales[:, :1])
    over = fixed > split
    codes = torch.stack([torch.signbit(chosen), over], dim=2).view(torch.uint8)
    bits = scales << 16
    sent = torch.where(over, bits[:, 1:], bits[:, :1]) | (chosen.view(torch.int32) & _SIGN)
    return scales.to(torch.int16).view(torch.uint8), _packed_bits(codes.view(len(codes), -1)), sent.view(torch.float32)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 to the ``exponent``, int64, -1022 .. 1023, as float64."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _bfloat16(values: Tensor) -> Tensor:
    """The bits of ``values``, not negative, as bfloat16: to nearest even, saturated, 0 where it would be subnormal."""
    bits = values.to(torch.float32).view(torch.int32)  # infinity, 0x7F800000, at most: the sum has room
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).clamp_(max=MAX_BFLOAT16_BITS)
    return rounded.masked_fill_(rounded < 0x80, 0)


def _bytes(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scale, ``(r, 4) uint8``, the int8 codes of ``chosen``, ``(r, keep) float32``, as uint8, and their values."""
    most = chosen.abs().amax(1, keepdim=True)
    # By a tensor, for on a GPU torch divides by a number by multiplying with its rounded inverse.
    scale = (most / torch.full_like(most, 127.0)).clamp_(max=_LARGEST_SCALE)
    scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 0.0)
    codes = (chosen / scale.masked_fill(scale == 0.0, 1.0)).round_().to(torch.int8)
    return scale.view(torch.uint8), codes.view(torch.uint8), codes.to(torch.float32) * scale


def _unpack(records: Tensor, chunk: ChunkFormat) -> tuple[int, Tensor, Tensor]:
    """Verdict (0: nothing is wrong), flat indices ``(r * keep,) int64`` and values ``(r * keep,) float32``."""
    rows, keep, width = records.shape[0], chunk.keep, chunk.low_bits
    nothing = torch.empty(0)
    upper = _unpacked_bits(records[:, 4 : chunk.low_at])
    ones = _flat_nonzero(upper)
    if ones.numel() != rows * keep:
        return 1, nothing, nothing
    # If a row has too few or too many ones, a row's first place is negative or its last too large: padding's are.
    places = ones.view(rows, keep) - _starts(upper, upper.shape[1])
    indices = (places - torch.arange(keep, device=records.device)) << width
    if width:
        low = _unpacked_bits(records[:, chunk.low_at : chunk.code_at])
        indices += _low_parts(low[:, : keep * width], keep, width)
    if keep > 1 and int((indices[:, 1:] - indices[:, :-1]).min()) <= 0:
        return 1, nothing, nothing
    if int(places[:, 0].min()) < 0 or int(indices[:, -1].max()) >= chunk.size:
        return 1, nothing, nothing
    if width and bool(low[:, keep * width :].any()):
        return 3, nothing, nothing
    read = _two_bit_values if chunk.value_bits == 2 else _byte_values
    wrong, values = read(records[:, :4].clone(memory_format=torch.contiguous_format), records[:, chunk.code_at :], keep)
    return wrong, (indices + _starts(indices, chunk.size)).view(-1), values.view(-1)


def _two_bit_values(scales: Tensor, codes: Tensor, keep: int) -> tuple[int, Tensor]:
    """Verdict, and the values ``(r, keep) float32`` of 2-bit codes."""
    both = scales.view(torch.int16).to(torch.int32)  # negative scales stay negative
    if bool(((both.clamp(0x80, MAX_BFLOAT16_BITS) != both) & (both != 0)).any()):
        return 2, scales
    if keep & 3 and bool((codes[:, -1] >> 2 * (keep & 3)).any()):
        return 3, scales
    flags = _unpacked_bits(codes)[:, : 2 * keep].view(torch.bool)
    bits = both << 16
    magnitudes = torch.where(flags[:, 1::2], bits[:, 1:], bits[:, :1])
    return 0, (magnitudes | flags[:, 0::2].to(torch.int32) << 31).view(torch.float32)


def _byte_values(scales: Tensor, codes: Tensor, _keep: int) -> tuple[int, Tensor]:
    """Verdict, and the values ``(r, keep) float32`` of int8 codes."""
    bits = scales.view(torch.int32)
    if bool(((bits < 0) | (bits > LARGEST_SCALE_BITS) | ((bits > 0) & (bits < 0x00800000))).any()):
        return 2, scales
    if bool((codes == 0x80).any()):
        return 3, scales
    return 0, codes.view(torch.int8).to(torch.float32) * bits.view(torch.float32)


# The largest of each row, and bits to bytes ---------------------------------------------------------------------


def _largest(bits: Tensor, tops: Tensor, keep: int) -> Tensor:
    """Each row's ``keep`` largest of ``bits``, ``(r, size) int32``: their indices, ascending, ``(r, keep) int64``.

    Of equal ones the lower indices. ``tops``, ``(r, c)``, is what ``_column_tops`` gives for ``bits``.
    """
    rows, size = bits.shape
    width = tops.shape[1]
    device = bits.device
    if width < 2 * keep or width == size:
        return _of_rows(bits, _kth_largest(bits, keep), keep)
    # At most ``keep`` columns hold one of the largest, and those have the largest tops.
    floor = _kth_largest(tops, keep)
    hits = _flat_nonzero(tops >= floor)
    tied = hits.numel() > rows * keep
    if tied:
        columns = torch.topk(tops, keep, dim=1, sorted=False).indices.sort(1).values
    else:
        columns = hits.view(rows, keep) - torch.arange(0, rows * width, width, device=device).view(-1, 1)
    levels = torch.arange(0, size, width, device=device)
    indices = (columns.unsqueeze(1) + levels.view(1, -1, 1)).view(rows, -1)  # ascending in each row
    wanted = columns.unsqueeze(1).expand(-1, _LEVELS, -1)
    candidates = bits.view(rows, _LEVELS, width).gather(2, wanted).view(rows, -1)
    threshold = _kth_largest(candidates, keep)
    over = candidates >= threshold
    found = _flat_nonzero(over)
    if not tied and found.numel() == rows * keep:
        return indices.view(-1).index_select(0, found).view(rows, keep)
    chosen = torch.empty((rows, keep), dtype=torch.int64, device=device)
    # A column that was left out can hold a tie only when its top, at most ``floor``, is the threshold.
    unclear = (over.sum(1) != keep) | (threshold == floor).view(-1)
    clear = unclear.logical_not()
    chosen[clear] = indices[clear][over[clear]].view(-1, keep)
    chosen[unclear] = _of_rows(bits[unclear], threshold[unclear], keep)
    return chosen


def _column_tops(bits: Tensor) -> Tensor:
    """The largest of each column of ``bits``, ``(r, size)``: ``(r, size / 8)``; ``bits`` where 8 do not divide it."""
    rows, size = bits.shape
    return bits if size % _LEVELS else bits.view(rows, _LEVELS, -1).amax(1)


def _flat_nonzero(mask: Tensor) -> Tensor:
    """Flat indices, ascending, ``(m,) int64``, of the elements of ``mask``, bool or uint8, that are not 0."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # a sixth of the time of torch's
    return mask.reshape(-1).nonzero().view(-1)


def _packed_bits(bits: Tensor) -> Tensor:
    """``(r, c) uint8`` of 0 and 1 to ``(r, ceil(c / 8)) uint8``, lowest bit first, padded with 0."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2).to(torch.uint8)


def _unpacked_bits(packed: Tensor) -> Tensor:
    """``(r, c) uint8`` to ``(r, 8 c) uint8`` of 0 and 1."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, bitorder="little"))
    bits = (packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.reshape(packed.shape[0], -1)


def _kth_largest(bits: Tensor, keep: int) -> Tensor:
    """The ``keep``-th largest of each row, ``(r, 1)``."""
    if bits.device.type == "cpu" and bits.shape[1] <= 1024:  # numpy takes long for long rows
        at = bits.shape[1] - keep
        return torch.from_numpy(np.partition(bits.numpy(), at, axis=1)[:, at : at + 1])
    return torch.topk(bits, keep, dim=1, sorted=False).values.amin(1, keepdim=True)


def _of_rows(bits: Tensor, threshold: Tensor, keep: int) -> Tensor:
    """Compute ``_largest`` from each row's ``keep``-th largest, with a pass over all of ``bits``."""
    chosen = bits >= threshold
    found = _flat_nonzero(chosen)
    if found.numel() != len(bits) * keep:
        tied = _flat_nonzero(chosen.sum(1) > keep)
        over = bits[tied] > threshold[tied]
        equal = bits[tied] == threshold[tied]
        chosen[tied] = over | (equal & (equal.cumsum(1) <= keep - over.sum(1, keepdim=True)))
        found = _flat_nonzero(chosen)
    starts = torch.arange(0, bits.numel(), bits.shape[1], device=bits.device).view(-1, 1)
    return found.view(-1, keep) - starts
