"""The contract of every codec, and the error bounds of each."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression.blockwise import Int8Blockwise
from shoal.compression.codec import Codec, CodecError
from shoal.compression.registry import CODEC_NAMES, get_codec

FLOAT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny
SIZES = [0, 1, 2, 3, 255, 256, 257, 511, 513, 1000]

every_codec = pytest.mark.parametrize("codec", [get_codec(name) for name in CODEC_NAMES], ids=CODEC_NAMES)

floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, FLOAT_MAX, -FLOAT_MAX, TINY, 1.4e-45, -1.4e-45, 65504.0, 65520.0]),
)
vectors = st.lists(floats, max_size=40).map(lambda xs: torch.tensor(xs, dtype=torch.float32))


def ramp(n: int) -> Tensor:
    return torch.linspace(-3.0, 5.0, n) if n else torch.empty(0)


def int8_bound(values: Tensor, block: int) -> Tensor:
    """What int8 may err by, for each value: half a scale, and the rounding of float32."""
    bound = torch.empty(values.numel(), dtype=torch.float64)
    for start in range(0, values.numel(), block):
        part = values[start : start + block].double()
        scale = float(part.abs().max()) / 127
        bound[start : start + block] = part.abs().max() if scale < TINY * 1.001 else scale / 2
    return bound * (1 + 1e-6) + values.double().abs() * 2.0**-22


@every_codec
def test_name_leads_back_to_the_codec(codec: Codec) -> None:
    assert get_codec(codec.name).name == codec.name


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CodecError, match=r"'zip'.*float32, bfloat16, float16, int8"):
        get_codec("zip")


@every_codec
@pytest.mark.parametrize("n", SIZES)
def test_packed_bytes_is_exact(codec: Codec, n: int) -> None:
    packed = codec.encode(ramp(n))
    assert packed.dtype == torch.uint8
    assert packed.shape == (codec.packed_bytes(n),)
    decoded = codec.decode(packed, n)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (n,)
    torch.testing.assert_close(decoded, ramp(n), rtol=2**-8, atol=5 / 127 / 2 * 1.001)


def test_sizes_in_bytes() -> None:
    sizes = {
        name: [get_codec(name).packed_bytes(n) for n in (0, 1, 256, 257)] for name in ("float32", "bfloat16", "int8")
    }
    assert sizes == {
        "float32": [0, 4, 1024, 1028],
        "bfloat16": [0, 2, 512, 514],
        "int8": [0, 5, 260, 265],
    }


@every_codec
@given(values=vectors)
@settings(deadline=None)
def test_decoded_is_finite_and_a_second_trip_changes_nothing_much(codec: Codec, values: Tensor) -> None:
    n = values.numel()
    decoded = codec.decode(codec.encode(values), n)
    assert bool(torch.isfinite(decoded).all())
    again = codec.decode(codec.encode(decoded), n)
    torch.testing.assert_close(again, decoded, rtol=2**-20, atol=1e-36)


@every_codec
@pytest.mark.parametrize("wrong", [-1, 1, 4])
def test_wrong_length_is_refused(codec: Codec, wrong: int) -> None:
    n = 300
    packed = torch.zeros(codec.packed_bytes(n) + wrong, dtype=torch.uint8)
    for form in (packed, packed.numpy().tobytes()):
        with pytest.raises(CodecError):
            codec.decode(form, n)
    with pytest.raises(CodecError):
        codec.decode(b"\0", 0)


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_encode_refuses_what_is_not_finite(codec: Codec, bad: float, at: int) -> None:
    values = ramp(300)
    values[at] = bad
    with pytest.raises(CodecError):
        codec.encode(values)


@every_codec
def test_encode_refuses_other_tensors(codec: Codec) -> None:
    for values in (ramp(8).double(), ramp(8).view(2, 4), ramp(8)[::2]):
        with pytest.raises(CodecError):
            codec.encode(values)


@every_codec
@given(data=st.data(), n=st.integers(0, 20))
@settings(deadline=None, max_examples=200)
def test_hostile_bytes_never_decode_to_something_not_finite(codec: Codec, data: st.DataObject, n: int) -> None:
    size = codec.packed_bytes(n)
    hot = st.sampled_from([0x00, 0x7F, 0x80, 0xFF, 0x7C, 0xFC])
    raw = bytes(data.draw(st.lists(hot | st.integers(0, 255), min_size=size, max_size=size)))
    try:
        decoded = codec.decode(raw, n)
    except CodecError:
        return
    assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "dtype"), [(n, getattr(torch, n)) for n in ("float32", "bfloat16")])
def test_float_decode_refuses_what_is_not_finite(name: str, dtype: torch.dtype, bad: float) -> None:
    packed = torch.tensor([1.0, bad, 2.0], dtype=dtype).view(torch.uint8)
    with pytest.raises(CodecError):
        get_codec(name).decode(packed, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-40, -1e-40])
@pytest.mark.parametrize("at", [0, 1])
def test_int8_decode_refuses_bad_scales(bad: float, at: int) -> None:
    scales = torch.ones(2)
    scales[at] = bad
    packed = torch.cat([scales.view(torch.uint8), torch.zeros(300, dtype=torch.uint8)])
    with pytest.raises(CodecError):
        get_codec("int8").decode(packed, 300)


def test_int8_decode_refuses_a_product_that_overflows() -> None:
    def packed(code: int) -> bytes:
        return np.float32(FLOAT_MAX / 127.5).tobytes() + np.int8(code).tobytes()

    codec = get_codec("int8")
    assert bool(torch.isfinite(codec.decode(packed(127), 1)).all())
    with pytest.raises(CodecError):
        codec.decode(packed(-128), 1)


@every_codec
def test_decode_takes_any_bytes_at_any_alignment(codec: Codec) -> None:
    n = 300
    packed = codec.encode(ramp(n))
    expected = codec.decode(packed, n)
    raw = packed.numpy().tobytes()
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), packed])[1:]
    strided = torch.stack([packed, packed], dim=1)[:, 0]
    forms = (raw, bytearray(raw), memoryview(raw), memoryview(bytearray(b"x" + raw))[1:], shifted, strided)
    for form in forms:
        assert torch.equal(codec.decode(form, n), expected)


@every_codec
def test_results_share_no_memory_with_what_they_came_from(codec: Codec) -> None:
    values = ramp(300)
    packed = codec.encode(values)
    before = packed.clone()
    values.zero_()
    assert torch.equal(packed, before)
    decoded = codec.decode(packed, 300)
    packed.zero_()
    assert torch.equal(decoded, codec.decode(before, 300))


@given(values=vectors)
@settings(deadline=None)
def test_float32_is_exact_to_the_bit(values: Tensor) -> None:
    codec = get_codec("float32")
    decoded = codec.decode(codec.encode(values), values.numel())
    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("name", "bits", "normal"), [("bfloat16", 8, 2.0**-126)])
@given(values=vectors)
@settings(deadline=None)
def test_small_floats_err_by_half_a_bit_and_saturate(name: str, bits: int, normal: float, values: Tensor) -> None:
    largest = torch.finfo(getattr(torch, name)).max
    codec = get_codec(name)
    decoded = codec.decode(codec.encode(values), values.numel())
    clamped = values.clamp(-largest, largest)
    error = (decoded.double() - clamped.double()).abs()
    assert bool((error <= clamped.double().abs().clamp(min=normal) * 2.0**-bits).all())


@given(values=vectors, block=st.integers(1, 50))
@settings(deadline=None, max_examples=300)
def test_int8_errs_by_half_a_scale(values: Tensor, block: int) -> None:
    codec = Int8Blockwise(block)
    packed = codec.encode(values)
    assert packed.numel() == codec.packed_bytes(values.numel())
    decoded = codec.decode(packed, values.numel())
    assert bool(((decoded.double() - values.double()).abs() <= int8_bound(values, block)).all())


@pytest.mark.parametrize("n", [100, 256, 300, 512, 700])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-36, 1e-3, 1.0, 1e30, FLOAT_MAX])
def test_int8_errs_by_half_a_scale_at_any_size(n: int, size: float) -> None:
    values = (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 2 - 1) * size
    values[0] = size
    codec = Int8Blockwise()
    decoded = codec.decode(codec.encode(values), n)
    assert bool(((decoded.double() - values.double()).abs() <= int8_bound(values, 256)).all())


def test_int8_layout_is_scales_then_codes() -> None:
    codec = Int8Blockwise(4)
    packed = codec.encode(torch.tensor([127.0, -127.0, 2.5, 3.5, 0.0, 0.0, 0.0, 0.0, -254.0, 2.0]))
    raw = packed.numpy().tobytes()
    assert np.frombuffer(raw[:12], "<f4").tolist() == [1.0, 0.0, 2.0]
    assert np.frombuffer(raw[12:], "i1").tolist() == [127, -127, 2, 4, 0, 0, 0, 0, -127, 1]


def test_int8_blocks_do_not_touch_each_other() -> None:
    values = torch.cat([torch.full((256,), 1e-3), torch.full((256,), 1e6), torch.full((10,), -2e-5)])
    codec = get_codec("int8")
    torch.testing.assert_close(codec.decode(codec.encode(values), 522), values, rtol=1e-6, atol=0)


def test_int8_scales_are_never_subnormal() -> None:
    for size in (TINY, TINY * 100, TINY * 126.9, TINY * 127, TINY * 128):
        packed = Int8Blockwise(4).encode(torch.tensor([size, -size / 3]))
        (scale,) = np.frombuffer(packed.numpy().tobytes()[:4], "<f4").tolist()
        assert scale == 0.0 or scale >= TINY


def test_int8_refuses_a_block_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Int8Blockwise(0)
