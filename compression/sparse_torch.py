"""The torch path of ``sparse.py``: what ``sparse_kernels.py`` does, to the bit, where no compiler is at hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.compression.sparse_format import (
    LARGEST_SCALE_BITS,
    MAX_BFLOAT16_BITS,
    SPLIT_STEPS,
    TOO_LARGE_BITS,
    ChunkFormat,
)

_TILE_VALUES = 1 << 18
"""Values taken at a time: the temporaries of so many stay in a processor's cache."""


def encode(values: Tensor, residual: Tensor | None, packed: Tensor, chunk: ChunkFormat) -> int:
    """Pack whole chunks of ``values + residual`` into ``packed``; -1, or the index of the first that is not finite."""
    for rows, start in _tiles(values.view(-1, chunk.size), chunk):
        stop = start + rows.shape[0]
        if residual is not None:
            rows = rows + residual.view(-1, chunk.size)[start:stop]
        bits = rows.view(torch.int32) & 0x7FFFFFFF
        if int(bits.max()) >= TOO_LARGE_BITS:
            return start * chunk.size + int((bits >= TOO_LARGE_BITS).view(-1).nonzero()[0])
        indices = _largest(bits, chunk.keep)
        chosen = rows.gather(1, indices)
        scales, codes = (_two_bits if chunk.value_bits == 2 else _bytes)(chosen)
        places = (indices >> chunk.low_bits) + torch.arange(chunk.keep)
        upper = torch.zeros(len(rows), chunk.upper_bits, dtype=torch.uint8).scatter_(1, places, 1)
        low = _bits(indices, chunk.low_bits)
        packed.view(-1, chunk.packed_bytes)[start:stop] = torch.cat(
            [scales, _packed_bits(upper), _packed_bits(low), codes], dim=1
        )
    return -1


def decode(packed: Tensor, out: Tensor, chunk: ChunkFormat) -> int:
    """Unpack whole chunks into ``out``; 0, or the number of what is wrong in ``REASONS``."""
    for rows, start in _tiles(out.view(-1, chunk.size), chunk):
        wrong, indices, values = _unpack(packed.view(-1, chunk.packed_bytes)[start : start + len(rows)], chunk)
        if wrong:
            return wrong
        rows.zero_().scatter_(1, indices, values)
    return 0


def check(packed: Tensor, chunks: int, chunk: ChunkFormat) -> int:
    """What ``decode`` would return."""
    for rows, _ in _tiles(packed.view(chunks, -1), chunk):
        wrong, _, _ = _unpack(rows, chunk)
        if wrong:
            return wrong
    return 0


def accumulate(packed: Tensor, total: Tensor, weight: float, chunk: ChunkFormat) -> None:
    """Add ``weight``, a float32, times the chunks of ``packed``, which ``check`` has passed, to ``total``."""
    for rows, start in _tiles(total.view(-1, chunk.size), chunk):
        _, indices, values = _unpack(packed.view(-1, chunk.packed_bytes)[start : start + len(rows)], chunk)
        rows.scatter_(1, indices, rows.gather(1, indices) + values.mul_(weight))


def _tiles(rows: Tensor, chunk: ChunkFormat) -> Iterator[tuple[Tensor, int]]:
    """``rows``, one for each chunk, in views of as many as are taken at a time, each with its first row's number."""
    step = max(1, _TILE_VALUES // chunk.size)
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step], start


def _largest(bits: Tensor, keep: int) -> Tensor:
    """Each row's ``keep`` largest of ``bits``, ``(r, size) int32``: their indices, ascending, ``(r, keep) int64``.

    torch does not say which of several equal values its topk takes; here the lower index wins.
    """
    threshold = torch.topk(bits, keep, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = bits >= threshold
    tied = (chosen.sum(1) > keep).nonzero().view(-1)
    if tied.numel():
        over = bits[tied] > threshold[tied]
        equal = bits[tied] == threshold[tied]
        chosen[tied] = over | (equal & (equal.cumsum(1) <= keep - over.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(-1, keep)


def _two_bits(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The two scales, ``(r, 4) uint8``, and the packed codes of ``chosen``, ``(r, keep) float32``."""
    signed = chosen.view(torch.int32)
    bits = signed & 0x7FFFFFFF
    own = bits >> 23
    exponent = own.amax(1, keepdim=True).clamp_(min=1)
    mantissa = (bits & 0x7FFFFF) | ((own > 0).to(torch.int32) << 23)
    fixed = (mantissa >> (exponent - own.clamp(min=1)).clamp_(max=31)).to(torch.int64)
    keep = chosen.shape[1]
    total = fixed.sum(1, keepdim=True)
    split = total // keep
    count = upper = torch.zeros_like(total)
    for _ in range(SPLIT_STEPS):
        over = fixed > split
        count, upper = over.sum(1, keepdim=True), (fixed * over).sum(1, keepdim=True)
        rest = keep - count
        middle = ((total - upper) * count + upper * rest) // (2 * rest * count).clamp(min=1)
        split = torch.where(count > 0, middle, split)
    # A power of two made of its bits, as float64, so that the product is exact.
    unit = ((exponent.to(torch.int64) - 150 + 1023) << 52).view(torch.float64)
    small = _bfloat16((total - upper).to(torch.float64) / (keep - count) * unit)
    large = _bfloat16(upper.to(torch.float64) / count.clamp(min=1) * unit)
    large = torch.where(count > 0, large, small)
    scales = torch.cat([small & 0xFF, small >> 8, large & 0xFF, large >> 8], dim=1).to(torch.uint8)
    codes = torch.stack([(signed >> 31) & 1, (fixed > split).to(torch.int32)], dim=2)
    return scales, _packed_bits(codes.view(len(codes), -1))


def _bfloat16(values: Tensor) -> Tensor:
    """The bits of ``values``, not negative, as bfloat16: to nearest even, saturated, 0 where it would be subnormal."""
    bits = values.to(torch.float32).view(torch.int32).to(torch.int64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).clamp_(max=MAX_BFLOAT16_BITS)
    return rounded.masked_fill_(rounded < 0x80, 0)


def _bytes(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The scale, ``(r, 4) uint8``, and the int8 codes, as uint8, of ``chosen``, ``(r, keep) float32``."""
    largest = torch.tensor([LARGEST_SCALE_BITS], dtype=torch.int32).view(torch.float32)
    scale = torch.minimum(chosen.abs().amax(1, keepdim=True) / 127, largest)
    scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 0.0)
    codes = (chosen / scale.masked_fill(scale == 0.0, 1.0)).round_().to(torch.int8)
    return scale.view(torch.uint8), codes.view(torch.uint8)


def _unpack(records: Tensor, chunk: ChunkFormat) -> tuple[int, Tensor, Tensor]:
    """What is wrong, 0 for nothing, the indices ``(r, keep) int64`` and the values ``(r, keep) float32``."""
    rows, keep, width = records.shape[0], chunk.keep, chunk.low_bits
    nothing = torch.empty(0)
    upper = _unpacked_bits(records[:, 4 : chunk.low_at])
    if bool((upper.sum(1) != keep).any()):  # a one in the padding makes the last index too large
        return 1, nothing, nothing
    indices = (upper.nonzero()[:, 1].view(rows, keep) - torch.arange(keep)) << width
    low = _unpacked_bits(records[:, chunk.low_at : chunk.code_at])
    indices += (low[:, : keep * width].reshape(rows, keep, width) << torch.arange(width)).sum(2)
    if bool((indices[:, 1:] <= indices[:, :-1]).any()) or int(indices[:, -1].max()) >= chunk.size:
        return 1, nothing, nothing
    if bool(low[:, keep * width :].any()):
        return 3, nothing, nothing
    if chunk.value_bits == 2:
        wrong, values = _two_bit_values(
            records[:, :4].to(torch.int32), _unpacked_bits(records[:, chunk.code_at :]), keep
        )
    else:
        wrong, values = _byte_values(records[:, :4], records[:, chunk.code_at :])
    return wrong, indices, values


def _two_bit_values(scales: Tensor, codes: Tensor, keep: int) -> tuple[int, Tensor]:
    """What is wrong, and the values ``(r, keep) float32`` of unpacked codes."""
    both = scales[:, 0::2] | scales[:, 1::2] << 8
    if bool(((both >= 0x7F80) | ((both > 0) & (both < 0x80))).any()):
        return 2, scales
    if bool(codes[:, 2 * keep :].any()):
        return 3, scales
    signs, large = codes[:, 0 : 2 * keep : 2].to(torch.int32), codes[:, 1 : 2 * keep : 2].bool()
    bits = torch.where(large, both[:, 1:], both[:, :1]) << 16 | signs << 31
    return 0, bits.view(torch.float32)


def _byte_values(scales: Tensor, codes: Tensor) -> tuple[int, Tensor]:
    """What is wrong, and the values ``(r, keep) float32`` of int8 codes."""
    bits = scales.clone(memory_format=torch.contiguous_format).view(-1).view(torch.int32).view(-1, 1)
    if bool(((bits < 0) | (bits > LARGEST_SCALE_BITS) | ((bits > 0) & (bits < 0x00800000))).any()):
        return 2, scales
    if bool((codes == 0x80).any()):
        return 3, scales
    return 0, codes.view(torch.int8).to(torch.float32) * bits.view(torch.float32)


def _bits(numbers: Tensor, width: int) -> Tensor:
    """The ``width`` low bits of each of ``numbers``, ``(r, c)``, lowest first: ``(r, c * width) uint8`` of 0 and 1."""
    return ((numbers.unsqueeze(2) >> torch.arange(width)) & 1).to(torch.uint8).view(len(numbers), -1)


def _packed_bits(bits: Tensor) -> Tensor:
    """``(r, c)`` of 0 and 1 to ``(r, ceil(c / 8)) uint8``, lowest bit first, padded with 0."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (padded << torch.arange(8, dtype=bits.dtype)).sum(2).to(torch.uint8)


def _unpacked_bits(packed: Tensor) -> Tensor:
    """``(r, c) uint8`` to ``(r, 8 c) uint8`` of 0 and 1."""
    bits = (packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(packed.shape[0], -1)
