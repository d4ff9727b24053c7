"""Activations, gradients and targets as packed bytes, and their way between a device and the host's memory.

The run's codec packs floating-point tensors; shape and dtype travel beside the bytes (``TensorHeader``). On a GPU the
training thread computes asynchronously on a stream of its own, and worker threads pack and unpack on two others, so
that only packed bytes cross the bus, through pinned memory. A worker's transfers have ended when its function returns
or raises, so its buffers can be used again. On a CPU nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec, Packed, packed_tensor
from shoal.compression.formats import CodecError
from shoal.swarm.errors import WireError

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**31
"""Limits of one tensor; a receiver also checks the shape that it expects."""

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTEGERS = {"int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype (torch's name) of a tensor whose bytes are fetched separately."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorHeader:
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def packed_bytes(self, codec: Codec) -> int:
        """Return the exact size on the wire. Raises ``WireError`` for a shape or dtype that is never sent."""
        elements = self._elements()
        return elements * _INTEGERS[self.dtype].itemsize if self.dtype in _INTEGERS else codec.packed_bytes(elements)

    def check(self, shape: Sequence[int], dtypes: Sequence[str] = tuple(_FLOATS)) -> None:
        """Raise ``WireError`` unless shape and dtype are the expected ones."""
        if self.shape != tuple(shape) or self.dtype not in dtypes:
            expected = " or ".join(dtypes)
            raise WireError(
                f"a tensor of shape {_shown(self.shape)} and type {self.dtype[:20]}; expected {tuple(shape)} {expected}"
            )

    def _elements(self) -> int:
        if self.dtype not in _FLOATS and self.dtype not in _INTEGERS:
            raise WireError(f"a tensor of the unknown type {self.dtype[:20]!r}")
        # Python's integers do not overflow, and few dimensions keep the product small.
        if len(self.shape) > MAX_DIMENSIONS or any(not 0 < size <= MAX_ELEMENTS for size in self.shape):
            raise WireError(
                f"a tensor of shape {_shown(self.shape)}; at most {MAX_DIMENSIONS} dimensions of 1 or more are sent"
            )
        elements = math.prod(self.shape)
        if elements > MAX_ELEMENTS:
            raise WireError(f"a tensor of {elements} elements; expected at most {MAX_ELEMENTS}")
        return elements


def pack(tensor: Tensor, codec: Codec) -> Tensor:
    """Pack a tensor into (m,) uint8 on its device: floating-point values by ``codec``, integers as they are.

    m is ``TensorHeader.of(tensor).packed_bytes(codec)``. Raises ``CodecError`` if a value is NaN or infinite.
    """
    form = TensorHeader.of(tensor)
    assert form.dtype in _FLOATS or form.dtype in _INTEGERS, form.dtype
    flat = tensor.detach().reshape(-1)
    if form.dtype in _INTEGERS:
        return flat.contiguous().view(torch.uint8).clone()
    return codec.encode(flat.float().contiguous())


def unpack(packed: Packed, form: TensorHeader, codec: Codec) -> Tensor:
    """Unpack a tensor on the device of ``packed``, or on the CPU; it shares no memory with ``packed``.

    Raises ``WireError`` for bytes that do not fit ``form``.
    """
    expected = form.packed_bytes(codec)
    try:
        if form.dtype in _INTEGERS:
            raw = packed_tensor(packed, expected).clone()
            return raw.view(_INTEGERS[form.dtype]).view(form.shape)
        return codec.decode(packed, math.prod(form.shape)).to(_FLOATS[form.dtype]).view(form.shape)
    except CodecError as error:
        raise WireError(f"a received tensor cannot be unpacked: {error}") from error


def _shown(shape: tuple[int, ...]) -> str:
    return str(shape[:MAX_DIMENSIONS])[:200]


_HIGH_PRIORITY = -1
"""Priority of the transfers' streams: short work that peers wait for, beside the training's long kernels."""


@dataclass(frozen=True)
class ComputedTensor:
    """Tensor that the training thread has computed or, on a GPU, will have computed at ``ready``."""

    tensor: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def on_current_stream(cls, tensor: Tensor) -> ComputedTensor:
        """Wrap a tensor that the calling thread has just computed, or queued on its current stream."""
        if not tensor.is_cuda:
            return cls(tensor, None)
        ready = _event()
        torch.cuda.current_stream(tensor.device).record_event(ready)
        return cls(tensor, ready)


class Staging:
    """Transfers between a device and packed host memory.

    ``device``: the stages' device, used by one training thread; ``codec``: the run's for activations and gradients.
    """

    def __init__(self, device: torch.device, codec: Codec) -> None:
        self.device = device
        self.codec = codec
        self._compute: torch.cuda.Stream | None = None
        self._outgoing: torch.cuda.Stream | None = None
        self._incoming: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._compute = _stream(device)
            self._outgoing, self._incoming = (_stream(device, priority=_HIGH_PRIORITY) for _ in range(2))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run the training thread's work on its own stream; all of it, also what writes parameters."""
        if self._compute is None:
            yield
            return
        around = torch.cuda.current_stream(self.device)
        self._compute.wait_stream(around)
        with torch.cuda.stream(self._compute):
            yield
        around.wait_stream(self._compute)

    def pack_result(self, made: ComputedTensor, tail: Tensor | None = None) -> Tensor:
        """Pack ``made`` and append ``tail``, packed bytes on the host: (m,) uint8 on the host.

        Raises ``CodecError`` if a value is infinite or not a number.
        """
        if made.ready is not None:
            made.ready.synchronize()  # waiting on the stream instead would delay other tensors' transfers
        with _synchronized(self._outgoing):
            data = pack(made.tensor, self.codec)
            if self._outgoing is None:
                return data.cpu() if tail is None else torch.cat([data.cpu(), tail])
            size_bytes = data.numel()
            host = self.allocate_host(size_bytes + (0 if tail is None else tail.numel()))
            host[:size_bytes].copy_(data, non_blocking=True)
            if tail is not None:
                host[size_bytes:].copy_(tail)
            return host

    def allocate_host(self, size_bytes: int) -> Tensor:
        """Allocate (size_bytes,) uint8 on the host, uninitialised; pinned for a GPU.

        torch caches pinned memory for later allocations, so no more is held than was once in use at a time.
        """
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._incoming is not None)

    def unpack_received(self, packed: Tensor, form: TensorHeader) -> tuple[Tensor, float]:
        """Unpack (m,) uint8 on the host: to the device if that is a GPU, for use inside ``computing``, else on the CPU.

        Returns the root mean square of its values, too. Raises ``WireError`` for bytes that do not fit ``form``.
        """
        if self._compute is None:
            tensor = unpack(packed, form, self.codec)
            return tensor, root_mean_square(tensor)
        with _synchronized(self._incoming):
            tensor = unpack(packed.to(self.device, non_blocking=True), form, self.codec)
            size = root_mean_square(tensor)
        # The tensor's memory belongs to the incoming stream, which would reuse it while computations still read it.
        tensor.record_stream(self._compute)
        return tensor, size


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's values; infinite or NaN if one of them is, or if they are huge."""
    return tensor.float().square().mean().sqrt().item()


@contextmanager
def _synchronized(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on a stream and wait for the end of its work, also after an error."""
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
    """Make an event whose waiters sleep, since spinning would take processors from other threads."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
