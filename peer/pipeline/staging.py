"""Tensors between the device that stages compute on and packed bytes in the host's memory.

On a GPU the training thread computes on a stream of its own and runs ahead of it, while worker threads pack and unpack
on two others, so that only packed bytes cross, from and to pinned memory. What these threads begin is over when they
return or raise: nothing reads or writes their memory after that. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.peer.pipeline.activations import TensorForm, pack, unpack

_FIRST = -1
"""Priority of a stream whose short work somebody waits for, beside long kernels."""


@dataclass(frozen=True)
class Computed:
    """A tensor that the training thread has computed, or on a GPU only begun to: it is there at ``ready``."""

    tensor: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def here(cls, tensor: Tensor) -> Computed:
        """By the calling thread, on its current stream; before it begins anything else there."""
        if not tensor.is_cuda:
            return cls(tensor, None)
        ready = _event()
        torch.cuda.current_stream(tensor.device).record_event(ready)
        return cls(tensor, ready)


class Staging:
    """``device``: the stages', of one training thread; ``codec``: the run's for activations and their gradients."""

    def __init__(self, device: torch.device, codec: Codec) -> None:
        self.device = device
        self.codec = codec
        self._compute: torch.cuda.Stream | None = None
        self._outgoing: torch.cuda.Stream | None = None
        self._incoming: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._compute = _stream(device)
            self._outgoing, self._incoming = (_stream(device, priority=_FIRST) for _ in range(2))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What the training thread does with the device, all of it: parameters are written there, too."""
        if self._compute is None:
            yield
            return
        around = torch.cuda.current_stream(self.device)
        self._compute.wait_stream(around)
        with torch.cuda.stream(self._compute):
            yield
        around.wait_stream(self._compute)

    def packed(self, made: Computed, tail: Tensor | None = None) -> Tensor:
        """``made``, packed, and after it the bytes of ``tail``, which is on the host already: ``(m,) uint8`` there.
        Raises ``CodecError`` when a value is infinite or not a number."""
        if made.ready is not None:
            made.ready.synchronize()  # not in the stream, where it would keep others' waiting
        with _over_at_the_end(self._outgoing):
            data = pack(made.tensor, self.codec)
            if self._outgoing is None:
                return data.cpu() if tail is None else torch.cat([data.cpu(), tail])
            size_bytes = data.numel()
            host = self.room(size_bytes + (0 if tail is None else tail.numel()))
            host[:size_bytes].copy_(data, non_blocking=True)
            if tail is not None:
                host[size_bytes:].copy_(tail)
            return host

    def room(self, size_bytes: int) -> Tensor:
        """Where bytes to unpack may be put: uninitialised ``(size_bytes,) uint8`` on the host, for a GPU pinned. torch
        keeps pinned memory that nobody uses any more and gives it out again: there is as much as was in use at once."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._incoming is not None)

    def unpacked(self, packed: Tensor, form: TensorForm) -> Tensor:
        """The tensor that ``packed`` holds, ``(m,) uint8`` on the host: on the device where that is a GPU, for
        ``computing`` alone, else on the CPU. Raises ``WireError`` for bytes that are not of that form."""
        if self._compute is None:
            return unpack(packed, form, self.codec)
        with _over_at_the_end(self._incoming):
            tensor = unpack(packed.to(self.device, non_blocking=True), form, self.codec)
        # Its memory is the incoming stream's, which would give it out again while it is still being read.
        tensor.record_stream(self._compute)
        return tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, without waiting for what has been begun on a GPU: a copy from memory that is not pinned
    would. On the current stream, as what is computed from it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


@contextmanager
def _over_at_the_end(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on that stream, which is over at the end, also after an error."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            over = _event()
            stream.record_event(over)
            over.synchronize()


def _stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    """Who waits for it sleeps: one on the processor that looks again and again would take it from the others."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
