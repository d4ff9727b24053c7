"""Named tensors as safetensors files: cut into shards, and written in pieces without a copy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.peer.training.anchor import bytes_of
from shoal.peer.training.parameters import split_by_layout
from shoal.swarm.protocol.types import TensorSpec

SHARD_BYTES = 64 * 2**20
PIECE_BYTES = 2**22
"""Bytes that are read or written at a time."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def can_be_saved(tensor: Tensor) -> bool:
    """Whether the tensor is plain and dense, of a type that safetensors files can hold."""
    return (
        tensor.dtype in DTYPE_NAMES and tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)
    )


def shards(layout: Sequence[TensorSpec], limit_bytes: int = SHARD_BYTES) -> list[tuple[TensorSpec, ...]]:
    """Cut a layout into files of at most ``limit_bytes`` of the anchor; a larger tensor gets a file of its own.

    The files of the outer optimizer have the same tensors as those of the anchor, of each of its vectors."""
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in layout:
        size = 4 * spec.elements
        if not files or size > room:
            files.append([])
            room = limit_bytes
        files[-1].append(spec)
        room -= size
    return [tuple(file) for file in files]


def state_shard(values: Tensor, specs: Sequence[TensorSpec]) -> dict[str, dict[str, Tensor]]:
    """Views of the tensors of a shard, whose values are (1 + slots, k) float32: by name, for ``anchor`` and ``outer``.

    Names of the latter begin with the vector's number: ``0.NAME``."""
    rows = enumerate(split_by_layout(row, tuple(specs)) for row in values[1:])
    outer = {f"{at}.{name}": tensor for at, row in rows for name, tensor in row.items()}
    return {"anchor": split_by_layout(values[0], tuple(specs)), **({"outer": outer} if outer else {})}


def file_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of these tensors, in pieces of a few MiB.

    Pieces of contiguous CPU tensors are the tensors' own memory; of other devices one piece at a time is copied, and of
    what is not contiguous one tensor. The library's own writer would copy every tensor first."""
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    yield _header((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered)
    for _, tensor in ordered:
        flat, size = tensor.detach().contiguous().view(-1), PIECE_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), size):
            yield bytes_of(flat[start : start + size].cpu())


def file_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file of these names, types and shapes; the values follow in the same order."""
    return _header(tensors, {"__metadata__": dict(metadata)})


def _header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], first: Mapping[str, object] | None = None
) -> bytes:
    header: dict[str, object] = dict(first or {})
    at = 0
    for name, dtype, shape in tensors:
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
