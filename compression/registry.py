"""Codecs by their formats: the object that packs tensors as a format says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec
from shoal.compression.floats import FloatCodec, ScaledFloatCodec
from shoal.compression.formats import BlockFormat, TopKFormat, named_format
from shoal.compression.lowbit import Int2, Sign
from shoal.compression.topk import TopK

_BLOCK_CODECS: dict[str, Callable[[BlockFormat], Codec]] = {
    "float32": FloatCodec,
    "bfloat16": FloatCodec,
    "float16": ScaledFloatCodec,
    "float8_e4m3": ScaledFloatCodec,
    "int8": Blockwise,
    "int4": Blockwise,
    "int2": Int2,
    "sign": Sign,
}


@lru_cache(maxsize=256)
def codec_of(form: BlockFormat | TopKFormat) -> Codec:
    """The codec that packs in this format; equal formats share one."""
    return TopK(form) if isinstance(form, TopKFormat) else _BLOCK_CODECS[form.kind](form)


def get_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """The codec called ``name``, with these options. CodecError, naming the known ones, for any other."""
    return codec_of(named_format(name, options))
