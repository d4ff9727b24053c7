"""Codec maps by name, as run files name them."""

from collections.abc import Mapping
from typing import Any

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import Shapes, named_format_map


def get_codec_map(name: str, options: Mapping[str, Any] | None = None, shapes: Shapes = ()) -> CodecMap:
    """Return the codec map called ``name``: see ``formats.named_format_map``. Raises CodecError as that does."""
    return CodecMap(named_format_map(name, options, shapes))
