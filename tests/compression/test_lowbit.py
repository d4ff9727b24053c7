"""The 1-bit and 2-bit codecs against slow definitions of the same, and their layouts. The contract: test_codecs."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import int2, needs_numba, same_bits, sign, use
from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError, FormatMap
from shoal.compression.kernels import loader
from shoal.compression.lowbit import Int2, Sign

FLOAT_MAX = torch.finfo(torch.float32).max
F = np.float32

values_lists = st.lists(
    st.floats(-10, 10, width=32)
    | st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
    | st.sampled_from([0.0, -0.0, FLOAT_MAX, -FLOAT_MAX]),
    max_size=40,
)


def noise(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sum_in_halves(values: list[F], block: int) -> F:
    row = [*values, *[F(0)] * (block - len(values))]
    while len(row) > 1:
        row = [a + b for a, b in zip(row[: len(row) // 2], row[len(row) // 2 :], strict=True)]
    return row[0]


def stored(mean: F) -> float:
    """``mean * 2**16`` rounded to bfloat16 by its bits, as 0 where it is not normal."""
    mean = min(mean * F(2**16), F(torch.finfo(torch.bfloat16).max))
    if mean < 2.0**-126:
        return 0.0
    bits = int(mean.view(np.uint32))
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16))[0]


def slow_sign(values: list[float], block: int) -> list[float]:
    decoded: list[float] = []
    for start in range(0, len(values), block):
        part = [F(x) for x in values[start : start + block]]
        magnitude = stored(sum_in_halves([abs(x) * F(2.0**-16) for x in part], block) / F(len(part)))
        decoded += [-magnitude if np.signbit(x) else magnitude for x in part]
    return decoded


def slow_int2(values: list[float], block: int) -> list[float]:
    decoded: list[float] = []
    for start in range(0, len(values), block):
        part = [F(x) for x in values[start : start + block]]
        sizes = [abs(x) * F(2.0**-16) for x in part]
        total = sum_in_halves(sizes, block)
        limit = total / F(len(part)) * F(1.4)
        above = [size if size > limit else F(0) for size in sizes]
        count, outer_sum = sum(size > limit for size in sizes), sum_in_halves(above, block)
        inner = max(total - outer_sum, F(0)) / F(max(len(part) - count, 1))
        outer = outer_sum / F(count) if count else inner
        small, large = F(stored(inner)), F(stored(outer))
        middle = small * F(0.5) + large * F(0.5)
        decoded += [float(np.copysign(large if abs(x) > middle else small, x)) for x in part]
    return decoded


@pytest.mark.parametrize("path", ["torch", pytest.param("numba", marks=needs_numba)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(values=values_lists, block=st.sampled_from([8, 16, 32, 64, 128]))
@settings(deadline=None, max_examples=200)
def test_equals_the_slow_definition_to_the_bit(path: str, values: list[float], block: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    for codec, slow in ((sign(block=block), slow_sign), (int2(block=block), slow_int2)):
        with use(path):
            decoded = codec.decode(codec.encode(tensor), len(values))
        expected = torch.tensor(slow(values, block), dtype=torch.float32)
        assert same_bits(decoded, expected), (decoded, expected)


@needs_numba
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 65536])
@pytest.mark.parametrize("of", [sign, int2])
def test_both_paths_agree_for_every_kind_of_block(of: Callable[[int], Sign | Int2], block: int) -> None:
    codec = of(block)
    # Nothing but whole blocks, a short last one, and one whose last group is short as well.
    for n in (2 * block, 2 * block + 8, 2 * block + 5, block - 1, 3):
        values, residual = noise(n), noise(n, 1) * 0.1
        results = []
        for path in ("torch", "numba"):
            left, total = residual.clone(), residual.clone()
            with use(path):
                packed = codec.encode_residual(values, left)
                codec.accumulate(packed, total, -0.7)
                results.append((packed, codec.encode(values), codec.decode(packed, n), left, total))
        for by_torch, by_kernel in zip(*results, strict=True):
            assert torch.equal(by_torch.view(torch.uint8), by_kernel.view(torch.uint8)), n


@pytest.mark.parametrize("path", ["torch", pytest.param("numba", marks=needs_numba)])
def test_sums_are_made_in_halves(path: str) -> None:
    for block in (8, 16, 32, 64, 512):
        for step in range(1, min(block, 40)):
            # The mean's share of the first value is half-way between two magnitudes, and what tips it over counts only
            # when the two small values have met before either meets the large one.
            values = [0.0] * block
            values[0], values[step], values[-1] = 1 + 2.0**-8, 2.0**-24, 2.0**-24
            with use(path):
                codec = sign(block=block)
                assert codec.decode(codec.encode(torch.tensor(values)), block).tolist() == slow_sign(values, block)


@needs_numba
@pytest.mark.parametrize("block", [8, 16, 32, 64, 512, 4096])
def test_kernels_sum_in_the_same_order(block: int) -> None:
    kernels = loader.import_kernels("lowbit")
    for seed in range(5):
        values, sums = noise(block, seed).numpy(), np.empty(block // 8, np.float32)
        sizes = [abs(x) * F(2.0**-16) for x in values]
        kernels.fold_sizes(values, sums)
        assert kernels.rest_in_halves(sums, block // 8) == sum_in_halves(sizes, block)
        limit = F(2.0**-17)
        assert kernels.fold_above(values, limit, sums) == sum(size > limit for size in sizes)
        above = [size if size > limit else F(0) for size in sizes]
        assert kernels.rest_in_halves(sums, block // 8) == sum_in_halves(above, block)


@pytest.mark.parametrize("path", ["torch", pytest.param("numba", marks=needs_numba)])
@pytest.mark.parametrize("codec", [sign(), int2()], ids=["sign", "int2"])
def test_more_values_than_a_tile_leave_their_residual(path: str, codec: Sign | Int2) -> None:
    n = 2**18 + 1001
    values, residual = noise(n), noise(n, 1)
    corrected = values + residual
    with use(path):
        packed = codec.encode_residual(values, residual)
        assert torch.equal(packed, codec.encode(corrected))
        assert same_bits(residual, corrected - codec.decode(packed, n))


@needs_numba
@pytest.mark.parametrize("codec", [sign(block=8), int2(block=8)], ids=["sign", "int2"])
def test_the_kernels_write_nothing_beyond(codec: Sign | Int2) -> None:
    with use("numba"):
        for n in (1, 7, 8, 9, 23):
            packed = codec.encode(noise(n))
            room = torch.full((n + 32,), 7.0)
            codec.decode(packed, n, room[16:-16])
            codec.accumulate(packed, room[16:-16], 1.0)
            codec.encode_residual(noise(n), room[16:-16])
            assert bool((room[:16] == 7.0).all())
            assert bool((room[-16:] == 7.0).all())


@needs_numba
def test_a_tie_takes_the_inner_magnitude_on_both_paths() -> None:
    codec = int2(block=8)
    # Magnitudes 2 and 4, by hand: the mean is 2.5, what is above 3.5 is 4 (twice); the others sum to 12.
    values = torch.tensor([4.0, -4.0, 3.0, -3.0, 2.0, 2.0, 1.0, -1.0])
    expected = [4.0, -4.0, 2.0, -2.0, 2.0, 2.0, 2.0, -2.0]
    for path in ("torch", "numba"):
        with use(path):
            assert codec.decode(codec.encode(values), 8).tolist() == expected


@needs_numba
def test_kernels_are_compiled_ahead_for_both() -> None:
    loader.import_kernels("lowbit").warm_up()
    for codec in (sign(), int2(block=64)):
        assert list(CodecMap(FormatMap.uniform(codec.format)).kernels) == ["lowbit"]


def test_layout_is_the_golden_one() -> None:
    values = torch.tensor([1.0, -2.5, 0.1, 1000.0, -0.0, 3e-5, 65504.0, -7.0, 0.3, -3e38])
    assert sign(block=8).encode(values).numpy().tobytes().hex() == "0246e27e9202"
    assert int2(block=8).encode(values).numpy().tobytes().hex() == "104380470000627f92400202"
    # By hand: 0x4602 is 8320, 0x92 has bits 1, 4 and 7; 0x4310 is 144, 0x4780 is 65536, 0x40 has bit 6.
    decoded = sign(block=8).decode(bytes.fromhex("0246803f9202"), 10).tolist()
    assert decoded == [8320, -8320, 8320, 8320, -8320, 8320, 8320, -8320, 1, -1]
    decoded = int2(block=8).decode(bytes.fromhex("104380470000803f92400202"), 10).tolist()
    assert decoded == [144, -144, 144, 144, -144, 144, 65536, -144, 0, -1]


def test_bits_beyond_the_last_value_are_0_when_written_and_never_read() -> None:
    assert sign().encode(torch.tensor([-1.0])).tolist()[2:] == [1]
    assert int2().encode(torch.tensor([-1.0])).tolist()[4:] == [1, 0]
    assert sign().decode(b"\x80\x3f\xfe", 1).tolist() == [1.0]
    assert int2().decode(b"\x80\x3f\x00\x40\xfe\xff", 1).tolist() == [2.0]


def test_sizes_and_names() -> None:
    assert [sign().packed_bytes(n) for n in (0, 1, 8, 9, 512, 513)] == [0, 3, 3, 4, 66, 69]
    assert [int2().packed_bytes(n) for n in (0, 1, 8, 9, 512, 513)] == [0, 6, 6, 8, 132, 138]
    assert [c.name for c in (sign(), int2(), sign(block=64), int2(block=64))] == [
        "sign", "int2", "sign(block=64)", "int2(block=64)",
    ]  # fmt: skip


def relative_error(codec: Sign | Int2, values: Tensor) -> float:
    decoded, exact = codec.decode(codec.encode(values), values.numel()).double(), values.double()
    return float((decoded - exact).norm() / exact.norm())


def test_errors_are_those_of_the_best_levels() -> None:
    values = noise(1 << 16)
    # sqrt(1 - 2/pi), and Max's 4 levels for a normal distribution: sqrt(0.1175).
    assert relative_error(sign(), values) == pytest.approx(0.6028, abs=0.004)
    assert 0.340 < relative_error(int2(), values) < 0.350
    tailed = values / noise(1 << 16, 1).abs().clamp(min=0.3)
    assert relative_error(int2(), tailed) < 0.8 * relative_error(sign(), tailed)


@pytest.mark.parametrize("codec", [sign(), int2()], ids=["sign", "int2"])
@pytest.mark.parametrize("size", [1e-36, 1e-3, 1.0, 1e30, 3e38])
def test_any_size_will_do(codec: Sign | Int2, size: float) -> None:
    values = (noise(2000).clamp(-4, 4) / 4) * size
    assert relative_error(codec, values) < 0.62
    constant = torch.full((700,), -size)
    torch.testing.assert_close(codec.decode(codec.encode(constant), 700), constant, rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", [sign(block=64), int2(block=64)], ids=["sign", "int2"])
def test_error_feedback_makes_up_for_the_loss(codec: Sign | Int2) -> None:
    values, residual, total = noise(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(100):
        codec.accumulate(codec.encode_residual(values, residual), total, 0.01)
    torch.testing.assert_close(total + residual * 0.01, values, rtol=0, atol=1e-4)
    assert float((total - values).norm() / values.norm()) < 0.15


@pytest.mark.parametrize("bad", ["0080", "7f80", "807f", "c07f", "80bf", "0100", "7f00", "ffff"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_bad_magnitudes_are_refused(bad: str, at: int) -> None:
    for codec, a_block in ((sign(block=8), 1), (int2(block=8), 2)):
        scales = [b"\x80\x3f"] * 3 * a_block
        scales[at] = bytes.fromhex(bad)
        codes = bytes(codec.packed_bytes(24) - 2 * len(scales))
        with pytest.raises(CodecError, match="magnitude"):
            codec.decode(b"".join(scales) + codes, 24)
