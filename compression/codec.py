"""Base class of all codecs, from float32 vectors to packed bytes and back, and checks of their arguments."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.compression.formats import CodecError, CodecFormat
from shoal.compression.kernels import loader
from shoal.compression.scratch import scratch

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("shoal.compression packs little-endian and has only been written for such machines")

Packed: TypeAlias = Tensor | bytes | bytearray | memoryview
"""Packed bytes: a ``(m,) uint8`` tensor, or a buffer that was received."""


_ROUNDS_TO_INFINITY = (2.0 - 2.0**-24) * 2.0**127
"""The smallest float64 that is infinite as a float32."""


class Codec(ABC):
    """Codec of one format: packs float32 vectors into bytes and unpacks them.

    Stateless, so one object serves any number of threads at once. Decoding is deterministic to the bit: every machine
    that decodes the same bytes holds the same floats. Each codec's wire layout stands in its module, and golden vectors
    in the tests hold it.
    """

    kernels: ClassVar[str | None] = None
    """Name of the compiled kernels that speed it up, for ``loader.compile_ahead``; None if there are none."""

    def __init__(self, form: CodecFormat) -> None:
        self.format = form

    @property
    def name(self) -> str:
        """See ``CodecFormat.name``."""
        return self.format.name

    def packed_bytes(self, n: int) -> int:
        """See ``CodecFormat.packed_bytes``."""
        return self.format.packed_bytes(n)

    @property
    @abstractmethod
    def growth(self) -> float:
        """Bound on how much packing lengthens a vector: ``norm(decode(encode(x))) <= growth * norm(x)`` for each ``x``.

        Proven for each codec, not measured, up to float32 rounding (1e-4) and 2**-126 a value."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Pack ``values``, ``(n,) float32``, contiguous, into ``(packed_bytes(n),) uint8`` on the same device.

        The result never shares memory with ``values``. Raises CodecError, which says where, when a value is NaN
        or infinite.
        """

    @abstractmethod
    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """Unpack ``n`` values into ``out``, ``(n,) float32``, contiguous, or a new tensor; each of them finite.

        The result never shares memory with ``packed``. Raises CodecError when ``packed`` is not
        ``packed_bytes(n)`` long, or when a value in it is NaN or infinite: the bytes may be hostile. What
        ``out`` holds then is undefined.
        """

    @abstractmethod
    def squared_norm(self, packed: Packed, n: int) -> float:
        """The squared L2 norm of ``decode(packed)``, to within ``norms.RELATIVE_ERROR``.

        Of bytes that do not decode it may be anything, NaN as well, or raise CodecError.
        """

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """Pack ``values + residual`` and leave in ``left``, ``(n,) float32``, what the packing lost.

        ``corrected = values + residual``; the result is ``encode(corrected)``, and ``left`` becomes
        ``corrected - decode(result)``, each operation rounded once. ``values`` stays as it is, and so does
        ``residual``, unless no ``left`` is given: then it is overwritten. ``packed``, ``(packed_bytes(n),) uint8``, is
        where the result goes, if not into a new tensor. Raises CodecError when ``corrected`` is not finite;
        ``residual`` is as before then, and what ``left`` and ``packed`` hold undefined. ``left`` may be a view of the
        memory of ``residual``: quicker than none, as ``residual`` is undefined after an error then.
        """
        values = checked_values(values)
        residual = checked_out(residual, values.numel(), values.device)
        left = residual if left is None else checked_out(left, values.numel(), values.device)
        corrected = torch.add(values, residual, out=scratch("corrected", values.numel(), values.device))
        made = self.encode(corrected)
        torch.sub(corrected, self.decode(made, corrected.numel(), left), out=left)
        return made if packed is None else packed_buffer(made.numel(), values.device, packed).copy_(made)

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """Add ``weight * decode(packed)`` to ``total``, ``(n,) float32``: the product rounded, then the sum.

        ``weight`` is rounded to float32 first. Raises CodecError as ``decode`` does, with ``total`` unchanged.
        """
        weight = rounded_weight(weight)
        decoded = self.decode(packed, total.numel())
        checked_out(total, decoded.numel(), decoded.device).add_(decoded.mul_(weight))

    def checked(self, packed: Packed, n: int) -> Tensor:
        """Return ``packed`` as a read-only tensor that decodes to ``n`` values. Raises CodecError as ``decode``."""
        tensor = packed_tensor(packed, self.packed_bytes(n))
        self.decode(tensor, n, scratch("checked", n, tensor.device))
        return tensor

    def compiled(self, device: torch.device) -> ModuleType | None:
        """Return its compiled kernels once they are ready, if ``device`` is the CPU; else None."""
        return loader.kernels(self.kernels) if self.kernels is not None and device.type == "cpu" else None


def checked_range(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of ``values``, ``(n,)`` of any float type; ``(0.0, 0.0)`` for none.

    Raises CodecError when one of them is NaN or infinite. One pass, no temporary: ``aminmax`` hands on NaN.
    """
    if values.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(values)
    smallest, largest = float(low), float(high)
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        raise not_finite_error(values)
    return smallest, largest


def largest_of(values: Tensor) -> float:
    """The largest absolute value of ``(n,) float32``: 0 for an empty vector, NaN when one value is NaN."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def checked_values(values: Tensor) -> Tensor:
    """Return ``values`` without autograd history. Raises CodecError unless contiguous ``(n,) float32``."""
    if values.dtype != torch.float32 or values.dim() != 1:
        raise CodecError(f"a codec takes (n,) float32, not {tuple(values.shape)} {values.dtype}")
    if not values.is_contiguous():
        raise CodecError("a codec takes a contiguous tensor")
    return values.detach()


def checked_out(out: Tensor, n: int, device: torch.device) -> Tensor:
    """Return ``out``, to be written to. Raises CodecError unless contiguous ``(n,) float32`` on ``device``."""
    out = checked_values(out)
    if out.numel() != n or out.device != device:
        raise CodecError(f"expected {n} values on {device}, not {out.numel()} on {out.device}")
    return out


def packed_buffer(packed_bytes: int, device: torch.device, packed: Tensor | None = None) -> Tensor:
    """Return the buffer for packed bytes: ``packed``, or a new ``(packed_bytes,) uint8`` on ``device``.

    Raises CodecError when ``packed`` has another shape, type or device, or is not contiguous and aligned for float32.
    """
    if packed is None:
        return torch.empty(packed_bytes, dtype=torch.uint8, device=device)
    if packed.dtype != torch.uint8 or packed.shape != (packed_bytes,) or packed.device != device:
        raise CodecError(f"expected {packed_bytes} bytes on {device}, not {tuple(packed.shape)} {packed.dtype}")
    if not packed.is_contiguous() or packed.data_ptr() % 4 or packed.storage_offset() % 4:
        raise CodecError("a codec packs into contiguous bytes, aligned for float32")
    return packed


def in_place(residual: Tensor, left: Tensor | None) -> Tensor:
    """Return the vector that an in-place codec overwrites: ``residual``, or ``left`` as a copy of it; both ``(n,)``."""
    return residual if left is None else checked_out(left, residual.numel(), residual.device).copy_(residual)


def not_finite_error(values: Tensor) -> CodecError:
    """Return the CodecError that names the first of ``values``, ``(n,) float32``, that is NaN or infinite."""
    where = int(torch.isfinite(values).logical_not_().to(torch.uint8).argmax())
    return CodecError(f"the values hold NaN or infinity: {float(values[where])} at {where} of {values.numel()}")


def rounded_weight(weight: float) -> float:
    """Return ``weight`` as the nearest float32. Raises CodecError unless it is finite."""
    if not abs(weight) < _ROUNDS_TO_INFINITY:
        raise CodecError(f"a weight is a finite float32, not {weight}")
    return float(np.float32(weight))


def packed_tensor(packed: Packed, packed_bytes: int) -> Tensor:
    """Return ``packed`` as a contiguous ``(packed_bytes,) uint8`` tensor that can be viewed as any 4-byte type.

    Shares memory with ``packed`` where alignment and writability allow, so the result is to be read only.
    Raises CodecError when ``packed`` has another length or is no vector of bytes.
    """
    if isinstance(packed, Tensor):
        if packed.dtype != torch.uint8 or packed.dim() != 1:
            raise CodecError("packed bytes are (m,) uint8")
        length, view = packed.numel(), None
    else:
        view = memoryview(packed)
        if not view.c_contiguous:
            raise CodecError("packed bytes are contiguous")
        length = view.nbytes
    if length != packed_bytes:
        raise CodecError(f"{length} packed bytes where there should be {packed_bytes}")
    if length == 0:
        return torch.empty(0, dtype=torch.uint8, device=packed.device if isinstance(packed, Tensor) else None)
    if view is None:
        assert isinstance(packed, Tensor)
        tensor = packed.contiguous()
    elif view.readonly:
        # torch warns of a tensor over read-only memory: one copy of the packed (small) bytes instead.
        tensor = torch.empty(length, dtype=torch.uint8)
        tensor.numpy()[:] = np.frombuffer(view.cast("B"), dtype=np.uint8)
    else:
        tensor = torch.frombuffer(view, dtype=torch.uint8)
    if tensor.data_ptr() % 4 or tensor.storage_offset() % 4:
        tensor = tensor.clone()
    return tensor
