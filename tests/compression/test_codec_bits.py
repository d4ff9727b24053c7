"""Errors of every codec, and results that do not depend on threads, pieces or the device."""

import math
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist

import pytest
import torch
from tests.compression.codec_cases import CODECS, OPTIONS, compiled, gaussian, same_bits, use
from torch import Tensor

from shoal.compression.codec import Codec


def absmax(largest_code: int, block: int, *, stochastic: bool = False) -> float:
    """A uniform step's root mean square error; of N normal values the largest is around sqrt(2 ln 2N), or less.

    Rounding at random errs by sqrt(2) times as much as to the nearest.
    """
    return math.sqrt(2 * math.log(2 * block)) / largest_code / math.sqrt(6 if stochastic else 12)


def sparse(k: int, chunk: int) -> float:
    """What the k largest of a chunk of normal values leave, if coarse codes lose no more than 5 % of what is sent."""
    normal = NormalDist()
    threshold = normal.inv_cdf(1 - k / chunk / 2)
    sent = 2 * threshold * normal.pdf(threshold) + k / chunk
    return math.sqrt(1 - 0.95 * sent)


# Floats of p bits err by at most x * 2**-p, and evenly below that: 1 / sqrt(3) of it in the root of the mean square.
EVENLY = 1 / math.sqrt(3)
# The best that one magnitude, and that two, can do for normal values (Max 1960), with 1 % for finding them.
ONE_MAGNITUDE, TWO_MAGNITUDES = 1.01 * math.sqrt(1 - 2 / math.pi), 1.01 * math.sqrt(0.1175)
LARGEST_ERROR = {
    "float32": 0.0,
    "bfloat16": 2**-8 * EVENLY,
    "float16": 2**-11 * EVENLY,
    "float16(block=5)": 2**-11 * EVENLY,
    "float8_e4m3": 2**-4 * EVENLY,
    "float8_e4m3(block=16)": 2**-4 * EVENLY,
    "int8": absmax(127, 1024),
    "int8(block=64)": absmax(127, 64),
    "int8(seed=7)": absmax(127, 1024, stochastic=True),
    "int8(block=6,seed=5)": absmax(127, 6, stochastic=True),
    "int4": absmax(7, 256),
    "int4(block=32)": absmax(7, 32),
    f"int4(block=6,seed={2**32 - 1})": absmax(7, 6, stochastic=True),
    "int2": TWO_MAGNITUDES,
    "int2(block=8)": TWO_MAGNITUDES,
    "sign": ONE_MAGNITUDE,
    "sign(block=64)": ONE_MAGNITUDE,
    "topk": sparse(64, 4096),
    "topk(k=8, values=int8, chunk=256)": sparse(8, 256),
    "topk(k=5, chunk=37)": sparse(5, 37),
}


def test_the_error_on_normal_values_is_bounded(codec: Codec) -> None:
    for size in (1.0, 1e-20, 1e20):
        values = gaussian(1 << 16) * size
        decoded = codec.decode(codec.encode(values), 1 << 16)
        error = float((decoded.double() - values.double()).norm() / values.double().norm())
        bound = LARGEST_ERROR[codec.name]
        # A bound that is far from the error would let too much pass.
        assert 0.5 * bound <= error <= bound


def test_a_second_trip_changes_nothing_but_a_last_bit(codec: Codec) -> None:
    if codec.name.startswith("int2"):
        pytest.skip("of a small block's decoded values the mean is another, and so is what lies above 1.4 times it")
    decoded = codec.decode(codec.encode(gaussian(9000)), 9000)
    # A scale of max|x| / 127 or / 7 is rounded, and so may be the largest value that it gives.
    rounded = 2**-22 if "int" in codec.name else 0
    torch.testing.assert_close(codec.decode(codec.encode(decoded), 9000), decoded, rtol=rounded, atol=0)


def everything(codec: Codec, n: int, seed: int = 0, piece: int | None = None) -> tuple[Tensor, ...]:
    """What decoding, the residual and the sum come to, of values encoded whole or piece by piece."""
    values = gaussian(n, seed) * torch.exp(gaussian(n, seed + 1))
    residual, total, decoded = gaussian(n, seed + 2), gaussian(n, seed + 3), torch.empty(n)
    for start in range(0, n, piece or n):
        part = slice(start, start + (piece or n))
        packed = codec.encode_residual(values[part], residual[part])
        codec.decode(packed, len(values[part]), decoded[part])
        codec.accumulate(packed, total[part], 0.3)
    return decoded, residual, total


def agree(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def test_one_thread_and_two_and_the_torch_path_give_the_same_bits(codec: Codec) -> None:
    n, before = 70_001, torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(everything(codec, n))
        if compiled():
            with use("torch"):
                results.append(everything(codec, n))
    finally:
        torch.set_num_threads(before)
    assert all(agree(results[0], other) for other in results)


def test_pieces_of_whole_blocks_give_the_same_bits_as_all_at_once(codec: Codec) -> None:
    options = OPTIONS[codec.name]
    if "seed" in options:
        pytest.skip("random rounding is drawn from a block's place among those that are encoded with it")
    piece = math.lcm(4096, options.get("block", 1), options.get("chunk", 1))
    assert agree(everything(codec, 270_001), everything(codec, 270_001, piece=piece))


def test_one_codec_serves_many_threads_at_once(codec: Codec) -> None:
    sizes = [1000 * (i % 3) + 20_000 for i in range(12)]
    expected = [everything(codec, n, seed) for seed, n in enumerate(sizes)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda seed: everything(codec, sizes[seed], seed), range(len(sizes))))
    assert all(agree(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("every", CODECS, ids=lambda codec: codec.name)
def test_a_gpu_gives_the_same_bits(every: Codec) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for n in (0, 1, 300, 70_001):
        values, residual, total = gaussian(n), gaussian(n, 1), gaussian(n, 2)
        packed = every.encode(values)
        on_gpu = every.encode(values.cuda())
        assert on_gpu.is_cuda
        assert torch.equal(on_gpu.cpu(), packed)
        decoded = every.decode(on_gpu, n)
        assert decoded.is_cuda
        assert same_bits(decoded.cpu(), every.decode(packed, n))
        left, sums = residual.cuda(), total.cuda()
        fused = every.encode_residual(values.cuda(), left)
        assert torch.equal(fused.cpu(), every.encode_residual(values, residual))
        assert same_bits(left.cpu(), residual)
        every.accumulate(on_gpu, sums, 0.3)
        every.accumulate(packed, total, 0.3)
        assert torch.equal(sums.cpu(), total)
