"""Sums of codes are exact, masks cancel, rounding is unbiased, and nothing wraps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.fixed_point import Codes, FixedPoint
from shoal.compression.formats import CodecError

TINY = torch.finfo(torch.float32).tiny
both_widths = pytest.mark.parametrize("bits", [16, 32])


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).clamp_(-4, 4)


def zeros(fixed: FixedPoint, n: int) -> Codes:
    return fixed.unpack(bytes(fixed.packed_bytes(n)), n)


@both_widths
@given(data=st.data())
@settings(deadline=None)
def test_masks_cancel_and_sums_do_not_wrap(bits: int, data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([1e-30, 0.1, 1.0, 1000.0, 1e30]))
    peers, n = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 6))
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=peers, max_size=peers))
    fixed = FixedPoint(bits, limit, peers, sum(weights))
    unit = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32))
    plain, masked = zeros(fixed, n), zeros(fixed, n)
    exact = np.zeros(n)
    raw = st.binary(min_size=fixed.packed_bytes(n), max_size=fixed.packed_bytes(n))
    masks = {(i, j): fixed.unpack(data.draw(raw), n) for i in range(peers) for j in range(i)}
    for peer, weight in enumerate(weights):
        units = data.draw(st.lists(unit, min_size=n, max_size=n))
        values = torch.tensor(units, dtype=torch.float32) * limit
        codes = fixed.encode(values, seed=peer, weight=weight)
        exact += values.double().numpy() * weight
        fixed.add(plain, codes)
        for (i, j), mask in masks.items():
            if peer == i:
                fixed.add(codes, mask)
            if peer == j:
                fixed.subtract(codes, mask)
        fixed.add(masked, codes)
    assert np.array_equal(plain, masked)
    mean = fixed.decode_sum(masked, sum(weights)).double().numpy()
    error = np.abs(mean - exact / sum(weights))
    last_bit = np.where(mean == 0, TINY, np.abs(mean) * 2**-23)  # what would be subnormal is decoded as 0
    assert (error <= peers * fixed.step / sum(weights) * (1 + 1e-6) + last_bit).all()


def test_a_mean_that_would_be_subnormal_is_zero() -> None:
    fixed = FixedPoint(32, 1e-30, 2, 16)
    codes = fixed.encode(torch.tensor([1.8889416253387026e-37]), seed=1, weight=1)
    assert fixed.decode_sum(codes, 16).tolist() == [0.0]
    assert fixed.decode_sum(codes, 1).item() > TINY


@both_widths
@pytest.mark.parametrize("peers", [1, 2, 9])
@pytest.mark.parametrize("limit", [0.1, 0.3, 1e-3, 1.0, 1e30])
def test_values_at_the_limit_do_not_wrap(bits: int, peers: int, limit: float) -> None:
    """A limit that is no float32 lets its nearest float32 in, which may be larger."""
    fixed = FixedPoint(bits, limit, peers)
    values = torch.tensor([limit, -limit], dtype=torch.float32)
    total = zeros(fixed, 2)
    for peer in range(peers):
        fixed.add(total, fixed.encode(values, seed=peer))
    torch.testing.assert_close(fixed.decode_sum(total, peers), values, rtol=1e-2 if bits == 16 else 1e-6, atol=0)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("peers", [1, 2, 64, 1000])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_all_peers_at_the_limit_fill_the_range_and_do_not_wrap(bits: int, peers: int, sign: float) -> None:
    # Weights whose scaled values have fractions, so that rounding goes both ways.
    weights = [1.0 + (peer % 7) / 3 for peer in range(peers)]
    fixed = FixedPoint(bits, 1.0, peers, sum(weights))
    total = zeros(fixed, 16)
    for peer, weight in enumerate(weights):
        fixed.add(total, fixed.encode(torch.full((16,), sign), peer, weight))
    mean = fixed.decode_sum(total, sum(weights))
    assert torch.allclose(mean, torch.full((16,), sign), rtol=0, atol=peers * 2.0 ** (2 - bits))


@both_widths
def test_rounding_is_unbiased(bits: int) -> None:
    fixed = FixedPoint(bits, 1.0, 8)
    n = 100_000
    for steps in (0.25, -0.25, 0.9, 100.5):
        value = torch.full((n,), steps * fixed.step)
        decoded = fixed.decode_sum(fixed.encode(value, seed=7)).double() / fixed.step
        target = float(value[0]) / fixed.step
        fraction = target - math.floor(target)
        deviation = math.sqrt(fraction * (1 - fraction) / n)
        assert abs(float(decoded.mean()) - target) < 5 * deviation
        assert abs(float(decoded.var()) / (fraction * (1 - fraction)) - 1) < 0.05
        assert set(torch.round(decoded).int().tolist()) == {math.floor(target), math.ceil(target)}


def test_neighbouring_values_are_rounded_independently() -> None:
    fixed = FixedPoint(16, 1.0, 2)
    ups = torch.from_numpy(fixed.encode(torch.full((200_000,), fixed.step / 2), 3).astype(np.float64)) - 0.5
    for lag in (1, 2, 2**15):
        assert abs(float((ups[:-lag] * ups[lag:]).mean())) < 0.25 * 5 / math.sqrt(200_000 - lag)


@both_widths
def test_same_seed_same_codes_and_a_prefix_is_coded_alike(bits: int) -> None:
    fixed = FixedPoint(bits, 4.0, 3)
    values = normal(70_001, 0)
    codes = fixed.encode(values, 5)
    assert np.array_equal(codes, fixed.encode(values.clone(), 5))
    assert np.array_equal(codes[:40_001], fixed.encode(values[:40_001], 5))
    assert not np.array_equal(codes, fixed.encode(values, 6))
    assert np.array_equal(fixed.encode(values, 2**100), fixed.encode(values, 2**100))


def test_codes_never_change_by_accident() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 1e-6, -1e-6, 1 / 3])
    assert FixedPoint(16, 1.0, 4, 5.0).encode(values, 1, 0.3).tobytes().hex() == GOLDEN_16
    assert FixedPoint(32, 1.0, 4, 5.0).encode(values, 1, 0.3).tobytes().hex() == GOLDEN_32
    total = np.array([0, 1, 32767, 32768, 65535], dtype=np.uint16)
    decoded = FixedPoint(16, 1.0, 4, 5.0).decode_sum(total, 3.0)
    assert decoded.numpy().tobytes().hex() == GOLDEN_DECODED


GOLDEN_16 = "00000000ae0752f8c5003cff000000008f02"
GOLDEN_32 = "00000000000000007a14ae0785eb51f8a69bc4005a643bff8100000080ffffff2a5c8f02"
GOLDEN_DECODED = "00000000ab5d5538005cd53fab5dd5bfab5d55b8"


def test_32_bits_resolve_float32() -> None:
    fixed = FixedPoint(32, 4.0, 2)
    values = normal(1000, 1)
    decoded = fixed.decode_sum(fixed.encode(values, 0))
    assert float((decoded - values).abs().max()) <= fixed.step + 4 * 2**-24


def test_decoding_has_no_subnormals() -> None:
    fixed = FixedPoint(32, TINY, 2)
    decoded = fixed.decode_sum(np.arange(2**31 - 100, 2**31, dtype=np.uint32))
    assert bool((decoded >= TINY).all())
    assert float(fixed.decode_sum(np.array([1, 2**32 - 1, 2**20], dtype=np.uint32)).abs().max()) == 0.0


@both_widths
@given(data=st.data())
@settings(deadline=None)
def test_any_codes_decode_to_finite_floats_or_are_refused(bits: int, data: st.DataObject) -> None:
    fixed = FixedPoint(bits, data.draw(st.sampled_from([TINY, 1.0, 2.0**126])), data.draw(st.integers(1, 100)))
    raw = data.draw(st.binary(min_size=fixed.packed_bytes(5), max_size=fixed.packed_bytes(5)))
    codes = fixed.unpack(raw, 5)
    assert codes.tobytes() == raw
    try:
        decoded = fixed.decode_sum(codes, data.draw(st.sampled_from([1e-320, 0.5, 1.0, 100.0, 1e308])))
    except CodecError:
        return
    assert bool(torch.isfinite(decoded).all())


def test_a_sum_beyond_float32_is_refused() -> None:
    # As coarse as can be: a mean at the largest limit is doubled by rounding, and still fits.
    fixed = FixedPoint(16, 2.0**126, 2**14 - 1)
    top = np.array([2**15 - 1], dtype=np.uint16)
    assert float(fixed.decode_sum(top, fixed.peers)) == pytest.approx(2.0**127, rel=1e-3)
    with pytest.raises(CodecError, match="float32"):
        fixed.decode_sum(top)
    with pytest.raises(CodecError, match="float32"):
        fixed.decode_sum(top + np.uint16(2), fixed.peers / 2.1)


@pytest.mark.parametrize("at", [0, 1, 2**15 - 1, 2**15, 40_000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0000001, -1.5])
def test_values_beyond_the_limit_are_refused_where_they_are(at: int, bad: float) -> None:
    values = torch.ones(40_001)
    values[at] = bad
    with pytest.raises(CodecError, match=rf"^value {at} is"):
        FixedPoint(16, 1.0, 2).encode(values, 0)


def test_bad_arguments_are_refused() -> None:
    for bits, limit, peers, weight in (
        (8, 1.0, 2, None),
        (16, 0.0, 2, None),
        (16, -1.0, 2, None),
        (16, math.nan, 2, None),
        (16, math.inf, 2, None),
        (16, 1e-40, 2, None),
        (16, 1e38, 2, None),
        (16, 1.0, 0, None),
        (16, 1.0, 2**14, None),
        (16, 1.0, 2, 0.0),
        (16, 1.0, 2, math.nan),
        (16, 1.0, 2, -1.0),
        (32, 1e30, 2, 1e300),
    ):
        with pytest.raises(CodecError):
            FixedPoint(bits, limit, peers, weight)
    fixed = FixedPoint(16, 1.0, 2)
    for seed, weight in ((-1, 1.0), (2**128, 1.0), (0, 0.0), (0, -1.0), (0, 2.1), (0, math.nan), (0, math.inf)):
        with pytest.raises(CodecError):
            fixed.encode(torch.zeros(3), seed, weight)
    with pytest.raises(CodecError):
        fixed.encode(torch.zeros(3, dtype=torch.float64), 0)
    for wrong in (np.zeros(3, np.uint32), np.zeros(4, np.uint16), np.zeros((1, 3), np.uint16), np.zeros(3, np.int16)):
        with pytest.raises(CodecError):
            fixed.add(np.zeros(3, np.uint16), wrong)
        with pytest.raises(CodecError):
            fixed.subtract(wrong, np.zeros(3, np.uint16))
    with pytest.raises(CodecError):
        fixed.decode_sum(np.zeros(3, np.uint32))
    with pytest.raises(CodecError):
        fixed.unpack(b"abc", 2)
