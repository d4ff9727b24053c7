"""Subjects of the codec benchmark: our codecs on each of their paths, other libraries', and plain code."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import console
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.formats import CodecError
from shoal.compression.kernels import loader
from shoal.compression.registry import get_codec

WEIGHT = 0.5
BLOCK = 1024
ROWS = 4096
"""The plain codecs take whole rows of 1024 or 4096 values."""
BITSANDBYTES_BLOCKS = (4096, 1024, 256)
"""Its default, the block of our int8 (the same bytes), and the block of its 8-bit optimizers."""
TOP_K, TOP_CHUNK = 64, 4096
_NUMPY_TILE = 1 << 15
"""Values that numpy handles at a time: with their temporaries they stay in the second-level cache."""
_HIVEMIND = {"float16": "FLOAT16", "int8(uniform)": "UNIFORM_8BIT", "int8(quantile)": "QUANTILE_8BIT"}


@dataclass(frozen=True)
class Subject:
    """A codec of vectors ``(n,) float32``; ``decode`` takes whatever its ``encode`` returns.

    ``decode`` fills its second argument and returns it, or a tensor of its own.
    """

    codec: str
    path: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Tensor]
    accumulate: Callable[[Any, Tensor], Any]
    encode_residual: Callable[[Tensor, Tensor], Any]
    size_bytes: Callable[[Any], int]

    @property
    def kind(self) -> str:
        """The codec's name without its options."""
        return self.codec.partition("(")[0]


def of_codec(codec: Codec, path: str) -> Subject:
    return Subject(
        codec.name,
        path,
        codec.encode,
        lambda packed, out: codec.decode(packed, out.numel(), out),
        lambda packed, total: codec.accumulate(packed, total, WEIGHT),
        codec.encode_residual,
        lambda packed: int(packed.nbytes),
    )


def own(names: list[str], device: torch.device) -> list[Subject]:
    """Our codecs on every path that they have here; compiles the kernels."""
    codecs = [get_codec(name) for name in names]
    if "int8" in names:
        codecs += [get_codec("int8", {"block": block}) for block in BITSANDBYTES_BLOCKS if block != BLOCK]
    found = []
    for codec in codecs:
        try:
            codec.decode(codec.encode(torch.ones(ROWS, device=device)), ROWS)
        except (CodecError, RuntimeError, TypeError) as error:
            console.print(f"{codec.name} does not run on {device}: {error}", markup=False)
            continue
        found.append(of_codec(codec, "torch"))
        modules = [codec.kernels] if codec.kernels and device.type == "cpu" else []
        for thread in loader.compile_ahead(modules):
            thread.join()
        if modules and all(loader.kernels(module) for module in modules):
            found.append(of_codec(codec, "compiled"))
        elif modules:
            console.print(f"{codec.name} is not compiled here; pip install 'shoal[fast]' lets it be", markup=False)
    return found


def on_path(subject: Subject) -> AbstractContextManager[Any]:
    """Disable the compiled kernels for a subject that measures the torch path."""
    if subject.path == "torch":
        return mock.patch.object(loader, "kernels", _no_kernels)
    return nullcontext()


def _no_kernels(name: str) -> None:
    return None


def from_pair(
    codec: str,
    path: str,
    encode: Callable[[Tensor], Any],
    decode: Callable[[Any, Tensor], Tensor],
    size_bytes: Callable[[Any], int],
) -> Subject:
    """A subject that has ``encode`` and ``decode`` only; the rest is done with these, as its user would."""

    def accumulate(packed: Any, total: Tensor) -> None:
        total.add_(decode(packed, torch.empty_like(total)), alpha=WEIGHT)

    def encode_residual(values: Tensor, residual: Tensor) -> Any:
        corrected = values + residual
        packed = encode(corrected)
        torch.sub(corrected, decode(packed, residual), out=residual)
        return packed

    return Subject(codec, path, encode, decode, accumulate, encode_residual, size_bytes)


def peers(device: torch.device) -> list[Subject]:
    """All subjects available on this machine and device; prints a line for each library that is missing."""
    found = [*_casts(), _torch_int8(), _torch_topk()]
    if device.type == "cpu":
        found.append(_numpy_int8())
    for library, make in (("bitsandbytes", _bitsandbytes), ("hivemind", _hivemind)):
        if device.type != "cpu" and library == "hivemind":
            continue
        if importlib.util.find_spec(library) is None:
            console.print(f"{library} is not installed here: its rows are missing")
        else:
            found += make()
    return found


def limit_threads(threads: int) -> None:
    """Set the threads that torch, and an OpenMP library such as bitsandbytes', use for a call from this thread."""
    torch.set_num_threads(threads)
    try:
        # A count of its own for each calling thread; the library is the one that is loaded already.
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
    except OSError:
        return  # another system: no OpenMP library of that name that bitsandbytes could use


def _nbytes(packed: Any) -> int:
    return sum(int(part.nbytes) for part in packed)


def _casts() -> list[Subject]:
    def cast(name: str, dtype: torch.dtype) -> Subject:
        return from_pair(
            name,
            "torch cast",
            lambda values: values.to(dtype),
            lambda packed, out: out.copy_(packed),
            lambda packed: int(packed.nbytes),
        )

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn}
    return [cast(name, dtype) for name, dtype in kinds.items()]


def _torch_int8() -> Subject:
    def encode(values: Tensor) -> tuple[Tensor, Tensor]:
        rows = values.view(-1, BLOCK)
        scales = rows.abs().amax(1, keepdim=True) / 127
        return scales, (rows / scales).round_().to(torch.int8)

    def decode(packed: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        torch.mul(packed[1], packed[0], out=out.view(-1, BLOCK))
        return out

    return from_pair(f"int8(block={BLOCK})", "plain torch", encode, decode, _nbytes)


def _numpy_int8() -> Subject:
    def encode(values: Tensor) -> tuple[Any, Any]:
        rows = values.numpy().reshape(-1, BLOCK)
        scales, codes = np.empty((len(rows), 1), np.float32), np.empty(rows.shape, np.int8)
        step = _NUMPY_TILE // BLOCK
        scaled = np.empty((step, BLOCK), np.float32)
        for start in range(0, len(rows), step):
            tile = rows[start : start + step]
            work = scaled[: len(tile)]
            absmax = np.maximum(tile.max(1, keepdims=True), -tile.min(1, keepdims=True))
            np.divide(absmax, np.float32(127), out=scales[start : start + step])
            np.multiply(tile, np.float32(127) / absmax, out=work)
            np.rint(work, out=work)
            codes[start : start + step] = work
        return scales, codes

    def decode(packed: tuple[Any, Any], out: Tensor) -> Tensor:
        np.multiply(packed[1], packed[0], out=out.numpy().reshape(-1, BLOCK))
        return out

    return from_pair(f"int8(block={BLOCK})", "plain numpy", encode, decode, _nbytes)


def _torch_topk() -> Subject:
    def encode(values: Tensor) -> tuple[Tensor, Tensor]:
        rows = values.view(-1, TOP_CHUNK)
        indices = rows.abs().topk(TOP_K, dim=1, sorted=False).indices
        return indices, rows.gather(1, indices)

    def decode(packed: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        out.zero_().view(-1, TOP_CHUNK).scatter_(1, packed[0], packed[1])
        return out

    return from_pair("topk", "plain torch", encode, decode, _nbytes)


def _bitsandbytes() -> list[Subject]:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels for matrices, not used here
    functional: Any = importlib.import_module("bitsandbytes.functional")

    def blockwise(block: int, copied: bool) -> Subject:
        def decode(packed: Any, out: Tensor) -> Tensor:
            # Its own ``out`` is not implemented on the CPU.
            values: Tensor = functional.dequantize_blockwise(*packed)
            return out.copy_(values) if copied else values

        return from_pair(
            f"int8(block={block})",
            "bitsandbytes" if copied else "bitsandbytes, no out",
            lambda values: functional.quantize_blockwise(values, blocksize=block),
            decode,
            lambda packed: int(packed[0].nbytes + packed[1].absmax.nbytes),
        )

    return [blockwise(BITSANDBYTES_BLOCKS[0], False), *(blockwise(block, True) for block in BITSANDBYTES_BLOCKS)]


def _hivemind() -> list[Subject]:
    compression: Any = importlib.import_module("hivemind.compression")
    kinds: Any = importlib.import_module("hivemind.proto.runtime_pb2").CompressionType

    def codec(name: str, kind: int) -> Subject:
        return from_pair(
            name,
            "hivemind",
            lambda values: compression.serialize_torch_tensor(values, kind),
            lambda packed, out: out.copy_(compression.deserialize_torch_tensor(packed)),
            lambda packed: len(packed.buffer),
        )

    return [codec(name, kinds.Value(kind)) for name, kind in _HIVEMIND.items()]
