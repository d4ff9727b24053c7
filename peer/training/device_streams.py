"""Copies between a device's memory and the machine's, and the order and time of what a device does.

A device with a memory of its own copies on streams beside the one that it computes on, through a ring of pinned memory
(``RingStreams``). A device that computes in the machine's memory is copied by the calling thread (``DirectStreams``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_ELEMENTS = 2**20
"""Most elements of a block that is copied at a time."""

_SLOT_BYTES = 8 * MOST_ELEMENTS
_SLOTS = 4
_IN_FLIGHT = 2
"""Copies that one thread has under way: one crosses the bus while another is converted."""


class Mark(Protocol):
    """Moment in the work that a thread has queued on a device."""

    def wait(self) -> None:
        """Wait until the device is there."""

    def is_reached(self) -> bool:
        """Return whether the device is there."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from another mark of the same device to this one; both are reached."""
        ...


class DeviceStreams(Protocol):
    """Copies of blocks of at most ``MOST_ELEMENTS`` elements; several threads may copy at a time."""

    def mark(self) -> Mark:
        """Mark the end of the work that the calling thread has queued."""
        ...

    def read(self, blocks: Iterable[tuple[Tensor, Tensor]], after: Mark | None = None) -> None:
        """Copy blocks on the device to memory on the CPU, of equal shapes.

        They are read once ``after`` is reached; None: after all that the calling thread has queued."""

    def write(self, blocks: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy values on the CPU to blocks on the device, rounded to their type.

        They come before and after what the calling thread queues before and after."""

    def rebase(self, blocks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Set each block on the device to block - before + values, float32 operations in this order.

        ``before`` is on the device, too, ``values`` on the CPU."""


@cache
def streams_of(device: torch.device) -> DeviceStreams:
    """Return the streams of a device, the same ones for the whole process."""
    return _accelerator_streams(device) if device.type in ("cuda", "xpu") else DirectStreams(device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor`` to ``device`` on the current stream, without waiting for the work queued there.

    A copy from memory that is not pinned would wait.
    """
    if device.type in ("cuda", "xpu") and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


class Pacer:
    """Bound on a training thread that queues work faster than its device does it: it is one step ahead at most.

    So the clock of the thread shows the device's speed, and the next batch is made while the device computes."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._before: Mark | None = None

    def note_step(self) -> None:
        """Wait for the step before the one that has just been queued."""
        before, self._before = self._before, self._streams.mark()
        if before is not None:
            before.wait()


# The machine's memory ---------------------------------------------------------------------------------------


class _HostMark:
    """Moment on the CPU, which has done everything that was asked of it."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        return

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: _HostMark) -> float:
        return self._at_s - earlier._at_s


class DirectStreams:
    """Copies by the calling thread, for the CPU and MPS."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "mps"

    def mark(self) -> Mark:
        if not self._has_events:
            return _HostMark()
        event = torch.mps.Event(enable_timing=True)
        event.record()
        return _EventMark(event)

    def read(self, blocks: Iterable[tuple[Tensor, Tensor]], after: Mark | None = None) -> None:
        for block, out in blocks:
            out.copy_(block)

    @torch.no_grad()
    def write(self, blocks: Iterable[tuple[Tensor, Tensor]]) -> None:
        for values, block in blocks:
            block.copy_(values)

    @torch.no_grad()
    def rebase(self, blocks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        for block, before, values in blocks:
            _rebase(block, before, values.to(block.device))


def _rebase(block: Tensor, before: Tensor, values: Tensor) -> None:
    """In this order the result is exactly the new values where nothing has changed since ``before``."""
    if block.dtype == torch.float32:
        block.sub_(before).add_(values)
    else:
        block.copy_(block.float().sub_(before.float()).add_(values))


# A memory of its own ----------------------------------------------------------------------------------------


class CopyQueue(Protocol):
    """Copies that a device does one after the other, beside its computations."""

    def follow(self, mark: Mark) -> None:
        """Have later copies come after ``mark``."""

    def copy(self, target: Tensor, source: Tensor) -> Mark:
        """Queue a copy between tensors of one type and shape, of which one is pinned; returns its end."""
        ...


class ComputeQueue(Protocol):
    """Work that the calling thread queues on a device."""

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Have later work of the calling thread come after ``mark``."""


class RingStreams:
    """Copies of a device with a memory of its own, through a ring of pinned memory that is never larger.

    ``compute``: what the training thread queues; ``outgoing``, ``incoming``: copies beside it."""

    def __init__(
        self,
        device: torch.device,
        compute: ComputeQueue,
        outgoing: CopyQueue,
        incoming: CopyQueue,
        *,
        pin_memory: bool,
    ) -> None:
        self._device = device
        self._compute, self._outgoing, self._incoming = compute, outgoing, incoming
        self._ring = _Ring(pin_memory)
        self._staged: deque[tuple[Tensor, Mark | None]] | None = None

    def mark(self) -> Mark:
        return self._compute.mark()

    def read(self, blocks: Iterable[tuple[Tensor, Tensor]], after: Mark | None = None) -> None:
        self._outgoing.follow(self.mark() if after is None else after)
        with self._ring.copies() as copies:
            for block, out in blocks:
                slot = copies.slot(block)
                copies.add(self._outgoing.copy(slot, block), into=out)

    @torch.no_grad()
    def write(self, blocks: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._incoming.follow(self.mark())
        copied: Mark | None = None
        with self._ring.copies() as copies:
            for values, block in blocks:
                # The CPU rounds, so that half the bytes travel where the block has half the bits.
                slot = copies.slot(block).copy_(values)
                copied = self._incoming.copy(block, slot)
                copies.add(copied)
        if copied is not None:
            self._compute.follow(copied)

    @torch.no_grad()
    def rebase(self, blocks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        staged = self._staged
        if staged is None:
            made = [torch.empty(MOST_ELEMENTS, device=self._device) for _ in range(_IN_FLIGHT)]
            staged = self._staged = deque((one, self.mark()) for one in made)
        with self._ring.copies() as copies:
            for block, before, values in blocks:
                memory, used = staged.popleft()
                if used is not None:
                    self._incoming.follow(used)
                arrived = memory[: values.numel()].view(values.shape)
                copied = self._incoming.copy(arrived, copies.slot(values).copy_(values))
                copies.add(copied)
                self._compute.follow(copied)
                _rebase(block, before, arrived)
                staged.append((memory, self.mark()))


class _Ring:
    """Slots of pinned memory, made when the first of them is taken."""

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._free: list[Tensor] = []
        self._left_to_make = _SLOTS
        self._changed = threading.Condition()

    def take(self, *, wait: bool) -> Tensor | None:
        """Take a slot; None if there is none and the caller does not wait."""
        with self._changed:
            while not self._free and not self._left_to_make:
                if not wait:
                    return None
                self._changed.wait()
            if self._free:
                return self._free.pop()
            self._left_to_make -= 1
        try:
            return torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=self._pin_memory)
        except BaseException:
            with self._changed:  # otherwise others would wait for a slot that there never is
                self._left_to_make += 1
                self._changed.notify()
            raise

    def give(self, slot: Tensor) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    @contextmanager
    def copies(self) -> Iterator[_Copies]:
        """Hold one thread's copies; at the end, and after an error, all of them are done and the slots free."""
        copies = _Copies(self)
        try:
            yield copies
        finally:
            copies.finish()


class _Copies:
    """Copies of one thread that are under way. It waits for a slot of others only while it has none itself."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self._waiting: deque[tuple[Tensor, Tensor, Mark, Tensor | None]] = deque()
        self._taken: tuple[Tensor, Tensor] | None = None

    def slot(self, like: Tensor) -> Tensor:
        """Return pinned memory of a tensor's shape and type."""
        memory = self._ring.take(wait=False) if len(self._waiting) < _IN_FLIGHT else None
        if memory is None and self._waiting:
            memory = self._finish_oldest()
        if memory is None:
            memory = self._ring.take(wait=True)
        assert memory is not None
        view = memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
        self._taken = memory, view
        return view

    def add(self, copied: Mark, into: Tensor | None = None) -> None:
        """Add the copy that uses the last slot; ``into``: memory that gets the slot's values at its end."""
        assert self._taken is not None
        memory, view = self._taken
        self._taken = None
        self._waiting.append((memory, view, copied, into))

    def _finish_oldest(self) -> Tensor:
        memory, view, copied, into = self._waiting.popleft()
        copied.wait()
        if into is not None:
            into.copy_(view)
        return memory

    def finish(self) -> None:
        """Wait for all copies and give the slots back."""
        if self._taken is not None:
            self._ring.give(self._taken[0])
            self._taken = None
        while self._waiting:
            self._ring.give(self._finish_oldest())


# CUDA and XPU -----------------------------------------------------------------------------------------------


class _EventMark:
    """Event of CUDA, XPU or MPS."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_reached(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: _EventMark) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _StreamQueue:
    """A stream of its own for copies. ``module``: torch.cuda or torch.xpu."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._stream = module.Stream(device=device, priority=-1)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        self._stream.wait_event(mark.event)

    def copy(self, target: Tensor, source: Tensor) -> Mark:
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = _event(self._module)
            event.record(self._stream)
        return _EventMark(event)


class _CurrentStream:
    """Stream on which the calling thread computes."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def mark(self) -> Mark:
        event = _event(self._module)
        event.record(self._module.current_stream(self._device))
        return _EventMark(event)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        self._module.current_stream(self._device).wait_event(mark.event)


def _event(module: Any) -> Any:
    """Make an event. Those of CUDA let waiters sleep, as spinning would take processors from other threads."""
    if module is torch.cuda:
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    return module.Event(enable_timing=True)


def _accelerator_streams(device: torch.device) -> RingStreams:
    module = torch.get_device_module(device)
    with module.device(device):
        outgoing, incoming = _StreamQueue(module, device), _StreamQueue(module, device)
    return RingStreams(device, _CurrentStream(module, device), outgoing, incoming, pin_memory=True)
