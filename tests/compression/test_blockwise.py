"""int8 and int4: error bounds, golden bytes, hostile bytes, and the same bits on every path."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression import fast
from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import CodecError

FLOAT_MAX = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny

CODECS = [Blockwise(8), Blockwise(8, 4), Blockwise(8, 6, seed=5), Blockwise(4), Blockwise(4, 4), Blockwise(4, 6, 2**32 - 1)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, FLOAT_MAX, -FLOAT_MAX, TINY, 127 * TINY, 7 * TINY, 1.4e-45, -1.4e-45]),
)
vectors = st.lists(floats, max_size=40).map(lambda xs: torch.tensor(xs, dtype=torch.float32))


@contextmanager
def path(modules: dict[str, ModuleType]) -> Iterator[None]:
    """With just these compiled kernels."""
    before = dict(fast._ready)
    fast._ready.clear()
    fast._ready.update(modules)
    try:
        yield
    finally:
        fast._ready.clear()
        fast._ready.update(before)


@pytest.fixture(scope="module")
def kernels() -> dict[str, ModuleType]:
    pytest.importorskip("numba", reason="the compiled kernels need numba (pip install 'shoal[fast]')")
    from shoal.compression import blockwise_kernels

    blockwise_kernels.warm_up()
    return {"blockwise_kernels": blockwise_kernels}


def test_kernels_are_compiled_ahead_in_the_background() -> None:
    pytest.importorskip("numba", reason="the compiled kernels need numba (pip install 'shoal[fast]')")
    thread = fast.compile_ahead()
    assert thread is fast.compile_ahead()
    assert thread is not threading.current_thread()
    thread.join()
    assert fast.kernels("blockwise_kernels") is not None


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def outcome(codec: Blockwise, values: Tensor, residual: Tensor, weight: float) -> list[list[int]]:
    """The bytes and bits of all that a codec does with them."""
    n = values.numel()
    packed = codec.encode(values)
    left, total = residual.clone(), residual.clone()
    codec.accumulate(packed, total, weight)
    try:
        fused = codec.encode_residual(values, left)
    except CodecError:
        assert bits(left) == bits(residual), "a residual that could not be encoded is as before"
        fused = torch.empty(0, dtype=torch.uint8)
    return [packed.tolist(), bits(codec.decode(packed, n)), bits(total), fused.tolist(), bits(left)]


@every_codec
@given(values=vectors, weight=st.floats(-3, 3, width=32), data=st.data())
@settings(deadline=None)
def test_kernels_give_the_same_bits(
    kernels: dict[str, ModuleType], codec: Blockwise, values: Tensor, weight: float, data: st.DataObject
) -> None:
    residual = torch.tensor(data.draw(st.lists(floats, min_size=len(values), max_size=len(values))), dtype=torch.float32)
    with path({}):
        slow = outcome(codec, values, residual, weight)
    with path(kernels):
        assert outcome(codec, values, residual, weight) == slow


@every_codec
@pytest.mark.parametrize("n", [0, 1, 5, 70_000, 200_001])
def test_paths_and_threads_agree_on_many_values(kernels: dict[str, ModuleType], codec: Blockwise, n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(1)).pow_(3)
    residual = torch.randn(n, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    outcomes = []
    try:
        for number, modules in [(1, {}), (2, {}), (1, kernels)]:
            torch.set_num_threads(number)
            with path(modules):
                outcomes.append(outcome(codec, values, residual, 1.7))
    finally:
        torch.set_num_threads(threads)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == outcomes[2]


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


@every_codec
def test_accumulate_is_decode_times_weight_plus_total(codec: Blockwise) -> None:
    values, total = torch.randn(1001), torch.randn(1001)
    packed = codec.encode(values)
    expected = total + codec.decode(packed, 1001) * torch.tensor(0.3)
    codec.accumulate(packed, total, 0.3)
    assert bits(total) == bits(expected)


@every_codec
def test_the_residual_is_what_was_lost(codec: Blockwise) -> None:
    values, residual = torch.randn(1001), torch.randn(1001)
    corrected = values + residual
    packed = codec.encode_residual(values, residual)
    assert packed.tolist() == codec.encode(corrected).tolist()
    assert bits(residual) == bits(corrected - codec.decode(packed, 1001))


def test_stochastic_rounding_is_right_on_average_and_from_its_seed() -> None:
    values = torch.full((60_000,), 0.3)
    values[::1000] = 127.0
    decoded = [Blockwise(8, 1000, seed).decode(Blockwise(8, 1000, seed).encode(values), 60_000) for seed in (1, 1, 2)]
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.equal(decoded[0], decoded[2])
    small = decoded[0][values < 1.0]
    assert set(small.tolist()) == {0.0, 1.0}
    # Five standard deviations of the mean of 59,940 draws.
    assert abs(float(small.mean()) - 0.3) < 5 * (0.3 * 0.7 / 59_940) ** 0.5


def test_golden_bytes() -> None:
    values = torch.tensor([1.0, -0.5, 0.25, 127.0, -127.0, 3.6, 0.0])
    assert Blockwise(8, 4).encode(values).numpy().tobytes().hex() == "0000803f0000803f0100007f810400"
    assert Blockwise(4, 4).encode(values).numpy().tobytes().hex() == "922491419224914188f88188"
    assert Blockwise(8, 4, seed=7).encode(values).numpy().tobytes().hex() == "0000803f0000803f01ff007f810400"


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_named(kernels: dict[str, ModuleType], codec: Blockwise, bad: float) -> None:
    values = torch.ones(5000)
    values[4321] = bad
    for modules in ({}, kernels):
        residual = torch.ones(5000)
        with path(modules):
            with pytest.raises(CodecError, match="at 4321 of 5000"):
                codec.encode(values)
            with pytest.raises(CodecError, match="at 4321 of 5000"):
                codec.encode_residual(values, residual)
        assert torch.equal(residual, torch.ones(5000))


@every_codec
@given(n=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_hostile_bytes_are_finite_or_refused(
    kernels: dict[str, ModuleType], codec: Blockwise, n: int, data: st.DataObject
) -> None:
    size = codec.packed_bytes(n)
    hostile = data.draw(st.binary(min_size=size, max_size=size))
    answers = []
    for modules in ({}, kernels):
        with path(modules):
            total = torch.zeros(n)
            try:
                answers.append(bits(codec.decode(hostile, n)))
                codec.accumulate(hostile, total, 1.0)
            except CodecError as error:
                answers.append(str(error))
                assert not total.any()
            else:
                assert bool(torch.isfinite(total).all())
    assert answers[0] == answers[1]


@every_codec
@pytest.mark.parametrize("more", [-1, 1])
def test_another_length_is_refused(codec: Blockwise, more: int) -> None:
    hostile = bytes(codec.packed_bytes(9) + more)
    with pytest.raises(CodecError, match="packed bytes"):
        codec.decode(hostile, 9)
    with pytest.raises(CodecError, match="packed bytes"):
        codec.accumulate(hostile, torch.zeros(9), 1.0)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), TINY / 2, FLOAT_MAX])
@pytest.mark.parametrize("codec", [Blockwise(8, 4), Blockwise(4, 4)], ids=["int8", "int4"])
def test_bad_scales_are_refused(codec: Blockwise, scale: float) -> None:
    packed = codec.encode(torch.ones(8))
    packed[4:8] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(CodecError, match="scale"):
        codec.decode(packed, 8)


@pytest.mark.parametrize("codec", [Blockwise(8, 4), Blockwise(4, 4)], ids=["int8", "int4"])
def test_the_lowest_code_under_the_largest_scale_is_refused(codec: Blockwise) -> None:
    packed = codec.encode(torch.full((4,), -FLOAT_MAX))
    assert bool(torch.isfinite(codec.decode(packed, 4)).all())
    packed[4:] = 0x80 if codec.bits == 8 else 0
    with pytest.raises(CodecError, match="code is too low"):
        codec.decode(packed, 4)


def test_decode_into_a_given_tensor() -> None:
    codec, values, out = Blockwise(), torch.randn(300), torch.empty(300)
    packed = codec.encode(values)
    assert codec.decode(packed, 300, out=out) is not None
    assert torch.equal(out, codec.decode(packed, 300))
    with pytest.raises(CodecError, match="expected 300 values"):
        codec.decode(packed, 300, out=torch.empty(301))


@pytest.mark.parametrize("options", [{"bits": 3}, {"block": 3}, {"block": 0}, {"block": 2**21}, {"seed": -1}])
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(CodecError):
        Blockwise(**options)


@pytest.mark.gpu
@every_codec
def test_a_gpu_gives_the_same_bits(codec: Blockwise) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values, residual = torch.randn(70_001), torch.randn(70_001)
    packed = codec.encode(values.cuda())
    assert packed.cpu().tolist() == codec.encode(values).tolist()
    assert bits(codec.decode(packed, 70_001).cpu()) == bits(codec.decode(packed.cpu(), 70_001))
    on_gpu = residual.cuda()
    fused = codec.encode_residual(values.cuda(), on_gpu)
    assert fused.cpu().tolist() == codec.encode_residual(values, residual).tolist()
    assert bits(on_gpu.cpu()) == bits(residual)
