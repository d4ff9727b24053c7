"""A mean that is encoded at once has the bits of one that is added up, divided and encoded step by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import floats, gaussian, needs_numba, same_bits, use
from torch import Tensor

from shoal.compression.codec import Codec, largest_of
from shoal.compression.formats import CodecError
from shoal.compression.registry import get_codec
from shoal.compression.weighted_mean import EncodingLoss, WeightedMean

paths = pytest.mark.parametrize("path", ["torch", pytest.param("numba", marks=needs_numba)])
N = 700


@dataclass(frozen=True)
class Summand:
    """Values that are packed with ``codec``, and their weight."""

    codec: Codec
    values: Tensor
    weight: float


def step_by_step(summands: Sequence[Summand], codec: Codec, divisor: float) -> tuple[Tensor, Tensor]:
    """The packed mean and what that lost, every intermediate vector written out."""
    total = torch.zeros(summands[0].values.numel())
    for one in summands:
        total += one.codec.decode(one.codec.encode(one.values), total.numel()) * torch.tensor(one.weight)
    mean = total / torch.tensor(divisor) + 0.0
    packed = codec.encode(mean)
    return packed, mean - codec.decode(packed, mean.numel())


def at_once(summands: Sequence[Summand], codec: Codec, divisor: float) -> tuple[Tensor, EncodingLoss]:
    n = summands[0].values.numel()
    work = WeightedMean(n)
    for one in summands:
        work.add_packed(one.codec, one.codec.encode(one.values), one.weight)
    packed = torch.empty(codec.packed_bytes(n), dtype=torch.uint8)
    return packed, work.encode(codec, divisor, torch.full((n,), math.nan), packed)


INT8, INT4, FLOAT16, FLOAT32 = (get_codec(name) for name in ("int8", "int4", "float16", "float32"))
SMALL_BLOCKS, SEEDED = get_codec("int8", {"block": 64}), get_codec("int8", {"seed": 7})
MIXED = {
    "int8": ([INT8, INT8, INT8, INT8], INT8),
    "one alone": ([INT8], INT8),
    "int4": ([INT4, INT4, INT4], INT4),
    "small blocks": ([SMALL_BLOCKS, SMALL_BLOCKS], SMALL_BLOCKS),
    "a seeded mean of unseeded ones": ([INT8, INT8], SEEDED),
    "others' blocks": ([INT8, INT8, SMALL_BLOCKS], INT8),
    "encoded otherwise": ([INT8, INT8], INT4),
    "floats between": ([INT8, FLOAT16, FLOAT32, INT8], INT8),
    "floats": ([FLOAT16, FLOAT32, FLOAT16], FLOAT16),
    "after floats": ([FLOAT16, INT8, INT8], INT8),
}


@paths
@pytest.mark.parametrize("codecs", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("n", [1, 64, N, 3000])
def test_the_bits_are_those_of_every_step_by_itself(path: str, codecs: tuple[list[Codec], Codec], n: int) -> None:
    of_summands, of_mean = codecs
    summands = [Summand(codec, gaussian(n, seed), 1.0 + 7 * seed) for seed, codec in enumerate(of_summands)]
    with use(path):
        packed, lost = at_once(summands, of_mean, 31.0)
        expected, left = step_by_step(summands, of_mean, 31.0)
    assert torch.equal(packed, expected)
    assert same_bits(lost.values, left)
    assert float(left.abs().max()) <= lost.largest < 0.5


@paths
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_whatever_the_values(path: str, data: st.DataObject) -> None:
    n, times = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 7]))
    draw = st.lists(floats, min_size=n, max_size=n).map(lambda values: torch.tensor(values).repeat(times))
    codec = get_codec("int8", {"block": data.draw(st.sampled_from([6, 32]))})
    weights = data.draw(st.lists(st.sampled_from([1.0, 3.0, 1e6]), min_size=1, max_size=4))
    summands = [Summand(codec, data.draw(draw), weight) for weight in weights]
    divisor = sum(weights)
    with use(path):
        try:
            expected, left = step_by_step(summands, codec, divisor)
        except CodecError:
            with pytest.raises(CodecError):
                at_once(summands, codec, divisor)
            return
        packed, lost = at_once(summands, codec, divisor)
    assert torch.equal(packed, expected)
    assert same_bits(lost.values, left)
    assert largest_of(left) <= lost.largest


@paths
@pytest.mark.parametrize("n", [2, 2048])
def test_a_negative_mean_too_small_for_any_number_is_zero_without_a_sign(path: str, n: int) -> None:
    work, packed = WeightedMean(n), torch.empty(INT8.packed_bytes(n), dtype=torch.uint8)
    with use(path):
        for weight, values in ((1.4e-45, [-1.0, 0.0]), (1.0, [0.0, 1.0])):
            work.add_packed(INT8, INT8.encode(torch.tensor(values).repeat(n // 2)), weight)
        lost = work.encode(INT8, 4.0, torch.full((n,), math.nan), packed)
    assert same_bits(lost.values[::2], torch.zeros(n // 2))


@paths
def test_what_cannot_be_decoded_is_refused_and_adds_nothing(path: str) -> None:
    good, bad = INT8.encode(gaussian(N)), torch.full((INT8.packed_bytes(N),), 255, dtype=torch.uint8)
    packed, expected = torch.empty_like(good), torch.empty_like(good)
    with use(path):
        work, alone = WeightedMean(N), WeightedMean(N)
        for one in (work, alone):
            one.add_packed(INT8, good, 2.0)
        for refused in (bad, good[:-1], bytes(3)):
            with pytest.raises(CodecError):
                work.add_packed(INT8, refused, 1.0)
        work.encode(INT8, 2.0, torch.empty(N), packed)
        alone.encode(INT8, 2.0, torch.empty(N), expected)
    assert torch.equal(packed, expected)


@paths
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_is_finite(path: str, weight: float) -> None:
    with use(path), pytest.raises(CodecError, match="weight"):
        WeightedMean(N).add_packed(INT8, INT8.encode(gaussian(N)), weight)


@paths
def test_a_mean_that_is_not_finite_is_refused(path: str) -> None:
    values = gaussian(N)
    values[N - 1] = 3e38
    with use(path), pytest.raises(CodecError):
        at_once([Summand(INT8, values, 1.0), Summand(INT8, values, 1.0)], INT8, 1.0)
