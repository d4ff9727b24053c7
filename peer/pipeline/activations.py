"""Activations, their gradients and targets as bytes: packed by the run's codec, with shape and dtype beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec, CodecError, Packed, packed_tensor
from shoal.swarm.errors import WireError

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**31
"""Of one tensor; what a peer takes is bounded further by what it expects."""

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTEGERS = {"int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}


@dataclass(frozen=True)
class TensorForm:
    """What a message says of a tensor whose bytes are fetched apart. ``dtype`` is torch's name for it."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
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
    """``(TensorForm.of(tensor).packed_bytes(codec),) uint8`` on the tensor's device: a float32, bfloat16 or float16
    tensor by ``codec``, an integer one as it is. Raises ``CodecError`` when a value is NaN or infinite."""
    form = TensorForm.of(tensor)
    assert form.dtype in _FLOATS or form.dtype in _INTEGERS, form.dtype
    flat = tensor.detach().reshape(-1)
    if form.dtype in _INTEGERS:
        return flat.contiguous().view(torch.uint8).clone()
    return codec.encode(flat.float().contiguous())


def unpack(packed: Packed, form: TensorForm, codec: Codec) -> Tensor:
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
