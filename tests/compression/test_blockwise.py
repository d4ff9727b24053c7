"""int8 and int4: error bounds, golden bytes, and refused scales and codes. The contract of all codecs: test_codecs."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import blockwise, gaussian, needs_numba, same_bits, use
from torch import Tensor

from shoal.compression.blockwise import Blockwise
from shoal.compression.formats import CodecError
from shoal.compression.kernels import loader
from shoal.compression.registry import get_codec

FLOAT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny

CODECS = [*(blockwise(bits, block) for bits in (8, 4) for block in (None, 4)), blockwise(8, 6, 5), blockwise(4, 6, 7)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, FLOAT_MAX, -FLOAT_MAX, TINY, 127 * TINY, 7 * TINY, 1.4e-45, -1.4e-45]),
)
vectors = st.lists(floats, max_size=40).map(lambda xs: torch.tensor(xs, dtype=torch.float32))


def test_kernels_are_compiled_ahead_in_the_background() -> None:
    pytest.importorskip("numba", reason="the compiled kernels need numba (pip install 'shoal[fast]')")
    (thread,) = loader.compile_ahead(["blockwise"])
    assert [thread] == loader.compile_ahead(["blockwise"])
    assert thread is not threading.current_thread()
    thread.join()
    assert loader.kernels("blockwise") is not None


@every_codec
@given(values=vectors)
@settings(deadline=None)
def test_the_error_is_bounded_by_the_scale(codec: Blockwise, values: Tensor) -> None:
    decoded = codec.decode(codec.encode(values), len(values)).double()
    largest = 2 ** (codec.bits - 1) - 1
    for start in range(0, len(values), codec.block):
        exact = values[start : start + codec.block].double()
        absmax = float(exact.abs().max())
        step = absmax / largest * (0.5 if codec.seed is None else 1.0)
        bound = absmax if absmax < largest * TINY else step * (1 + 1e-5) + absmax * 2.0**-22
        assert bool(((decoded[start : start + codec.block] - exact).abs() <= bound).all())


def test_stochastic_rounding_is_right_on_average_and_from_its_seed() -> None:
    values = torch.full((60_000,), 0.3)
    values[::1000] = 127.0
    decoded = [blockwise(8, 1000, seed).decode(blockwise(8, 1000, seed).encode(values), 60_000) for seed in (1, 1, 2)]
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.equal(decoded[0], decoded[2])
    small = decoded[0][values < 1.0]
    assert set(small.tolist()) == {0.0, 1.0}
    # Five standard deviations of the mean of 59,940 draws.
    assert abs(float(small.mean()) - 0.3) < 5 * (0.3 * 0.7 / 59_940) ** 0.5


def test_golden_bytes() -> None:
    values = torch.tensor([1.0, -0.5, 0.25, 127.0, -127.0, 3.6, 0.0])
    assert blockwise(8, 4).encode(values).numpy().tobytes().hex() == "0000803f0000803f0100007f810400"
    assert blockwise(4, 4).encode(values).numpy().tobytes().hex() == "922491419224914188f88188"
    decoded = blockwise(8, 4).decode(bytes.fromhex("0000803f0000803f0100007f810400"), 7)
    assert decoded.tolist() == [1.0, 0.0, 0.0, 127.0, -127.0, 4.0, 0.0]
    # By hand: the scales are 127 / 7 in float32, and 0x88, 0xf8, 0x81, 0x88 hold 0, 0, 0, 7, -7, 0, 0.
    decoded = blockwise(4, 4).decode(bytes.fromhex("922491419224914188f88188"), 7)
    assert decoded.tolist() == [0.0, 0.0, 0.0, 127.0, -127.0, 0.0, 0.0]
    assert blockwise(8, 4, seed=7).encode(values).numpy().tobytes().hex() == "0000803f0000803f01ff007f810400"


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), TINY / 2, FLOAT_MAX])
@pytest.mark.parametrize("codec", [blockwise(8, 4), blockwise(4, 4)], ids=["int8", "int4"])
def test_bad_scales_are_refused(codec: Blockwise, scale: float) -> None:
    packed = codec.encode(torch.ones(8))
    packed[4:8] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(CodecError, match="scale"):
        codec.decode(packed, 8)


@pytest.mark.parametrize("codec", [blockwise(8, 4), blockwise(4, 4)], ids=["int8", "int4"])
def test_the_lowest_code_under_the_largest_scale_is_refused(codec: Blockwise) -> None:
    packed = codec.encode(torch.full((4,), -FLOAT_MAX))
    assert bool(torch.isfinite(codec.decode(packed, 4)).all())
    packed[4:] = 0x80 if codec.bits == 8 else 0
    with pytest.raises(CodecError, match="code is too low"):
        codec.decode(packed, 4)


def test_other_widths_are_refused() -> None:
    with pytest.raises(CodecError, match=r"int8, int4, .* not 'int3'"):
        get_codec("int3")


@needs_numba
@pytest.mark.parametrize("block", [32, 1024, 8192, 1000])
@pytest.mark.parametrize("lead", [0, 1, 7])
def test_the_bits_do_not_depend_on_where_values_lie(block: int, lead: int) -> None:
    codec, n = blockwise(8, block), 20_000
    room = torch.empty(n + 32)
    first = -room.data_ptr() // 4 % 16 + lead  # so many values after the beginning of a line
    values, residual, left = gaussian(n, 1), gaussian(n, 2) * 0.01, room[first : first + n]
    with use("torch"):
        there, lost = codec.encode(values), torch.empty(n)
        packed = codec.encode_residual(values, residual, lost)
        mean = codec.decode(packed, n)
    with use("numba"):
        assert torch.equal(codec.encode(values), there)
        assert torch.equal(codec.encode_residual(values, residual, left), packed)
        assert same_bits(left, lost)
        assert codec.decode_all([packed], [left]) == []
        assert same_bits(left, mean)
        left.copy_(residual)
        assert torch.equal(codec.encode_residual(values, left), packed)
        assert same_bits(left, lost)


@needs_numba
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 31, 2047, 2500])
def test_one_bad_value_among_many_is_found(bad: float, at: int) -> None:
    codec, values = blockwise(8, 1024), gaussian(2600)
    values[at] = bad
    with use("numba"):
        with pytest.raises(CodecError, match=f" at {at} of"):
            codec.encode(values)
        with pytest.raises(CodecError, match=f" at {at} of"):
            codec.encode_residual(values, torch.zeros(2600), torch.empty(2600))


@needs_numba
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_whole_strips_have_the_bits_of_single_values(data: st.DataObject) -> None:
    codec, n = blockwise(8, 32), data.draw(st.integers(32, 100))
    draw = st.lists(floats, min_size=8, max_size=8).map(lambda some: torch.tensor(some).repeat(13)[:n])
    values, residual, left, lost = data.draw(draw), data.draw(draw) * 0.25, torch.empty(n), torch.empty(n)
    with use("torch"):
        there = codec.encode(values)
        packed = codec.encode_residual(values * 0.5, residual, lost)
    with use("numba"):
        assert torch.equal(codec.encode(values), there)
        assert torch.equal(codec.encode_residual(values * 0.5, residual, left), packed)
    assert same_bits(left, lost)
