"""The contract of ``codec.py``: every codec of the registry keeps it, with the compiled kernels and without."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.codec_cases import FLOAT_MAX, OPTIONS, PATHS, compiled, floats, gaussian, outcome, same_bits, use
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.formats import CODEC_NAMES, CodecError

SIZES = (0, 1, 2, 3, 7, 8, 9, 36, 255, 256, 257, 1000, 4095, 4096, 4097, 9000)
# More than any codec works on at a time.
MANY = 270_001


# Encoding.


def test_sizes_types_and_names(codec: Codec) -> None:
    for n in SIZES:
        packed = codec.encode(gaussian(n))
        assert (packed.dtype, packed.shape, packed.is_contiguous()) == (torch.uint8, (codec.packed_bytes(n),), True)
        decoded = codec.decode(packed, n)
        assert (decoded.dtype, decoded.shape, decoded.is_contiguous()) == (torch.float32, (n,), True)
    name = codec.name.partition("(")[0]
    assert name in CODEC_NAMES
    shown = re.findall(r"(\w+)=(\w+)", codec.name)
    assert {option: str(value) for option, value in OPTIONS[codec.name].items()} == dict(shown)


def test_kernels_are_asked_for_where_both_paths_are_tested(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("shoal.compression.kernels.loader.kernels", asked.append)
    codec.encode(torch.ones(2))
    assert bool(asked) == any(codec in param.values[0] for param in PATHS if "numba" in param.values[0])


def test_encode_leaves_its_input_and_shares_no_memory_with_it(codec: Codec) -> None:
    values = gaussian(5000)
    kept = values.clone()
    packed = codec.encode(values.requires_grad_()).clone()
    assert same_bits(values, kept)
    again = codec.encode(values)
    values.detach().zero_()
    assert torch.equal(again, packed)


def test_what_is_not_finite_is_refused_and_named(codec: Codec) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for at in (0, 63, 64, 255, 256, 4095, 4096, 4999):
            values, residual = gaussian(5000), gaussian(5000, 1)
            before = residual.clone()
            values[at] = values[-1] = bad
            with pytest.raises(CodecError, match=rf"NaN or infinity: {bad} at {at} of 5000"):
                codec.encode(values)
            with pytest.raises(CodecError, match=rf"NaN or infinity: {bad} at {at} of 5000"):
                codec.encode_residual(values, residual)
            assert same_bits(residual, before)


def test_the_residual_is_as_before_when_the_very_last_value_is_bad(codec: Codec) -> None:
    values, residual = gaussian(MANY), gaussian(MANY, 1)
    values[-1] = math.nan
    before = residual.clone()
    with pytest.raises(CodecError, match=f"nan at {MANY - 1} of {MANY}"):
        codec.encode_residual(values, residual)
    assert same_bits(residual, before)


def test_a_sum_that_overflows_is_refused(codec: Codec) -> None:
    values, residual = torch.full((300,), FLOAT_MAX), torch.zeros(300)
    residual[290] = FLOAT_MAX
    before = residual.clone()
    with pytest.raises(CodecError, match="NaN or infinity: inf at 290 of 300"):
        codec.encode_residual(values, residual)
    assert same_bits(residual, before)


def test_the_residual_is_what_was_lost(codec: Codec) -> None:
    for n in SIZES:
        values, residual = gaussian(n), gaussian(n, 1) * 0.3
        corrected, kept = values + residual, values.clone()
        packed = codec.encode_residual(values, residual)
        assert torch.equal(packed, codec.encode(corrected))
        assert same_bits(residual, corrected - codec.decode(packed, n))
        assert same_bits(values, kept)


def test_bytes_and_what_was_lost_go_where_one_likes(codec: Codec) -> None:
    for n in (*SIZES, MANY):
        values, residual = gaussian(n), gaussian(n, 1) * 0.3
        kept, lost = (values.clone(), residual.clone()), residual.clone()
        expected = codec.encode_residual(values, lost)
        around, left = torch.full((expected.numel() + 8,), 99, dtype=torch.uint8), torch.full((n + 2,), math.nan)
        room = around[4:-4]
        packed = codec.encode_residual(values, residual, left[1:-1], room)
        assert packed.data_ptr() == room.data_ptr()
        assert torch.equal(packed, expected)
        assert same_bits(left[1:-1], lost)
        assert bool((around[:4] == 99).all() and (around[-4:] == 99).all() and left[[0, -1]].isnan().all())
        assert same_bits(values, kept[0])
        assert same_bits(residual, kept[1])


def test_what_was_lost_may_go_to_the_very_memory_of_the_residual(codec: Codec) -> None:
    for n in (*SIZES, MANY):
        values, lost, residual = gaussian(n), gaussian(n, 1) * 0.3, gaussian(n + 16, 1) * 0.3
        residual[:n] = lost
        kept = values.clone()
        expected = codec.encode_residual(values, lost)
        assert torch.equal(codec.encode_residual(values, residual[:n], residual[:n]), expected)
        assert same_bits(residual[:n], lost)
        assert same_bits(values, kept)


def test_the_residual_is_as_before_when_what_is_lost_goes_elsewhere(codec: Codec) -> None:
    values, residual = gaussian(MANY), gaussian(MANY, 1)
    values[-1] = math.inf
    before = residual.clone()
    with pytest.raises(CodecError, match=f"inf at {MANY - 1} of {MANY}"):
        codec.encode_residual(values, residual, torch.empty(MANY))
    assert same_bits(residual, before)


def test_room_of_another_kind_is_refused(codec: Codec) -> None:
    values, size = gaussian(300), codec.packed_bytes(300)
    for left in (torch.ones(299), torch.ones(300).double(), torch.ones(600)[::2]):
        with pytest.raises(CodecError):
            codec.encode_residual(values, torch.zeros(300), left)
    room = torch.zeros(2 * size + 8, dtype=torch.uint8)
    for packed in (room[: size - 1], room[: size + 1], room[1 : size + 1], room[: 2 * size : 2], room[:size].int()):
        with pytest.raises(CodecError):
            codec.encode_residual(values, torch.zeros(300), None, packed)
    assert not bool(room.any())


@given(data=st.data(), values=st.lists(floats, max_size=40))
def test_any_values_are_encoded_alike_on_both_paths(codec: Codec, data: st.DataObject, values: list[float]) -> None:
    n = len(values)
    first = torch.tensor(values, dtype=torch.float32)
    second = torch.tensor(data.draw(st.lists(floats, min_size=n, max_size=n)), dtype=torch.float32)

    def encoded() -> tuple[Tensor, Tensor | None, Tensor]:
        residual, left = second.clone(), torch.empty(n)
        try:
            packed = codec.encode_residual(first, residual)
            assert torch.equal(codec.encode_residual(first, second, left), packed)
            assert same_bits(left, residual)
            return codec.encode(first), packed, residual
        except CodecError:
            assert same_bits(residual, second)
            assert not bool(torch.isfinite(first + second).all())
            return codec.encode(first), None, residual

    packed, fused, residual = encoded()
    decoded = outcome(codec, packed, n)
    assert decoded is not None
    if fused is not None:
        assert same_bits(residual, first + second - codec.decode(fused, n))
    if not compiled():
        return
    with use("torch"):
        expected, expected_fused, expected_residual = encoded()
        assert same_bits(codec.decode(packed, n), decoded)
    assert torch.equal(packed, expected)
    assert fused is expected_fused is None or torch.equal(fused, expected_fused)
    assert same_bits(residual, expected_residual)


# Decoding.


def test_other_tensors_are_refused(codec: Codec) -> None:
    packed = codec.encode(gaussian(300))
    kept = packed.clone()
    for other in (torch.ones(300).double(), torch.ones(150, 2), torch.ones(600)[::2], torch.ones(300).int()):
        with pytest.raises(CodecError):
            codec.encode(other)
        with pytest.raises(CodecError):
            codec.encode_residual(other, torch.zeros(300))
        with pytest.raises(CodecError):
            codec.encode_residual(gaussian(300), other)
        with pytest.raises(CodecError):
            codec.decode(packed, 300, other)
        with pytest.raises(CodecError):
            codec.accumulate(packed, other, 1.0)
        assert bool((other == 1).all())
    for n in (0, 1, 299, 301):
        with pytest.raises(CodecError):
            codec.decode(packed, 300, torch.empty(n))
        with pytest.raises(CodecError):
            codec.encode_residual(gaussian(300), torch.zeros(n))
    assert torch.equal(packed, kept)


def test_decode_and_accumulate_leave_the_neighbours(codec: Codec) -> None:
    packed = codec.encode(gaussian(300))
    decoded = codec.decode(packed, 300)
    for before in (1, 2, 37):
        room = torch.full((301 + before,), 7.0)
        out = room[before : 300 + before]
        assert codec.decode(packed, 300, out) is out
        assert same_bits(out, decoded)
        codec.accumulate(packed, out, 2.0)
        assert torch.equal(out, decoded + decoded * 2.0)
        assert bool((room[:before] == 7.0).all())
        assert room[-1] == 7.0


def test_packed_bytes_are_taken_in_any_form(codec: Codec) -> None:
    packed = codec.encode(gaussian(300))
    expected = codec.decode(packed, 300)
    raw = packed.numpy().tobytes()
    shifted = [torch.cat([torch.zeros(shift, dtype=torch.uint8), packed])[shift:] for shift in (1, 2, 3)]
    strided = torch.stack([packed, packed], dim=1)[:, 0]
    views = (memoryview(raw), memoryview(bytearray(b"x" + raw))[1:], memoryview(b"xyz" + raw)[3:], packed.numpy())
    for form in (raw, bytearray(raw), *views, *shifted, strided):
        decoded = outcome(codec, form, 300)
        assert decoded is not None
        assert same_bits(decoded, expected)
    packed.zero_()
    assert same_bits(codec.decode(raw, 300), expected)


def test_decoded_values_share_no_memory_with_the_bytes(codec: Codec) -> None:
    packed = codec.encode(gaussian(300))
    raw = bytearray(packed.numpy().tobytes())
    decoded, again = codec.decode(packed, 300), codec.decode(raw, 300)
    kept = decoded.clone()
    packed.zero_()
    raw[:] = bytes(len(raw))
    assert same_bits(decoded, kept)
    assert same_bits(again, kept)


def test_wrong_lengths_are_refused_before_any_memory_is_taken(codec: Codec) -> None:
    raw = codec.encode(gaussian(300)).numpy().tobytes()
    for wrong in (raw[:-1], raw[1:], raw[:-4], raw + b"\0", raw + bytes(4), b"", raw * 2):
        assert outcome(codec, wrong, 300) is None
    assert outcome(codec, b"\0", 0) is None
    assert outcome(codec, b"", 0) is not None
    for packed in (memoryview(raw + raw)[::2], torch.zeros(len(raw)), torch.zeros(len(raw), 1, dtype=torch.uint8)):
        with pytest.raises(CodecError):
            codec.decode(packed, 300)
    # An allocation of so much would fail with another error.
    for n in (2**44, 2**56):
        with pytest.raises(CodecError, match=f"{len(raw)} packed bytes where there should be {codec.packed_bytes(n)}"):
            codec.decode(raw, n)


# Accumulating.


def test_accumulate_rounds_the_product_and_then_the_sum(codec: Codec) -> None:
    for n in SIZES:
        packed, before = codec.encode(gaussian(n)), gaussian(n, 1)
        decoded = codec.decode(packed, n)
        for weight in (1.0, -1.0, 1 / 3, 0.0, 1e-42):
            total = before.clone()
            codec.accumulate(packed, total, weight)
            assert torch.equal(total, before + decoded * torch.tensor(weight, dtype=torch.float32))


def test_accumulate_changes_nothing_when_late_bytes_are_bad(codec: Codec) -> None:
    packed = codec.encode(gaussian(MANY))
    # The last place from which bytes of 0xff are refused: up to there all is well.
    good, bad = packed.numel(), 0
    while good - bad > 1:
        middle = (good + bad) // 2
        hostile = packed.clone()
        hostile[middle:] = 0xFF
        if outcome(codec, hostile, MANY) is None:
            bad = middle
        else:
            good = middle
    hostile = packed.clone()
    hostile[bad:] = 0xFF
    assert outcome(codec, hostile, MANY) is None
    assert bad > 0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 1e39])
def test_accumulate_refuses_a_weight_that_is_not_finite(codec: Codec, weight: float) -> None:
    for n in (0, 300):
        packed, total = codec.encode(gaussian(n)), gaussian(n, 1)
        before = total.clone()
        with pytest.raises(CodecError, match="weight"):
            codec.accumulate(packed, total, weight)
        assert same_bits(total, before)
