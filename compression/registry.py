"""The codecs, and how they are put to use, by the names and options that run files use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec, CodecError
from shoal.compression.coding import Auto, Coding, Shapes, Uniform
from shoal.compression.floats import FloatCodec, ScaledFloatCodec
from shoal.compression.lowbit import Int2, Sign
from shoal.compression.topk import TopK

_Options = Mapping[str, type]
_BLOCK: _Options = {"block": int}
_BLOCKWISE: _Options = {"block": int, "seed": int}

_CODECS: dict[str, tuple[Callable[..., Codec], _Options]] = {
    "float32": (partial(FloatCodec, "float32", torch.float32), {}),
    "bfloat16": (partial(FloatCodec, "bfloat16", torch.bfloat16), {}),
    "float16": (partial(ScaledFloatCodec, "float16", torch.float16), _BLOCK),
    "float8_e4m3": (partial(ScaledFloatCodec, "float8_e4m3", torch.float8_e4m3fn), _BLOCK),
    "int8": (partial(Blockwise, 8), _BLOCKWISE),
    "int4": (partial(Blockwise, 4), _BLOCKWISE),
    "int2": (Int2, _BLOCK),
    "sign": (Sign, _BLOCK),
    "topk": (TopK, {"k": int, "values": str, "chunk": int}),
}

CODEC_NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every name that ``get_codec`` knows."""

CODING_NAMES: tuple[str, ...] = (*CODEC_NAMES, "auto")
"""Every name that ``get_coding`` knows."""

_AUTO: dict[str, str] = {"matrices": "int4", "tables": "int8", "small": "float16"}


def get_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """The codec called ``name``, with these options. CodecError, naming the known ones, for any other."""
    if name not in _CODECS:
        raise _unknown(name, CODEC_NAMES)
    make, known = _CODECS[name]
    return make(**_checked(name, options or {}, known))


def get_coding(name: str, options: Mapping[str, Any] | None = None, shapes: Shapes = ()) -> Coding:
    """The coding called ``name``: a codec for everything, or ``auto``, which chooses by ``shapes``.

    The options of ``auto`` are the names of the codecs that it chooses from: ``matrices``, ``tables``, ``small``.
    CodecError, naming the known ones, for another name or option.
    """
    if name == "auto":
        chosen = {**_AUTO, **_checked(name, options or {}, dict.fromkeys(_AUTO, str))}
        return Auto(shapes, **{role: get_codec(codec) for role, codec in chosen.items()})
    if name not in _CODECS:
        raise _unknown(name, CODING_NAMES)
    return Uniform(get_codec(name, options))


def _unknown(name: str, known: tuple[str, ...]) -> CodecError:
    return CodecError(f"expected one of {', '.join(known)}, not {name!r}")


def _checked(name: str, options: Mapping[str, Any], known: _Options) -> Mapping[str, Any]:
    for option, value in options.items():
        if option not in known:
            has = f"{name} has {', '.join(known)}" if known else f"{name} has none"
            raise CodecError(f"unknown option {option!r} of codec {name}: {has}")
        if type(value) is not known[option]:
            raise CodecError(f"{option} of codec {name}: expected {known[option].__name__}, not {value!r}")
    return options
