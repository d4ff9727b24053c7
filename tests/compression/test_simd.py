"""Streaming stores write to their place alone, wherever a vector begins."""

import pytest
import torch
from tests.compression.codec_cases import blockwise, gaussian, needs_numba, same_bits, use
from torch import Tensor

from shoal.compression.blockwise import Blockwise, Summand
from shoal.compression.scratch import empty_aligned

_LINE = 16
OFFSETS = [0, 1, 8, 15]
CODECS = [blockwise(8), blockwise(8, 6), blockwise(8, 8192), blockwise(4), blockwise(8, 100, 3)]
SIZES = [1, 15, 17, 4096, 4097, 3 * 8192 + 5]
pytestmark = needs_numba


def place(n: int, off: int) -> Tensor:
    """``(n + 2,) float32`` of NaN that begins ``off`` values behind the start of a cache line."""
    room = torch.full((n + 2 + 2 * _LINE + off,), float("nan"))
    return room[-(room.data_ptr() // 4) % _LINE + off :][: n + 2]


@pytest.mark.parametrize("off", OFFSETS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", SIZES)
def test_what_is_lost_is_written_to_its_place_alone(n: int, codec: Blockwise, off: int) -> None:
    values, residual = gaussian(n, 1), gaussian(n, 2)
    with use("torch"):
        expected = torch.empty(n)
        packed = codec.encode_residual(values, residual, expected)
    room = place(n, off)
    with use("numba"):
        assert torch.equal(codec.encode_residual(values, residual, room[1:-1]), packed)
        assert same_bits(room[1:-1], expected)
    assert bool(room[0].isnan() and room[-1].isnan()), "a neighbour was overwritten"


@pytest.mark.parametrize("off", OFFSETS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", SIZES)
def test_what_a_mean_loses_is_written_to_its_place_alone(n: int, codec: Blockwise, off: int) -> None:
    summands = [Summand(weight, codec.encode(gaussian(n, seed))) for seed, weight in enumerate([1.0, 3.0])]
    with use("torch"):
        total, expected = torch.zeros(n), torch.empty(n)
        for one in summands:
            codec.accumulate(one.packed, total, one.weight)
        packed = codec.encode_residual(total / 4.0, torch.zeros(n), expected)
    room, written = place(n, off), torch.empty_like(packed)
    with use("numba"):
        assert codec.encode_mean(summands, 4.0, room[1:-1], written) is not None
    assert same_bits(room[1:-1], expected)
    assert torch.equal(written, packed)
    assert bool(room[0].isnan() and room[-1].isnan()), "a neighbour was overwritten"


@pytest.mark.parametrize("n", [1, 1000, 3_000_000])
def test_vectors_of_whole_models_begin_a_cache_line(n: int) -> None:
    vector = empty_aligned(n)
    assert (vector.data_ptr() % 64, vector.numel(), vector.dtype) == (0, n, torch.float32)
