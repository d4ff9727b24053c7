from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import needs_numba, same_bits, use

from shoal.compression.codec import Codec
from shoal.compression.fixed_point import (
    FixedPoint,
    largest_code,
    mean_of,
    moves_of,
    next_exponents,
    packed_codes,
)
from shoal.compression.formats import CodecError

BLOCK = 64


@pytest.fixture(autouse=True, scope="module", params=["torch", pytest.param("numba", marks=needs_numba)])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with and without compiled kernels."""
    with use(request.param):
        yield request.param


def exponents(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int8)


def draw(n: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, BLOCK, 3 * BLOCK + 5])
def test_values_come_back_to_within_half_a_unit(bits: int, n: int) -> None:
    blocks = -(-n // BLOCK)
    scales = exponents(*range(-4, -4 + blocks))
    units = torch.from_numpy(np.repeat(np.ldexp(1.0, scales.astype(int)), BLOCK)[:n]).float()
    values = draw(n).clamp(-1, 1) * units * (largest_code(bits) - 1)
    codec: Codec = FixedPoint(bits, BLOCK, scales, 1.0)
    packed = codec.encode(values)
    assert packed.numel() == codec.packed_bytes(n)
    assert ((codec.decode(packed, n) - values).abs() <= units / 2).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_cut_off_or_rounded_stays_in_the_residual(bits: int) -> None:
    values, residual, left = draw(BLOCK, scale=5.0), draw(BLOCK, 1), torch.empty(BLOCK)
    codec = FixedPoint(bits, BLOCK, exponents(-3), 0.5)
    packed = codec.encode_residual(values, residual, left)
    largest = largest_code(bits) * 2.0**-3 / 0.5
    decoded = codec.decode(packed, BLOCK)
    assert decoded.abs().max() <= largest
    torch.testing.assert_close(decoded + left, values + residual)


def test_values_that_are_no_numbers_are_refused() -> None:
    for wrong in (float("nan"), float("inf")):
        values = draw(BLOCK)
        values[3] = wrong
        with pytest.raises(CodecError):
            FixedPoint(8, BLOCK, exponents(0), 1.0).encode(values)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=16), st.sampled_from([4, 8]), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_mean_of_sums_is_the_weighted_mean_to_within_the_units(weights: list[int], bits: int, seed: int) -> None:
    n, heaviest, scales = 2 * BLOCK, max(weights), exponents(-6, -5)
    brought = [draw(n, seed + one).clamp(-1, 1) * 2.0**-6 * largest_code(bits) for one in range(len(weights))]
    total = np.zeros(n)
    for weight, values in zip(weights, brought, strict=True):
        codes = packed_codes(FixedPoint(bits, BLOCK, scales, weight / heaviest).encode(values))
        total += codes.astype(np.float64) * heaviest
    mean = mean_of(total, BLOCK, scales, 1 / sum(weights)).double()
    expected = sum(weight * one.double() for weight, one in zip(weights, brought, strict=True)) / sum(weights)
    # Each code is off by half a unit, in the weight of the heaviest.
    assert (mean - expected).abs().max() <= 2.0**-5 / 2 * heaviest * len(weights) / sum(weights) + 1e-6


def means_of(contributions: list[torch.Tensor], bits: int, scales: np.ndarray) -> torch.Tensor:
    codes = [packed_codes(FixedPoint(bits, 4096, scales, 1.0).encode(one)) for one in contributions]
    total = np.sum(codes, axis=0, dtype=np.float64)
    return mean_of(total, 4096, scales, 1 / len(codes))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("members", [4, 8, 16])
@pytest.mark.parametrize("agree", [0.0, 1.0])
@pytest.mark.parametrize("off", [7, -9])
def test_a_range_that_is_far_off_is_found_and_kept(bits: int, members: int, agree: float, off: int) -> None:
    """From codes that are all cut off, and from codes that are all zero; whether members agree with each other or not.
    Then nearly all of their values fit, by far more than one step, and the unit stays where it is."""
    scales, found = exponents(0), []
    for turn in range(24):
        common = draw(4096, 1000 + turn, 2.0**off * largest_code(bits))
        brought = [
            agree * common + (1 - agree) * draw(4096, 100 * turn + one, 2.0**off * largest_code(bits))
            for one in range(members)
        ]
        mean = means_of(brought, bits, scales)
        scales = next_exponents(scales, moves_of(mean, 4096, scales, bits, members))
        found.append(int(scales[0]))
    assert set(found[-8:]) <= {off + one for one in range(1, 6)}, "the range is 2 to 32 standard deviations"
    assert len(set(found[-8:])) <= 2
    assert sum(one != other for one, other in zip(found[-8:], found[-7:], strict=False)) <= 1, "it does not swing"


def test_one_member_does_not_move_units_by_what_it_says() -> None:
    """It can only move the mean, by what everybody sees: its largest codes are a share of a sum, not a vote."""
    scales = exponents(-13)
    honest = [draw(4096, one, 2.0**-13 * 127 / 4) for one in range(7)]
    liar = torch.full((4096,), 1.0)
    for _ in range(12):
        mean = means_of([*honest, liar], 8, scales)
        scales = next_exponents(scales, moves_of(mean, 4096, scales, 8, 8))
    assert int(scales[0]) in (-13, -12, -11)


def test_units_stay_within_what_can_come_back() -> None:
    far = next_exponents(exponents(0, 0, -100), np.array([1, 1, -1], np.int8))
    assert far.tolist() == [1, 1, -11], "a block of zeros is at most 2**12 below the unit in the middle"
    assert next_exponents(exponents(0, 0, 50), np.zeros(3, np.int8)).tolist() == [0, 0, 50], "one block lifts no other"
    assert next_exponents(exponents(60), np.array([1], np.int8)).tolist() == [60]


def test_a_sparse_block_keeps_its_unit() -> None:
    """Most of it is zeros, and its few values are as large as the range has room for."""
    mean = torch.zeros(4096)
    mean[::40] = 127 * 2.0**-10 / 8
    assert moves_of(mean, 4096, exponents(-10), 8, 8).tolist() == [0]
    assert moves_of(torch.zeros(4096), 4096, exponents(-10), 8, 8).tolist() == [-1]


def test_a_block_that_is_rounded_to_nearly_nothing_is_not_sent() -> None:
    values = torch.full((3 * BLOCK + 5,), 0.2)
    values[3], values[BLOCK + 1], values[-1] = 1.2, 1.7, -1.4
    codes = packed_codes(FixedPoint(8, BLOCK, exponents(0, 0, 0, 0), 1.0, least=2).encode(values))
    assert np.flatnonzero(codes).tolist() == [BLOCK + 1]


@needs_numba
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("least", [1, 3])
def test_kernels_give_the_same_bits(bits: int, n: int, least: int) -> None:
    """Of values that are rounded, cut off, and too faint, one block of which is all zeros."""
    blocks = -(-n // BLOCK)
    scales = exponents(*range(-4, -4 + blocks))
    values, residual = draw(n) * torch.logspace(-3, 1, n), draw(n, 1, 0.1)
    values[BLOCK : 2 * BLOCK] = -0.0
    residual[BLOCK : 2 * BLOCK] = 0.0
    seen = []
    for path in ("torch", "numba"):
        with use(path):
            codec = FixedPoint(bits, BLOCK, scales, 2 / 3, least)
            left, inside, total = torch.empty(n), residual.clone(), draw(n, 2)
            packed = codec.encode_residual(values, residual, left)
            assert torch.equal(codec.encode(values + residual), packed)
            assert torch.equal(codec.encode_residual(values, inside, inside.view(-1)), packed)
            codec.accumulate(packed, total, 0.3)
            moves = torch.from_numpy(moves_of(values, BLOCK, scales, bits, 8).astype(np.int32))
            seen.append([left, inside, total, codec.decode(packed, n), packed.to(torch.float32), moves.float()])
    assert all(same_bits(one, other) for one, other in zip(*seen, strict=True))


def test_a_sum_that_is_no_number_changes_nothing() -> None:
    residual, values = draw(3 * BLOCK), draw(3 * BLOCK, 1)
    before = residual.clone()
    values[2 * BLOCK] = float("nan")
    with pytest.raises(CodecError, match=f"nan at {2 * BLOCK} of"):
        FixedPoint(8, BLOCK, exponents(0, 0, 0), 1.0).encode_residual(values, residual)
    assert same_bits(residual, before)
