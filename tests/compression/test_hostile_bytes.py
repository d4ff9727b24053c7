"""Hostile bytes: every codec decodes them to finite values or refuses them, alike on both paths."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import OPTIONS, compiled, gaussian, outcome, same_bits, use

from shoal.compression.codec import Codec

# How often valid bytes of so many values are changed; a tenth as often where a codec has options.
MUTATIONS = {0: 20, 1: 300, 13: 700, 300: 1000}


def check(codec: Codec, packed: Any, n: int) -> None:
    """The bytes give finite values or are refused, and the torch path does the same with them."""
    decoded = outcome(codec, packed, n)
    if not compiled():
        return
    with use("torch"):
        expected = outcome(codec, packed, n)
    assert (decoded is None) == (expected is None)
    assert decoded is None or expected is None or same_bits(decoded, expected)


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """``raw`` cut off, made longer, replaced, or with one byte or up to three bits changed."""
    changed = bytearray(raw)
    match draw.randrange(8):
        case 0:
            return raw[: draw.randrange(len(raw) + 1)]
        case 1:
            return raw + draw.randbytes(draw.randrange(1, 9))
        case 2:
            return draw.randbytes(len(raw))
        case 3 | 4 if raw:
            changed[draw.randrange(len(raw))] = draw.choice((0x00, 0x7F, 0x80, 0xFF))
        case _ if raw:
            # Often among the first bytes, where scales are.
            places = min(len(raw), draw.choice((8, len(raw))))
            for _ in range(draw.randrange(1, 4)):
                changed[draw.randrange(places)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_changed_bytes(codec: Codec) -> None:
    draw = random.Random(codec.name)
    for n, times in MUTATIONS.items():
        raw = codec.encode(gaussian(n)).numpy().tobytes()
        for _ in range(times // 10 if OPTIONS[codec.name] else times):
            check(codec, mutated(raw, draw), n)


@given(data=st.data(), n=st.integers(0, 40))
@settings(max_examples=30)
def test_any_bytes(codec: Codec, data: st.DataObject, n: int) -> None:
    size = codec.packed_bytes(n)
    hot = st.sampled_from([0x00, 0x01, 0x7F, 0x80, 0xFF, 0x7C, 0xFC, 0x77])
    check(codec, bytes(data.draw(st.lists(hot | st.integers(0, 255), min_size=size, max_size=size))), n)
