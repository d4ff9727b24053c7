"""Chunked top-k: the chosen values, the packed bytes, and refused bytes. The contract of all codecs: test_codecs."""

import importlib
import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import topk, use
from torch import Tensor

from shoal.compression.formats import CodecError, TopKFormat
from shoal.compression.kernels import loader
from shoal.compression.topk import TopK

FLOAT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny
HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
PATHS = ["torch", pytest.param("numba", marks=needs_numba)]
every_path = pytest.mark.parametrize("path", PATHS)
every_codec = pytest.mark.parametrize(
    "codec",
    [topk(), topk(values="int8"), topk(5, chunk=37), topk(7, "int8", 7), topk(1, chunk=1), topk(3, "int8", 1000)],
    ids=lambda codec: codec.name,
)


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def expected_indices(values: Tensor, k: int, chunk: int) -> list[int]:
    """The choice by plain sorting: larger magnitude first, then lower index."""
    kept: list[int] = []
    for start in range(0, values.numel(), chunk):
        part = values[start : start + chunk].abs().tolist()
        keep = math.ceil(k * len(part) / chunk)
        kept += sorted(start + i for i in sorted(range(len(part)), key=lambda i: (-part[i], i))[:keep])
    return kept


def sent_indices(codec: TopK, packed: Tensor, n: int) -> list[int]:
    """Where something was sent that is not 0."""
    total = torch.zeros(n)
    codec.accumulate(packed, total, 1.0)
    return total.nonzero().view(-1).tolist()


def both_paths_encode(codec: TopK, values: Tensor) -> Tensor:
    with use("torch"):
        packed = codec.encode(values)
    if HAS_NUMBA:
        with use("numba"):
            assert codec.encode(values).tolist() == packed.tolist()
    return packed


def decode_or_none(codec: TopK, raw: bytes, n: int) -> Tensor | None:
    try:
        return codec.decode(raw, n)
    except CodecError:
        return None


def test_default_chunk_takes_84_bytes() -> None:
    codec = topk()
    assert codec.packed_bytes(4096) == 84
    assert 4 * 4096 / codec.packed_bytes(4096) >= 195
    assert topk(values="int8").packed_bytes(4096) == 132
    assert [codec.packed_bytes(n) for n in (0, 1, 64, 65, 8192, 8193)] == [0, 6, 7, 8, 168, 174]


def test_name_shows_what_is_not_the_default() -> None:
    assert topk().name == "topk"
    assert topk(k=32, values="int8").name == "topk(k=32, values=int8)"
    assert topk(chunk=1024).name == "topk(chunk=1024)"


@every_path
def test_golden_two_bit_chunk(path: str) -> None:
    # keep 4 of 16: 2 low bits, 4 + 3 upper bits. Indices 1, 6, 7, 14; magnitudes {1, 3} and {8, 10}.
    values = torch.zeros(16)
    values[[1, 6, 7, 14]] = torch.tensor([-1.0, 8.0, 3.0, -10.0])
    golden = "004010414db9c9"
    codec = topk(4, chunk=16)
    with use(path):
        assert codec.encode(values).numpy().tobytes().hex() == golden
        decoded = codec.decode(bytes.fromhex(golden), 16)
    assert decoded[[1, 6, 7, 14]].tolist() == [-2.0, 9.0, 2.0, -9.0]
    assert decoded.count_nonzero() == 4


@every_path
def test_golden_int8_chunk(path: str) -> None:
    values = torch.zeros(16)
    values[[1, 6, 7, 14]] = torch.tensor([-254.0, 3.0, 5.0, 2.0])
    golden = "000000404db981020201"
    codec = topk(4, "int8", 16)
    with use(path):
        assert codec.encode(values).numpy().tobytes().hex() == golden
        decoded = codec.decode(bytes.fromhex(golden), 16)
    assert decoded[[1, 6, 7, 14]].tolist() == [-254.0, 4.0, 4.0, 2.0]


@every_path
def test_golden_of_short_last_chunk(path: str) -> None:
    # 3 of 8 (indices 0, 2, 4), then ceil(3 * 5 / 8) = 2 of 5 (1, 4): one low bit each, 6 and 4 upper bits.
    values = torch.tensor([5.0, 0.0, 1.0, 0.0, -5.0, 0.0, 0.0, 1.0, 0.0, -7.0, 0.0, 0.0, 7.0])
    golden = "803fa040150032e040e040090101"
    codec = topk(3, chunk=8)
    with use(path):
        assert codec.encode(values).numpy().tobytes().hex() == golden
        decoded = codec.decode(bytes.fromhex(golden), 13)
    assert decoded.tolist() == [5.0, 0.0, 1.0, 0.0, -5.0, 0.0, 0.0, 0.0, 0.0, -7.0, 0.0, 0.0, 7.0]


@every_path
@every_codec
@pytest.mark.parametrize("n", [0, 1, 2, 36, 37, 38, 1000, 4095, 4096, 4097, 9000])
def test_largest_are_chosen(codec: TopK, path: str, n: int) -> None:
    values = gaussian(n) + 1.5
    with use(path):
        packed = codec.encode(values)
        assert packed.shape == (codec.packed_bytes(n),)
        decoded = codec.decode(packed, n)
    expected = expected_indices(values, codec.format.k, codec.format.chunk)
    sent = decoded.nonzero().view(-1).tolist()
    assert set(sent) <= set(expected)
    if codec.format.values == "2bit":
        assert sent == expected
    else:
        for start in range(0, n, codec.format.chunk):
            part = slice(start, start + codec.format.chunk)
            step = float(values[part].abs().max()) / 127
            here = [i for i in expected if part.start <= i < part.stop]
            assert float((decoded[here] - values[here]).abs().max()) <= step / 2 * 1.00001


@every_codec
@pytest.mark.parametrize("levels", [1, 2, 3, 20])
def test_of_ties_the_lower_indices_are_chosen(codec: TopK, levels: int) -> None:
    values = torch.randint(1, levels + 1, (5000,), generator=torch.Generator().manual_seed(levels)).float()
    values *= torch.where(gaussian(5000) < 0, -1.0, 1.0)
    packed = both_paths_encode(codec, values)
    assert sent_indices(codec, packed, 5000) == expected_indices(values, codec.format.k, codec.format.chunk)


def test_paths_agree_on_values_of_any_size() -> None:
    sizes = torch.tensor([0.0, 1e-45, 1e-40, TINY, 1e-30, 1.0, 1e30, FLOAT_MAX])
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        n = int(torch.randint(1, 10000, (1,), generator=generator))
        few = sizes[torch.randperm(8, generator=generator)[: 1 + seed % 8]]
        values = few[torch.randint(len(few), (n,), generator=generator)] * (torch.rand(n, generator=generator) * 2 - 1)
        for codec in (topk(), topk(values="int8"), topk(9, chunk=100), topk(300, "int8", 301)):
            packed = both_paths_encode(codec, values)
            with use("torch"):
                decoded = codec.decode(packed, n)
            assert bool(torch.isfinite(decoded).all())
            if HAS_NUMBA:
                with use("numba"):
                    assert torch.equal(codec.decode(packed, n).view(torch.int32), decoded.view(torch.int32))


def test_chunks_of_different_sizes_of_value_in_turn() -> None:
    values = torch.cat([gaussian(4096, i) * 10.0 ** ((i * 7) % 60 - 30) for i in range(30)])
    packed = both_paths_encode(topk(), values)
    assert sent_indices(topk(), packed, values.numel()) == expected_indices(values, 64, 4096)


def test_two_magnitudes_err_hardly_more_than_the_best_two() -> None:
    for seed, values in enumerate([gaussian(4096), gaussian(4096) ** 3, torch.rand(4096), gaussian(4096).exp()]):
        chosen, _ = values.abs()[expected_indices(values, 64, 4096)].double().sort()
        best = min(
            float((half - half.mean()).square().sum() + (rest - rest.mean()).square().sum())
            for half, rest in ((chosen[:i], chosen[i:]) for i in range(1, 64))
        )
        decoded = topk().decode(topk().encode(values), 4096)
        sent = decoded != 0
        error = float((decoded[sent] - values[sent]).double().square().sum())
        assert error <= best * 1.1 + 1e-5 * float(chosen.square().sum()), seed


@every_path
@pytest.mark.parametrize(
    ("codec", "raw", "match"),
    [
        (topk(4, chunk=16), "00c010414db9c9", "scale"),  # negative
        (topk(4, chunk=16), "004000804db9c9", "scale"),  # -0.0
        (topk(4, chunk=16), "0040807f4db9c9", "scale"),  # infinite
        (topk(4, chunk=16), "c17f10414db9c9", "scale"),  # NaN
        (topk(4, chunk=16), "7f0010414db9c9", "scale"),  # subnormal
        (topk(4, chunk=16), "004010410db9c9", "indices"),  # three bits
        (topk(4, chunk=16), "004010415db9c9", "indices"),  # five bits
        (topk(4, chunk=16), "004010418db9c9", "indices"),  # a bit past the upper bits
        (topk(4, chunk=16), "004010414da9c9", "indices"),  # 1, 6, 6, 14
        (topk(4, chunk=16), "004010414dadc9", "indices"),  # 1, 7, 6, 14
        (topk(3, chunk=8), "803fa040150832", "padding"),
        (topk(3, chunk=8), "803fa040150072", "padding"),
        (topk(3, chunk=15), "00401041253900", "indices"),  # 15 of 0 .. 14
        (topk(4, "int8", 16), "000000404db980020201", "code"),
        (topk(4, "int8", 16), "000000c04db981020201", "scale"),
        (topk(4, "int8", 16), "0000c07f4db981020201", "scale"),
        (topk(4, "int8", 16), "0402017c4db981020201", "scale"),  # 127 times it is infinite
        (topk(4, "int8", 16), "ffff7f004db981020201", "scale"),
    ],
)
def test_hostile_chunks_are_refused(path: str, codec: TopK, raw: str, match: str) -> None:
    with use(path), pytest.raises(CodecError, match=match):
        codec.decode(bytes.fromhex(raw), codec.format.chunk)


@every_path
@pytest.mark.parametrize("uppers", [("6d", "4c"), ("5d", "0d"), ("0d", "5d"), ("ff", "00")])
def test_bits_that_another_chunk_lacks_are_refused(path: str, uppers: tuple[str, str]) -> None:
    raw = bytes.fromhex("".join(f"00401041{upper}b9c9" for upper in uppers))
    total = torch.ones(32)
    with use(path):
        with pytest.raises(CodecError, match="indices"):
            topk(4, chunk=16).decode(raw, 32)
        with pytest.raises(CodecError, match="indices"):
            topk(4, chunk=16).accumulate(raw, total, 1.0)
    assert torch.equal(total, torch.ones(32))


@every_path
def test_largest_scales_decode_to_finite_values(path: str) -> None:
    with use(path):
        for codec, raw in (
            (topk(4, chunk=16), "7f7f7f7f4db9c9"),
            (topk(4, "int8", 16), "0302017c4db981028101"),
        ):
            assert bool(torch.isfinite(codec.decode(bytes.fromhex(raw), 16)).all())


@st.composite
def fuzzed(draw: st.DrawFn) -> tuple[TopK, bytes, int]:
    """A codec, bytes of the right length (random, or valid ones with a few bytes changed), and n."""
    chunk = draw(st.integers(1, 70))
    codec = topk(draw(st.integers(1, chunk)), draw(st.sampled_from(["2bit", "int8"])), chunk)
    n = draw(st.integers(0, 200))
    size = codec.packed_bytes(n)
    if draw(st.booleans()):
        return codec, draw(st.binary(min_size=size, max_size=size)), n
    with use("torch"):
        raw = bytearray(codec.encode(gaussian(n, draw(st.integers(0, 5)))).numpy().tobytes())
    for _ in range(draw(st.integers(0, 3)) if size else 0):
        raw[draw(st.integers(0, size - 1))] ^= 1 << draw(st.integers(0, 7))
    return codec, bytes(raw), n


@given(case=fuzzed())
@settings(deadline=None, max_examples=400)
def test_fuzzed_bytes_decode_to_finite_values_or_an_error_alike_on_every_path(case: tuple[TopK, bytes, int]) -> None:
    codec, raw, n = case
    with use("torch"):
        decoded = decode_or_none(codec, raw, n)
    assert decoded is None or (decoded.shape == (n,) and bool(torch.isfinite(decoded).all()))
    if HAS_NUMBA:
        with use("numba"):
            again = decode_or_none(codec, raw, n)
        assert (again is None) == (decoded is None)
        if again is not None and decoded is not None:
            assert torch.equal(again.view(torch.int32), decoded.view(torch.int32))


def test_widened_keeps_what_all_members_may_send_up_to_half_a_chunk() -> None:
    kept = [TopKFormat().widened(members).k for members in (1, 2, 31, 32, 33, 1000)]
    assert kept == [64, 128, 1984, 2048, 2048, 2048]
    assert TopKFormat(3, "int8", 8).widened(2).name == "topk(k=4, values=int8, chunk=8)"
    assert TopKFormat(7, chunk=8).widened(5).k == 7
    with pytest.raises(CodecError, match="members"):
        TopKFormat().widened(0)


@every_path
def test_of_a_mean_nothing_is_lost_but_precision_when_widened(path: str) -> None:
    mean, codec = torch.zeros(9000), topk(values="int8")
    with use(path):
        for seed in range(4):
            codec.accumulate(codec.encode(gaussian(9000, seed)), mean, 0.25)
        wide = TopK(codec.format.widened(4))
        decoded = wide.decode(wide.encode(mean), 9000)
    assert torch.allclose(decoded, mean, atol=float(mean.abs().max()) / 254 * 1.001, rtol=0)


def test_ties_across_columns_and_rows_of_zeros() -> None:
    values = gaussian(64 * 4096)
    rows = values.view(64, 4096)
    rows[3] = 0.0
    rows[5] = -0.0
    rows[7, :] = 1.0
    rows[9].abs_().clamp_(max=0.01)  # thousands of one value, in every column
    rows[11] = rows[11].sign() * (rows[11].abs() > 2.2)  # more columns than k with the same top
    rows[13, :512] = 5.0  # the columns' tops all alike, lower indices first
    rows[15, 3584:] = 5.0
    rows[17].mul_(1e-44)
    for codec in (topk(), topk(values="int8"), topk(256), topk(300), topk(16, chunk=256)):
        packed = both_paths_encode(codec, values)
        with use("torch"):
            decoded = codec.decode(packed, values.numel())
        sent = set(decoded.nonzero().view(-1).tolist())
        assert sent <= set(expected_indices(values, codec.format.k, codec.format.chunk))
        assert {i % 4096 for i in sent if i // 4096 == 7} == {
            i for start in range(0, 4096, codec.format.chunk) for i in range(start, start + codec.format.k)
        }


@every_path
@every_codec
def test_residual_of_many_tiles_is_what_was_lost_or_as_before(codec: TopK, path: str) -> None:
    n = 2 * 2**18 + 5000
    values, residual = gaussian(n), gaussian(n, 1) * 0.5
    values[::7] = -0.0
    residual[::7] = -0.0
    values[: codec.format.chunk] = -0.0
    residual[: codec.format.chunk] = -0.0
    corrected, before = values + residual, residual.clone()
    with use(path):
        for at in (n - 1, 2**18 + 1, 2**18 - 1):
            bad = values.clone()
            bad[at] = math.inf
            with pytest.raises(CodecError, match=f"inf at {at} of {n}"):
                codec.encode_residual(bad, residual)
            assert torch.equal(residual.view(torch.int32), before.view(torch.int32))
        packed = codec.encode_residual(values, residual)
        assert torch.equal(packed, codec.encode(corrected))
        lost = corrected - codec.decode(packed, n)
    assert torch.equal(residual.view(torch.int32), lost.view(torch.int32))


@every_codec
def test_torch_threads_do_not_change_the_bytes(codec: TopK) -> None:
    values, threads = gaussian(2**19 + 77), torch.get_num_threads()
    outcomes = []
    try:
        with use("torch"):
            for count in (1, 2):
                torch.set_num_threads(count)
                residual = gaussian(values.numel(), 1)
                packed = codec.encode_residual(values, residual)
                codec.accumulate(packed, residual, 0.3)
                outcomes.append((packed, residual))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1].view(torch.int32), outcomes[1][1].view(torch.int32))


@every_path
def test_one_codec_serves_many_threads_at_once(path: str) -> None:
    codec, n = topk(), 50_000

    def trip(seed: int) -> tuple[Tensor, Tensor]:
        residual = gaussian(n, seed + 100)
        packed = codec.encode_residual(gaussian(n, seed), residual)
        codec.accumulate(packed, residual, 0.3)
        return packed, residual

    with use(path), ThreadPoolExecutor(4) as pool:
        for seed, (packed, residual) in enumerate(pool.map(trip, range(24))):
            alone, left = trip(seed)
            assert torch.equal(packed, alone)
            assert torch.equal(residual, left)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_codec
def test_a_gpu_gives_the_bytes_and_the_residual_of_the_cpu(codec: TopK) -> None:
    values, residual = gaussian(70_000), gaussian(70_000, 1)
    values[:9000] = values[:9000].sign()
    left = residual.cuda()
    packed, on_gpu = codec.encode_residual(values, residual), codec.encode_residual(values.cuda(), left)
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), packed)
    assert torch.equal(left.cpu().view(torch.int32), residual.view(torch.int32))
    codec.accumulate(on_gpu, left, 0.3)
    codec.accumulate(packed, residual, 0.3)
    assert torch.equal(left.cpu().view(torch.int32), residual.view(torch.int32))
    on_gpu[:4] = 0xFF
    with pytest.raises(CodecError):
        codec.decode(on_gpu, 70_000)


@needs_numba
def test_kernels_warm_up() -> None:
    loader.import_kernels("topk").warm_up()
