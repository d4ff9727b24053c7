"""Named tensors as safetensors files: cut into shards, written in pieces without a copy, parsed from checked bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shoal.peer.checkpoints.source import refusal
from shoal.peer.training.anchor import bytes_of
from shoal.peer.training.parameters import split_by_layout
from shoal.swarm.protocol.types import TensorSpec

SHARD_BYTES = 64 * 2**20
_PIECE_BYTES = 2**22
_DTYPES = {
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
    return tensor.dtype in _DTYPES and tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def shards(named: Iterable[tuple[str, Tensor]], limit_bytes: int = SHARD_BYTES) -> list[dict[str, Tensor]]:
    """Cut the tensors, in their order, into files of at most ``limit_bytes``; a larger tensor gets a file of its
    own."""
    files: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if not files or size > room:
            files.append({})
            room = limit_bytes
        files[-1][name] = tensor
        room -= size
    return files


def vectors(values: Tensor, layout: tuple[TensorSpec, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Views of a state's values, (1 + slots, n) float32, as tensors by name: the anchor's, and the outer optimizer's.

    Names of the latter begin with the vector's number: ``0.NAME``."""
    anchor = split_by_layout(values[0], layout)
    rows = enumerate(split_by_layout(row, layout) for row in values[1:])
    outer = {f"{at}.{name}": tensor for at, row in rows for name, tensor in row.items()}
    return anchor, outer


def file_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of contiguous CPU tensors, in pieces of a few MiB that are the tensors' own memory.

    The library's own writer would copy every tensor first, and the file would have to be read again to be hashed."""
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    yield _header((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered)
    for _, tensor in ordered:
        data = bytes_of(tensor)
        for start in range(0, data.nbytes, _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]


def file_header(named: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file of these names and shapes; the values follow in the same order."""
    return _header(((name, dtype, shape) for name, shape in named), {"__metadata__": dict(metadata)})


def _header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], first: Mapping[str, object] | None = None
) -> bytes:
    header: dict[str, object] = dict(first or {})
    at = 0
    for name, dtype, shape in tensors:
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_file(data: bytes, place: str) -> dict[str, Tensor]:
    """The tensors of a file's checked content. Raises ``StateFileError`` for anything but a safetensors file."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise refusal(place, "its content", "safetensors", str(error)[:200]) from error


def fill(targets: Mapping[str, Tensor], files: Iterable[tuple[str, dict[str, Tensor]]]) -> None:
    """Copy the files' tensors into the float32 targets of the same names.

    Raises ``StateFileError`` unless each target is there once, as float32 in its shape, and nothing else."""
    missing = dict(targets)
    place = ""
    for place, tensors in files:
        for name, tensor in tensors.items():
            target = missing.pop(name, None)
            if target is None:
                raise refusal(place, f"tensor {name[:100]!r}", "a name of the layout, once", "another")
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                expected = f"{target.dtype} of shape {tuple(target.shape)}"
                raise refusal(place, f"tensor {name[:100]!r}", expected, f"{tensor.dtype} of {tuple(tensor.shape)}")
            target.copy_(tensor)
    if missing:
        raise refusal(place, "its tensors", f"also {next(iter(missing))[:100]!r}, as the layout says", "none")
