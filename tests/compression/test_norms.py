"""Norms of vectors and of packed vectors, and bounds on how much codecs lengthen them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import CODECS, PATHS, blockwise, floats, gaussian, int2, topk, use
from torch import Tensor

from shoal.compression.blockwise import linear_growth
from shoal.compression.codec import Codec
from shoal.compression.codec_map import Segmented
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CodecError, SegmentedFormat
from shoal.compression.norms import RELATIVE_ERROR, norms_of, squared_norm
from shoal.compression.range_reader import TensorReader

SUBNORMAL = 2.0**-126


def exact(values: Tensor) -> float:
    return float(values.double().square().sum())


def grows_no_more_than_it_says(codec: Codec, values: Tensor) -> float:
    """How much longer ``values`` became."""
    before, after = math.sqrt(exact(values)), math.sqrt(exact(codec.decode(codec.encode(values), values.numel())))
    assert after <= codec.growth * before * 1.0001 + SUBNORMAL * math.sqrt(values.numel())
    return after / before if before else 1.0


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e-5, 1.0, 1e10, 1e25, 3e38])
@pytest.mark.parametrize("n", [0, 1, 100, 2**15 - 1, 2**15 + 1, 100_000])
def test_norms_of_values_of_any_size(n: int, size: float) -> None:
    values = gaussian(n).clamp_(-1, 1) * size
    assert squared_norm(values) == pytest.approx(exact(values), rel=RELATIVE_ERROR, abs=0)
    (norm,) = norms_of(values, [(0, n)])
    assert math.sqrt(exact(values)) <= norm <= math.sqrt(exact(values)) * (1 + RELATIVE_ERROR)


def test_norms_of_small_values_beside_large_ones() -> None:
    values = torch.full((10,), 1e-30)
    assert squared_norm(values) == pytest.approx(1e-59, rel=1e-5)
    values[3] = 1e30
    assert squared_norm(values) == pytest.approx(1e60, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_finite_norm(bad: float) -> None:
    values = gaussian(40_000)
    values[35_000] = bad
    found = norms_of(values, [(0, 20_000), (20_000, 40_000)])
    assert math.isfinite(found[0])
    assert not math.isfinite(found[1])


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.parametrize("n", [1, 7, 37, 511, 4096, 70_001])
def test_the_norm_of_packed_values(case: tuple[Codec, str], n: int) -> None:
    codec, path = case
    with use(path):
        for size in (1.0, 1e-36, 1e30):
            packed = codec.encode(gaussian(n, 3) * size)
            assert codec.squared_norm(packed, n) == pytest.approx(exact(codec.decode(packed, n)), rel=RELATIVE_ERROR)
        assert codec.squared_norm(codec.encode(torch.zeros(n)), n) == 0.0


@pytest.mark.parametrize("case", PATHS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_norm_of_hostile_bytes_is_that_of_what_they_decode_to(case: tuple[Codec, str], data: st.DataObject) -> None:
    codec, path = case
    n = data.draw(st.integers(1, 100))
    size = codec.packed_bytes(n)
    packed = data.draw(st.binary(min_size=size, max_size=size))
    with use(path):
        try:
            decoded = codec.decode(bytearray(packed), n)
        except CodecError:
            return
        square = exact(decoded)
        assert codec.squared_norm(bytearray(packed), n) == pytest.approx(square, rel=RELATIVE_ERROR, abs=1e-300)


@pytest.mark.parametrize("case", PATHS)
@settings(max_examples=40, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=80))
def test_no_codec_makes_a_vector_longer_than_it_says(case: tuple[Codec, str], values: list[float]) -> None:
    codec, path = case
    with use(path):
        grows_no_more_than_it_says(codec, torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_nor_do_the_worst_of_vectors_grow_more(codec: Codec) -> None:
    """One large value a block, and all others halfway to the next code, or alike, or in two classes."""
    largest = 7 if codec.name.startswith("int4") else 127
    for n in (5000, 8192):
        for step in range(12):
            values = torch.full((n,), (step + 0.5001) / largest)
            values[:: getattr(codec, "block", 64)] = 1.0
            grows_no_more_than_it_says(codec, values)
            grows_no_more_than_it_says(codec, values.neg() * 1e20)
        for share in (0.001, 0.01, 0.1, 0.28, 0.5, 0.9):
            for ratio in (0.0, 0.3, 0.71, 1.3, 3.0):
                drawn = torch.rand(n, generator=torch.Generator().manual_seed(n))
                grows_no_more_than_it_says(codec, torch.where(drawn < share, ratio, 1.0))
        grows_no_more_than_it_says(codec, gaussian(n) ** 5)


def test_linear_codes_grow_nearly_as_much_as_they_say() -> None:
    values = torch.full((1024,), 3.5001 / 127)
    values[0] = 1.0
    assert 0.995 * blockwise().growth <= grows_no_more_than_it_says(blockwise(), values) <= blockwise().growth
    assert linear_growth(127, 1, 0.5) == 1.0
    assert blockwise(8).growth < blockwise(8, seed=1).growth < blockwise(4).growth < blockwise(4, seed=1).growth


def test_classes_of_values_may_grow_beyond_half_a_block() -> None:
    """Where ``int2`` takes values for larger than those that made its outer magnitude."""
    values = torch.cat([torch.zeros(146), torch.full((365,), 1.399), torch.full((1,), 1.8)])
    assert grows_no_more_than_it_says(int2(), values) > 1.2
    assert int2().growth == topk().growth > topk(values="int8").growth


def test_segments_grow_as_the_one_that_grows_most() -> None:
    codec = Segmented(SegmentedFormat(((4096, blockwise(4).format), (64, blockwise(8).format))))
    assert codec.growth == blockwise(4).growth
    packed = codec.encode(gaussian(4160))
    assert codec.squared_norm(packed, 4160) == pytest.approx(exact(codec.decode(packed, 4160)))


def test_a_residual_is_measured_once_as_long_as_it_stays() -> None:
    feedback, ranges = ErrorFeedback(100), [(0, 60), (60, 100)]
    assert feedback.residual_norms(ranges) == [0.0, 0.0]
    feedback.load(lambda memory: memory.copy_(gaussian(100)))
    first = feedback.residual_norms(ranges)
    assert first == norms_of(gaussian(100), ranges)
    assert feedback.residual_norms(ranges) is first
    feedback.scale(-3.0)
    assert feedback.residual_norms(ranges) == pytest.approx([3 * norm for norm in first])
    assert all(norm >= 3 * before for norm, before in zip(feedback.residual_norms(ranges), first, strict=True))
    feedback.begin(TensorReader(gaussian(100, 1)))
    feedback.discard()
    assert feedback.residual_norms(ranges) == pytest.approx([3 * norm for norm in first])
    feedback.begin(TensorReader(gaussian(100, 1)))
    feedback.commit()
    assert feedback.residual_norms(ranges) == norms_of(feedback.residual, ranges)
