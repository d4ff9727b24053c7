"""Values in run files that are not one field's alone: codecs with their options, and settings of any shape."""

from __future__ import annotations

import math
from typing import Any

from shoal.compression.codec import Codec, CodecError
from shoal.compression.coding import Coding, Shapes
from shoal.compression.registry import get_codec, get_coding

MAX_SETTINGS_DEPTH = 8


def make_coding(setting: str | dict[str, Any], shapes: Shapes) -> Coding:
    """What a setting names, for tensors of these ``shapes``. Raises ``CodecError``."""
    return get_coding(*_name_and_options(setting), shapes)


def make_codec(setting: str | dict[str, Any]) -> Codec:
    """The one codec that a setting names, for tensors of any shape. Raises ``CodecError``."""
    return get_codec(*_name_and_options(setting))


def _name_and_options(setting: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(setting, str):
        return setting, {}
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise CodecError('a table of a codec has its name, as in { name = "int8", block = 4096 }')
    return name, options


def check_plain(value: Any, where: str, depth: int = MAX_SETTINGS_DEPTH) -> None:
    """Settings have one JSON, the same on every machine, as the hash needs it."""
    if depth == 0:
        raise ValueError(f"{where[:80]}: expected at most {MAX_SETTINGS_DEPTH} levels")
    match value:
        case dict():
            for key, inner in value.items():
                check_plain(inner, f"{where}.{key}" if where else key, depth - 1)
        case list():
            for index, inner in enumerate(value):
                check_plain(inner, f"{where}.{index}", depth - 1)
        case bool() | str():
            pass
        case int() if -(2**63) <= value < 2**63:
            pass
        case float() if math.isfinite(value):
            pass
        case _:
            raise ValueError(f"{where}: expected a text, truth value, finite number, array or table")
