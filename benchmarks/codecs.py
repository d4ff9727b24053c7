"""Speed, bytes and error of every codec on one thread, beside memcpy, bitsandbytes, plain torch and numpy.

Gigabytes a second are of the float32 that goes in or comes out. Tensors are the size of a round's chunk (1 MiB), one
after the other through all values, as the averager does it; ``memcpy`` is one copy of the whole. Errors are relative,
in the L2 norm, on normal random values and on the gradient of a training step of the gpt recipe.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import console, parser, publish
from torch import Tensor

from shoal.compression import fast
from shoal.compression.codec import Codec
from shoal.compression.registry import CODEC_NAMES, get_codec
from shoal.peer.recipes import load_recipe
from shoal.swarm.run_file import parse_run_file

CHUNK = 1 << 18

RUN = """
[run]
name = "codecs"
seed = 1
[recipe]
name = "gpt"
settings = { layers = 4, width = 384, heads = 6, context = 128 }
[round]
tokens = 1
"""


@dataclass(frozen=True)
class Subject:
    """Something that codes chunks: ``encode`` a chunk, ``decode`` what that gave into a tensor, add it up."""

    codec: str
    path: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Any]
    accumulate: Callable[[Any, Tensor], Any] | None
    size_bytes: Callable[[Any], int]


def of_codec(codec: Codec, path: str) -> Subject:
    return Subject(
        codec.name,
        path,
        codec.encode,
        lambda packed, out: codec.decode(packed, out.numel(), out),
        lambda packed, total: codec.accumulate(packed, total, 0.5),
        lambda packed: packed.numel(),
    )


@contextmanager
def only_torch() -> Iterator[None]:
    """Without the compiled kernels."""
    kept = dict(fast._ready)
    fast._ready.clear()
    try:
        yield
    finally:
        fast._ready.update(kept)


def peers(device: str) -> list[Subject]:
    """What else there is on this machine."""
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        cast = Subject(
            str(dtype).removeprefix("torch."),
            "plain torch cast",
            lambda values, dtype=dtype: values.to(dtype),
            lambda packed, out: out.copy_(packed),
            lambda packed, total: total.add_(packed.float(), alpha=0.5),
            lambda packed: packed.numel() * packed.itemsize,
        )
        found.append(cast)
    found.append(Subject("int8", "plain numpy", _numpy_encode, _numpy_decode, None, lambda packed: packed[1].size * 1))
    if importlib.util.find_spec("bitsandbytes"):
        functional = importlib.import_module("bitsandbytes.functional")
        found.append(
            Subject(
                "int8",
                "bitsandbytes",
                lambda values: functional.quantize_blockwise(values, blocksize=4096),
                lambda packed, out: functional.dequantize_blockwise(*packed, out=out),
                None,
                lambda packed: packed[0].numel() + 4 * packed[1].absmax.numel(),
            )
        )
    if importlib.util.find_spec("hivemind"):
        hivemind = importlib.import_module("hivemind.compression")
        for name in ("Uniform8BitQuantization", "BlockwiseQuantization", "Float16Compression"):
            theirs = getattr(hivemind, name)()
            found.append(
                Subject(
                    name,
                    "hivemind",
                    theirs.compress,
                    lambda packed, out, theirs=theirs: out.copy_(theirs.extract(packed)),
                    None,
                    lambda packed: len(packed.buffer),
                )
            )
    return found


def _numpy_encode(values: Tensor) -> tuple[Any, Any]:
    rows = values.numpy().reshape(-1, 1024)
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    return scales, np.rint(rows / scales).astype(np.int8)


def _numpy_decode(packed: tuple[Any, Any], out: Tensor) -> None:
    np.multiply(packed[1], packed[0], out=out.numpy().reshape(-1, 1024))
