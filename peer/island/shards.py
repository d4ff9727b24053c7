"""Shards: which elements of a whole parameter a rank of an island holds, whatever mesh it is spread over.

Columns are strided in the whole, and a layer that computes several outputs at once is cut inside of each of them. So a
shard is described by its rows, any of them in any order, and a range of each further dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WORDS = 8


@dataclass(frozen=True)
class Shard:
    """Part of a whole tensor that a rank holds: ``rows`` of its first dimension, and ``columns`` of the others.

    ``is_ours``: whether this rank writes it, of those that hold the same; ``holders``: how many do."""

    rows: slice | Tensor
    columns: tuple[slice, ...]
    is_ours: bool = True
    holders: int = 1

    def load(self, held: Tensor, whole: Tensor) -> None:
        """Copy this part of ``whole``, on the CPU, into the rank's own tensor."""
        if held.numel():
            held.copy_(_at(whole, self.columns)[self.rows])

    def store(self, held: Tensor, whole: Tensor) -> None:
        """Copy the rank's own tensor to this part of ``whole``, on the CPU."""
        if not (held.numel() and self.is_ours):
            return
        part = _at(whole, self.columns)
        if isinstance(self.rows, Tensor):
            part.index_copy_(0, self.rows, held.to(part.device, part.dtype))
        else:
            part[self.rows].copy_(held)


def _at(whole: Tensor, columns: tuple[slice, ...]) -> Tensor:
    return (whole if whole.dim() else whole.view(1))[(slice(None), *columns)]


def held_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a tensor of one dimension or more."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach() if held.dim() else held.detach().view(1)


def shard_of(tensor: Tensor, order: Tensor | None = None) -> tuple[Shard, list[int]]:
    """Return this rank's shard of a tensor, and its bounds as numbers, by which ranks are compared.

    ``order``: rows of the whole in the order in which the mesh cuts them, (rows,) int64; None: as they are."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    ranges = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)] or [slice(0, 1)]
    bounds = [number for one in ranges[: _WORDS // 2] for number in (one.start, one.stop)]
    rows: slice | Tensor = ranges[0] if order is None else order[ranges[0]]
    return Shard(rows, tuple(ranges[1:])), bounds + [0] * (_WORDS - len(bounds))


def row_order(rows: int, outputs: int, ranks: int) -> Tensor:
    """Return the order in which the rows of a layer with ``outputs`` outputs in one are cut among ``ranks``, so that
    each rank has its part of every output. (rows,) int64."""
    return torch.arange(rows).view(outputs, ranks, -1).transpose(0, 1).reshape(-1)


def who_holds(bounds_by_rank: Sequence[Tensor], rank: int) -> list[tuple[bool, int]]:
    """Return for each tensor whether this rank is the first of those with the same shard, and how many they are.

    ``bounds_by_rank``: of each rank, (tensors, words)."""
    found = []
    for number in range(len(bounds_by_rank[0])):
        mine = bounds_by_rank[rank][number]
        same = [other for other, bounds in enumerate(bounds_by_rank) if torch.equal(bounds[number], mine)]
        found.append((same[0] == rank, len(same)))
    return found
