"""Tensors on any device, of any floating-point type and memory layout, as one float32 vector that is read and written
by range, without a copy of the whole."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_PIECE = 2**20
"""Elements that are copied at a time, so that temporaries and pinned memory stay small."""

_EXACT = (torch.float32, torch.float64)
"""Types that hold every float32 value."""

_PIECES_IN_FLIGHT = 2
"""Copies between a GPU and pinned memory that are queued at a time: one is under way while another is converted."""


class TensorSequence:
    """The elements of tensors, one tensor after the other and each in the order of its indices, as a vector.

    A ``RangeReader``, whatever types the tensors have: ``read`` converts from them, ``write`` rounds to the nearest
    value of them. Disjoint ranges may be read and written by several threads at once. On a GPU they come after the work
    that the calling thread has queued, and not after other threads' work: see ``wait_for_device``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._stops = list(accumulate(tensor.numel() for tensor in tensors))
        self._rounds = any(tensor.dtype not in _EXACT for tensor in tensors)
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}

    @property
    def elements(self) -> int:
        return self._stops[-1] if self._stops else 0

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Write the values [start, stop) into ``out``, ``(stop - start,) float32`` on the CPU."""
        waiting: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()

        def finish_oldest() -> None:
            ready, pinned, part = waiting.popleft()
            ready.synchronize()
            part.copy_(pinned)

        for block, at, end in self._blocks(start, stop):
            part = out[at - start : end - start].view(block.shape)
            if not block.is_cuda:
                part.copy_(block)
                continue
            with torch.cuda.device(block.device):
                pinned = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
                pinned.copy_(block, non_blocking=True)
                waiting.append((_recorded_event(block.device), pinned, part))
            if len(waiting) >= _PIECES_IN_FLIGHT:
                finish_oldest()
        while waiting:
            finish_oldest()

    @torch.no_grad()
    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the elements from ``start`` on to ``values``, (k,) float32 on the CPU, each rounded to its tensor's type.

        The tensors hold the values on the return.
        """
        waiting: deque[torch.cuda.Event] = deque()
        for block, at, end in self._blocks(start, start + values.numel()):
            part = values[at - start : end - start].view(block.shape)
            if not block.is_cuda:
                block.copy_(part)
                continue
            # The CPU rounds, so that the tensors hold what ``rounded`` returns, and half the bytes travel.
            with torch.cuda.device(block.device):
                pinned = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
                block.copy_(pinned.copy_(part), non_blocking=True)
                waiting.append(_recorded_event(block.device))
            if len(waiting) > _PIECES_IN_FLIGHT:
                waiting.popleft().synchronize()
        while waiting:
            waiting.popleft().synchronize()

    def rounded(self, values: Tensor, start: int = 0) -> Tensor:
        """Return what ``read`` returns after ``write(values, start)``: ``values`` itself where nothing is rounded."""
        if not self._rounds:
            return values
        rounded = torch.empty_like(values)
        for block, at, end in self._blocks(start, start + values.numel()):
            part = slice(at - start, end - start)
            rounded[part].copy_(values[part].to(block.dtype))
        return rounded

    def wait_for_device(self) -> None:
        """Wait for the work that this thread has queued on the tensors' GPUs, before other threads read them."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """Iterate over views of the tensors that hold the elements [start, stop), with their places in the vector.

        No view has more than ``_PIECE`` elements.
        """
        assert 0 <= start <= stop <= self.elements, (start, stop, self.elements)
        number = bisect_right(self._stops, start)
        while start < stop:
            tensor, end = self._tensors[number], self._stops[number]
            first = end - tensor.numel()
            while start < min(stop, end):
                until = min(stop, end, start + _PIECE)
                for block in _views(tensor, start - first, until - first):
                    yield block, start, start + block.numel()
                    start += block.numel()
            number += 1


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


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
