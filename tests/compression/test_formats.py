"""Codec names and options: an unknown one is refused with the known ones, one out of range with the range."""

from typing import Any

import pytest

from shoal.compression.formats import CODEC_NAMES, CodecError
from shoal.compression.registry import get_codec

NAMES = ("float32", "bfloat16", "float16", "float8_e4m3", "int8", "int4", "int2", "sign", "topk")
KNOWN = {
    "float32": {},
    "bfloat16": {},
    **{name: {"block": 64} for name in ("float16", "float8_e4m3", "int2", "sign")},
    **{name: {"block": 64, "seed": 5} for name in ("int8", "int4")},
    "topk": {"k": 3, "values": "int8", "chunk": 64},
}
BLOCKS = [(name, "block", block) for name in KNOWN if "block" in KNOWN[name] for block in (0, -1, -64, 2**20 + 64)]


def test_the_names_are_those_of_the_wire() -> None:
    assert CODEC_NAMES == NAMES
    assert [get_codec(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize("name", ["zip", "", "INT8", "int8(block=64)"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(CodecError) as raised:
        get_codec(name)
    assert repr(name) in str(raised.value)
    assert ", ".join(NAMES) in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(CodecError, match=f"'level' of codec {name}") as raised:
        get_codec(name, {**KNOWN[name], "level": 3})
    assert ", ".join(KNOWN[name]) in str(raised.value)
    assert KNOWN[name] or "has none" in str(raised.value)


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in NAMES for option in KNOWN[name]])
def test_an_option_of_another_type_is_refused(name: str, option: str) -> None:
    assert f"{option}={KNOWN[name][option]}" in get_codec(name, KNOWN[name]).name
    others: list[Any] = [True, 64.0, None, [64], "64" if isinstance(KNOWN[name][option], int) else 64]
    for value in others:
        with pytest.raises(CodecError, match=rf"{option} of codec {name}: expected (int|str), not "):
            get_codec(name, {option: value})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *BLOCKS,
        *((name, "block", 3) for name in ("int8", "int4")),
        *((name, "block", block) for name in ("int2", "sign") for block in (4, 12, 2**17)),
        *((name, "seed", seed) for name in ("int8", "int4") for seed in (-1, 2**32)),
        *(("topk", "k", k) for k in (0, -1, 4097)),
        *(("topk", "chunk", chunk) for chunk in (0, 63, 2**16 + 1)),
        ("topk", "values", "4bit"),
    ],
)
def test_an_option_out_of_range_is_refused_with_the_range(name: str, option: str, value: Any) -> None:
    with pytest.raises(CodecError, match=r"(\d.*(to|and)|2bit, int8)") as raised:
        get_codec(name, {option: value})
    assert str(value) in str(raised.value)
