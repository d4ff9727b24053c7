"""What the torch path of ``sparse.py`` rests on: the largest of each row, and bits to bytes. numpy where it is faster.

numpy only ever sees tensors on the CPU, and only through operations whose result has no choice of rounding or order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LEVELS = 8
"""A row is cut into so many parts, and a column is one value of each: first the columns compete, then the values."""


def largest(bits: Tensor, tops: Tensor, keep: int) -> Tensor:
    """Each row's ``keep`` largest of ``bits``, ``(r, size) int32``: their indices, ascending, ``(r, keep) int64``.

    Of equal ones the lower indices. ``tops``, ``(r, c)``, is what ``column_tops`` gives for ``bits``.
    """
    rows, size = bits.shape
    width = tops.shape[1]
    device = bits.device
    if width < 2 * keep or width == size:
        return _of_rows(bits, _kth_largest(bits, keep), keep)
    # At most ``keep`` columns hold one of the largest, and those have the largest tops.
    floor = _kth_largest(tops, keep)
    hits = flat_nonzero(tops >= floor)
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
    found = flat_nonzero(over)
    if not tied and found.numel() == rows * keep:
        return indices.view(-1).index_select(0, found).view(rows, keep)
    chosen = torch.empty((rows, keep), dtype=torch.int64, device=device)
    # A column that was left out can hold a tie only when its top, at most ``floor``, is the threshold.
    unclear = (over.sum(1) != keep) | (threshold == floor).view(-1)
    clear = unclear.logical_not()
    chosen[clear] = indices[clear][over[clear]].view(-1, keep)
    chosen[unclear] = _of_rows(bits[unclear], threshold[unclear], keep)
    return chosen


def column_tops(bits: Tensor) -> Tensor:
    """The largest of each column of ``bits``, ``(r, size)``: ``(r, size / 8)``; ``bits`` where 8 do not divide it."""
    rows, size = bits.shape
    return bits if size % _LEVELS else bits.view(rows, _LEVELS, -1).amax(1)


def flat_nonzero(mask: Tensor) -> Tensor:
    """Where ``mask``, bool or uint8, of any shape, is not 0: flat indices, ascending, ``(m,) int64``."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # a sixth of the time of torch's
    return mask.reshape(-1).nonzero().view(-1)


def packed_bits(bits: Tensor) -> Tensor:
    """``(r, c) uint8`` of 0 and 1 to ``(r, ceil(c / 8)) uint8``, lowest bit first, padded with 0."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2).to(torch.uint8)


def unpacked_bits(packed: Tensor) -> Tensor:
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
    """What ``largest`` gives, from each row's ``keep``-th largest; looks at all of ``bits``."""
    chosen = bits >= threshold
    found = flat_nonzero(chosen)
    if found.numel() != len(bits) * keep:
        tied = flat_nonzero(chosen.sum(1) > keep)
        over = bits[tied] > threshold[tied]
        equal = bits[tied] == threshold[tied]
        chosen[tied] = over | (equal & (equal.cumsum(1) <= keep - over.sum(1, keepdim=True)))
        found = flat_nonzero(chosen)
    starts = torch.arange(0, bits.numel(), bits.shape[1], device=bits.device).view(-1, 1)
    return found.view(-1, keep) - starts
