"""Registry of codecs: the codec of a format, or of a name with options."""

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
    """Return the codec of this format; equal formats share one object."""
    return TopK(form) if isinstance(form, TopKFormat) else _BLOCK_CODECS[form.kind](form)


def get_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """Return the codec called ``name``, with these options. Raises CodecError, with the known names, for any other."""
    return codec_of(named_format(name, options))
