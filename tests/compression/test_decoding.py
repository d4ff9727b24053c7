"""Vectors that are decoded together have the bits that each has alone, and one bad one does not spoil the others."""

import pytest
import torch
from tests.compression.codec_cases import blockwise, gaussian, needs_numba, same_bits, use
from torch import Tensor

from shoal.compression.codec_map import Piece, decode_all
from shoal.compression.formats import CodecError
from shoal.compression.registry import get_codec

paths = pytest.mark.parametrize("path", ["torch", pytest.param("numba", marks=needs_numba)])
_LINE = 16


def decoded(path: str, pieces: list[Piece]) -> dict[int, CodecError]:
    with use(path):
        return decode_all(pieces)


def place(n: int, off: int = 0) -> Tensor:
    """``(n,) float32`` of NaN, ``off`` values behind the start of a cache line, with NaN behind it."""
    room = torch.full((n + 2 * _LINE + off,), float("nan"))
    return room[-(room.data_ptr() // 4) % _LINE + off :][: n + 1]


@paths
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [6, 100, 256, 1024, 2048])
def test_all_are_decoded_as_each_is_alone(path: str, bits: int, block: int) -> None:
    codec, sizes = blockwise(bits, block), (1, 15, 16, 1024, 4096, 5000)
    packed = [codec.encode(gaussian(n, seed)) for seed, n in enumerate(sizes)]
    for off in (0, 1, 8):
        rooms = [place(n, off) for n in sizes]
        assert decoded(path, [Piece(codec, one, room[:-1]) for one, room in zip(packed, rooms, strict=True)]) == {}
        for one, room in zip(packed, rooms, strict=True):
            assert same_bits(room[:-1], codec.decode(one, room.numel() - 1))
            assert bool(room[-1].isnan()), "a neighbour was overwritten"


@paths
def test_codecs_may_differ(path: str) -> None:
    codecs = [get_codec(name) for name in ("int8", "int8", "float16", "int4", "int8", "topk")]
    packed = [codec.encode(gaussian(8192, seed)) for seed, codec in enumerate(codecs)]
    outs = [torch.empty(8192) for _ in codecs]
    assert decoded(path, list(map(Piece, codecs, packed, outs))) == {}
    for codec, one, out in zip(codecs, packed, outs, strict=True):
        assert same_bits(out, codec.decode(one, 8192))


@paths
@pytest.mark.parametrize("spoil", ["nan", "short"])
def test_what_does_not_decode_is_named_and_the_others_are_decoded(path: str, spoil: str) -> None:
    codec = blockwise(8)
    packed = [codec.encode(gaussian(2048, seed)) for seed in range(4)]
    bad = packed[2].clone()
    bad[:4] = torch.tensor([0x00, 0x00, 0xC0, 0x7F], dtype=torch.uint8)  # a scale of NaN
    given = [*packed[:2], bad if spoil == "nan" else bad[:-1], packed[3]]
    outs = [torch.empty(2048) for _ in given]
    errors = decoded(path, [Piece(codec, one, out) for one, out in zip(given, outs, strict=True)])
    assert list(errors) == [2]
    assert isinstance(errors[2], CodecError)
    for index in (0, 1, 3):
        assert same_bits(outs[index], codec.decode(packed[index], 2048))


@paths
def test_unusual_scales_are_looked_at_closely(path: str) -> None:
    """Some that are no good for any code are good for these."""
    codec = blockwise(8, 4)
    packed = codec.encode(torch.tensor([3.4e38, 1.0, -3.4e38, 0.0]))
    out = torch.empty(4)
    assert decoded(path, [Piece(codec, packed, out)]) == {}
    assert same_bits(out, codec.decode(packed, 4))
