"""Activations, gradients and targets as packed bytes, and their way between a device and the host's memory.

The run's codec packs floating-point tensors; shape and dtype travel beside the bytes (``TensorHeader``). On a GPU the
training thread computes on a stream of its own and runs ahead of it, while worker threads pack and unpack on two
others, so that only packed bytes cross, from and to pinned memory. What these threads begin is over when they return or
raise: nothing reads or writes their memory after that. On a CPU nothing is copied.
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
"""Of one tensor; what a peer takes is bounded further by what it expects."""

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
        """The exact size on the wire. Raises ``WireError`` for what is no tensor that travels."""
        elements = self._elements()
        return elements * _INTEGERS[self.dtype].itemsize if self.dtype in _INTEGERS else codec.packed_bytes(elements)

    def check(self, shape: Sequence[int], dtypes: Sequence[str] = tuple(_FLOATS)) -> None:
        """Raises ``WireError`` unless it is what the receiver expects."""
        if self.shape != tuple(shape) or self.dtype not in dtypes:
            expected = " or ".join(dtypes)
            raise WireError(f"a tensor of {_shown(self.shape)} {self.dtype[:20]}; expected {tuple(shape)} {expected}")

    def _elements(self) -> int:
        if self.dtype not in _FLOATS and self.dtype not in _INTEGERS:
            raise WireError(f"a tensor of an unknown dtype {self.dtype[:20]!r}")
        # Python's integers do not overflow, and few dimensions keep the product small.
        if len(self.shape) > MAX_DIMENSIONS or any(not 0 < size <= MAX_ELEMENTS for size in self.shape):
            raise WireError(f"a tensor of shape {_shown(self.shape)}")
        elements = math.prod(self.shape)
        if elements > MAX_ELEMENTS:
            raise WireError(f"a tensor of {elements} elements; at most {MAX_ELEMENTS} travel")
        return elements


def pack(tensor: Tensor, codec: Codec) -> Tensor:
    """``(TensorHeader.of(tensor).packed_bytes(codec),) uint8`` on the tensor's device: a float32, bfloat16 or float16
    tensor by ``codec``, an integer one as it is. Raises ``CodecError`` when a value is NaN or infinite."""
    form = TensorHeader.of(tensor)
    assert form.dtype in _FLOATS or form.dtype in _INTEGERS, form.dtype
    flat = tensor.detach().reshape(-1)
    if form.dtype in _INTEGERS:
        return flat.contiguous().view(torch.uint8).clone()
    return codec.encode(flat.float().contiguous())


def unpack(packed: Packed, form: TensorHeader, codec: Codec) -> Tensor:
    """The tensor, on the CPU or where ``packed`` is; it never shares memory with ``packed``. Raises ``WireError`` for
    bytes that are not of that form."""
    expected = form.packed_bytes(codec)
    try:
        if form.dtype in _INTEGERS:
            raw = packed_tensor(packed, expected).clone()
            return raw.view(_INTEGERS[form.dtype]).view(form.shape)
        return codec.decode(packed, math.prod(form.shape)).to(_FLOATS[form.dtype]).view(form.shape)
    except CodecError as error:
        raise WireError(f"a tensor that cannot be unpacked: {error}") from error


def _shown(shape: tuple[int, ...]) -> str:
    return str(shape[:MAX_DIMENSIONS])[:200]


_FIRST = -1
"""Priority of a stream whose short work somebody waits for, beside long kernels."""


@dataclass(frozen=True)
class ComputedTensor:
    """Tensor that the training thread has computed or, on a GPU, will have at ``ready``."""

    tensor: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def here(cls, tensor: Tensor) -> ComputedTensor:
        """By the calling thread, on its current stream; before it begins anything else there."""
        if not tensor.is_cuda:
            return cls(tensor, None)
        ready = _event()
        torch.cuda.current_stream(tensor.device).record_event(ready)
        return cls(tensor, ready)


class Staging:
    """Transfers between a device and packed host memory.

    ``device``: of the stages, used by one training thread; ``codec``: the run's for activations and gradients.
    """

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

    def packed(self, made: ComputedTensor, tail: Tensor | None = None) -> Tensor:
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

    def unpacked(self, packed: Tensor, form: TensorHeader) -> Tensor:
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
    """Work on that stream and wait for its end, also after an error."""
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
    """Event whose waiters sleep rather than spin on a processor that other threads need."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
