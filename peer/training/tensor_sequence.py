"""Tensors on any device, of any floating-point type and memory layout, as one float32 vector that is read and written
by range, without a copy of the whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from shoal.compression.range_reader import RangeReader
from shoal.peer.training.device_streams import MOST_ELEMENTS, Mark, streams_of

_PIECE = MOST_ELEMENTS
"""Elements that are copied at a time, so that temporaries and pinned memory stay small."""

_EXACT = (torch.float32, torch.float64)
"""Types that hold every float32 value."""


class TensorSequence:
    """The elements of tensors, one tensor after the other and each in the order of its indices, as a vector.

    A ``RangeReader``, whatever types the tensors have: ``read`` converts from them, ``write`` rounds to the nearest
    value of them. Disjoint ranges may be read and written by several threads at once. On a GPU they come after the work
    that the calling thread has queued, and not after other threads' work: those read what ``settled`` returns.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._stops = list(accumulate(tensor.numel() for tensor in tensors))
        self._rounds = any(tensor.dtype not in _EXACT for tensor in tensors)

    @property
    def elements(self) -> int:
        return self._stops[-1] if self._stops else 0

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Write the values [start, stop) into ``out``, ``(stop - start,) float32`` on the CPU."""
        self._read(start, stop, out, {})

    def _read(self, start: int, stop: int, out: Tensor, after: dict[torch.device, Mark]) -> None:
        for device, blocks in self._by_device(start, stop):
            pairs = ((block, out[at - start : end - start].view(block.shape)) for block, at, end in blocks)
            streams_of(device).read(pairs, after.get(device))

    def settled(self) -> RangeReader:
        """Return a reader for other threads, of the values as the work that this thread has queued leaves them.

        On a GPU it copies beside work that is queued later, which must not change the tensors."""
        devices = {tensor.device for tensor in self._tensors}
        return SettledReader(self, {device: streams_of(device).mark() for device in devices})

    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the elements from ``start`` on to ``values``, (k,) float32 on the CPU, each rounded to its tensor's type.

        The calling thread's later work finds the values in the tensors, and ``values`` may change after the return.
        """
        for device, blocks in self._by_device(start, start + values.numel()):
            pairs = ((values[at - start : end - start].view(block.shape), block) for block, at, end in blocks)
            streams_of(device).write(pairs)

    def copy(self) -> TensorSequence:
        """Return contiguous copies of the tensors where they are."""
        return TensorSequence([tensor.clone(memory_format=torch.contiguous_format) for tensor in self._tensors])

    def rebase(self, before: TensorSequence, values: Tensor) -> None:
        """Set all elements to what they are - ``before`` + ``values``, (n,) float32 on the CPU, computed where the
        tensors are: exactly to ``values``, rounded, where they are equal to ``before``, which ``copy`` has made."""
        for device, blocks in self._by_device(0, self.elements):
            triples = (
                (block, before._flat(at, end).view(block.shape), values[at:end].view(block.shape))
                for block, at, end in blocks
            )
            streams_of(device).rebase(triples)

    def _flat(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of one contiguous tensor."""
        ((block, _, _),) = self._blocks(start, stop)
        return block

    def rounded(self, values: Tensor, start: int = 0) -> Tensor:
        """Return what ``read`` returns after ``write(values, start)``: ``values`` itself where nothing is rounded."""
        if not self._rounds:
            return values
        rounded = torch.empty_like(values)
        for block, at, end in self._blocks(start, start + values.numel()):
            part = slice(at - start, end - start)
            rounded[part].copy_(values[part].to(block.dtype))
        return rounded

    def _by_device(self, start: int, stop: int) -> Iterator[tuple[torch.device, Iterator[tuple[Tensor, int, int]]]]:
        """Iterate over runs of ``_blocks`` of one device each."""
        return groupby(self._blocks(start, stop), key=lambda one: one[0].device)

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """Iterate over views of the tensors that hold the elements [start, stop), with their places in the vector.

        No view has more than ``_PIECE`` elements.
        """
        assert 0 <= start <= stop <= self.elements, (start, stop, self.elements)
        number = bisect_right(self._stops, start)
        while start < stop:
            tensor, end = self._tensors[number], self._stops[number]
            first = end - tensor.numel()
            until = min(stop, end)
            for block in _blocks_of(tensor, start - first, until - first):
                yield block, start, start + block.numel()
                start += block.numel()
            number += 1


class SettledReader:
    """Reader of tensors that nothing changes meanwhile, which does not wait for what is queued after ``after``."""

    def __init__(self, sequence: TensorSequence, after: dict[torch.device, Mark]) -> None:
        self._sequence = sequence
        self._after = after

    @property
    def elements(self) -> int:
        return self._sequence.elements

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Write the values [start, stop) into ``out``, ``(stop - start,) float32`` on the CPU."""
        self._sequence._read(start, stop, out, self._after)


def pieces_of(tensor: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over views of a tensor, none of more than ``_PIECE`` elements, and of the same elements of ``out``, a
    contiguous tensor of its shape."""
    flat, at = out.view(-1), 0
    for block in _blocks_of(tensor.detach(), 0, tensor.numel()):
        yield block, flat[at : at + block.numel()].view(block.shape)
        at += block.numel()


def _blocks_of(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Iterate over views that hold the elements [start, stop) of a tensor, none of more than ``_PIECE`` elements."""
    while start < stop:
        until = min(stop, start + _PIECE)
        yield from _views(tensor, start, until)
        start = until


def _views(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Iterate over views that hold the elements [start, stop) of a tensor, counted in the order of its indices."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    if tensor.dim() == 1:
        yield tensor[start:stop]
        return
    size = tensor.numel() // len(tensor)
    first, last = -(-start // size), stop // size
    if first > last:  # inside of one row
        yield from _views(tensor[last], start - last * size, stop - last * size)
        return
    if start < first * size:
        yield from _views(tensor[first - 1], start - (first - 1) * size, size)
    if first < last:
        yield tensor[first:last]
    if last * size < stop:
        yield from _views(tensor[last], 0, stop - last * size)
