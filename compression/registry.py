"""The codecs by the names and options that run files and messages use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec, CodecError
from shoal.compression.floats import FloatCodec

_Options = Mapping[str, type]
_BLOCKWISE: _Options = {"block": int, "seed": int}

_CODECS: dict[str, tuple[Callable[..., Codec], _Options]] = {
    "float32": (partial(FloatCodec, "float32", torch.float32), {}),
    "bfloat16": (partial(FloatCodec, "bfloat16", torch.bfloat16), {}),
    "float16": (partial(FloatCodec, "float16", torch.float16), {}),
    "int8": (partial(Blockwise, 8), _BLOCKWISE),
    "int4": (partial(Blockwise, 4), _BLOCKWISE),
}

CODEC_NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every name that ``get_codec`` knows."""


def get_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """The codec called ``name``, with these options. CodecError, naming the known ones, for any other."""
    if name not in _CODECS:
        raise CodecError(f"expected one of {', '.join(CODEC_NAMES)}, not {name!r}")
    make, known = _CODECS[name]
    for option, value in (options or {}).items():
        if option not in known:
            has = f"{name} has {', '.join(known)}" if known else f"{name} has none"
            raise CodecError(f"unknown option {option!r} of codec {name}: {has}")
        if type(value) is not known[option]:
            raise CodecError(f"{option} of codec {name}: expected {known[option].__name__}, not {value!r}")
    return make(**(options or {}))
