"""Every codec of the registry, on every path that it has, and helpers of the tests that share its contract."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec
from shoal.compression.formats import CODEC_NAMES, BlockFormat, CodecError, TopKFormat, named_format
from shoal.compression.kernels import loader
from shoal.compression.lowbit import Int2, Sign
from shoal.compression.registry import get_codec
from shoal.compression.topk import TopK

FLOAT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny


def blockwise(bits: int = 8, block: int | None = None, seed: int | None = None) -> Blockwise:
    """int8 or int4, in blocks of the default size for None."""
    default = named_format(f"int{bits}")
    assert isinstance(default, BlockFormat)
    return Blockwise(BlockFormat(default.kind, default.block if block is None else block, seed))


def sign(block: int = 512) -> Sign:
    return Sign(BlockFormat("sign", block))


def int2(block: int = 512) -> Int2:
    return Int2(BlockFormat("int2", block))


def topk(k: int = 64, values: str = "2bit", chunk: int = 4096) -> TopK:
    return TopK(TopKFormat(k, values, chunk))


# Small blocks as well, so that a few values already fill several.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CODEC_NAMES),
    ("float16", {"block": 5}),
    ("float8_e4m3", {"block": 16}),
    ("int8", {"block": 64}),
    ("int8", {"seed": 7}),
    ("int8", {"block": 6, "seed": 5}),
    ("int4", {"block": 32}),
    ("int4", {"block": 6, "seed": 2**32 - 1}),
    ("int2", {"block": 8}),
    ("sign", {"block": 64}),
    ("topk", {"k": 8, "values": "int8", "chunk": 256}),
    ("topk", {"k": 5, "chunk": 37}),
]
CODECS = [get_codec(name, options) for name, options in CASES]
OPTIONS = {codec.name: options for codec, (_, options) in zip(CODECS, CASES, strict=True)}


@contextmanager
def use(path: str) -> Iterator[None]:
    """Only the kernels of ``path``, ``torch`` or ``numba``, whatever has been compiled so far."""

    def kernels(name: str) -> ModuleType | None:
        return loader.import_kernels(name) if path == "numba" else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "kernels", kernels)
        yield


needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="the compiled kernels need numba (pip install 'shoal[fast]')"
)
_COMPILED = [codec for codec in CODECS if codec.name.startswith(("int8", "int4", "int2", "sign", "topk"))]
PATHS = [
    *(pytest.param((codec, "torch"), id=f"{codec.name}-torch") for codec in CODECS),
    *(pytest.param((codec, "numba"), id=f"{codec.name}-numba", marks=needs_numba) for codec in _COMPILED),
]

floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, FLOAT_MAX, -FLOAT_MAX, TINY, 127 * TINY, 7 * TINY, 1.4e-45, -1.4e-45, 449.0, 65505.0]),
)


def compiled() -> bool:
    """Whether it is the compiled kernels' turn."""
    return loader.kernels("blockwise") is not None


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def outcome(codec: Codec, packed: Any, n: int) -> Tensor | None:
    """What ``decode`` gives, always finite, or None where it refuses; ``accumulate`` and ``checked`` agree."""
    before = gaussian(n, 9)
    total = before.clone()
    try:
        decoded = codec.decode(packed, n)
    except CodecError:
        with pytest.raises(CodecError):
            codec.accumulate(packed, total, 0.3)
        assert same_bits(total, before)
        with pytest.raises(CodecError):
            codec.checked(packed, n)
        return None
    assert decoded.shape == (n,)
    assert bool(torch.isfinite(decoded).all())
    codec.checked(packed, n)
    codec.accumulate(packed, total, 0.3)
    # Of equal value, not of equal bits: where top-k sends nothing, a -0.0 in the total stays.
    assert torch.equal(total, before + decoded * torch.tensor(0.3))
    return decoded
