"""The codecs by the names that run files and messages use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec, CodecError
from shoal.compression.floats import FloatCodec

_CODECS: dict[str, Callable[[], Codec]] = {
    "float32": lambda: FloatCodec("float32", torch.float32),
    "bfloat16": lambda: FloatCodec("bfloat16", torch.bfloat16),
    "float16": lambda: FloatCodec("float16", torch.float16),
    "int8": Blockwise,
    "int4": lambda: Blockwise(4),
}

CODEC_NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every name that ``get_codec`` knows."""


def get_codec(name: str) -> Codec:
    """The codec called ``name``. CodecError, naming the known ones, when there is none."""
    make = _CODECS.get(name)
    if make is None:
        raise CodecError(f"no codec is called {name!r}; there are {', '.join(CODEC_NAMES)}")
    return make()
