"""Tests of packing in pipeline/tensor_io: exact sizes, values within the codec's error, hostile headers."""

from typing import Any

import pytest
import torch

from shoal.compression.formats import CodecError
from shoal.compression.registry import get_codec
from shoal.peer.pipeline.tensor_io import MAX_ELEMENTS, TensorHeader, pack, unpack
from shoal.swarm.errors import WireError

FLOAT32, INT8 = get_codec("float32"), get_codec("int8")


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("shape", [(2, 5, 7), (3,), (1, 1), ()])
def test_float32_is_exact(shape: tuple[int, ...]) -> None:
    given = values(*shape)
    form = TensorHeader.of(given)
    packed = pack(given, FLOAT32)
    assert packed.numel() == form.packed_bytes(FLOAT32) == 4 * given.numel()
    found = unpack(packed.numpy().tobytes(), form, FLOAT32)
    assert torch.equal(found, given)
    assert found.dtype == torch.float32


def test_the_codec_is_the_runs() -> None:
    given = values(3, 40, 20)
    form = TensorHeader.of(given)
    packed = pack(given, INT8)
    assert packed.numel() == form.packed_bytes(INT8) < 0.27 * 4 * given.numel()
    found = unpack(packed, form, INT8)
    assert found.shape == given.shape
    assert not torch.equal(found, given)
    assert float((found - given).abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_as_it_was(dtype: torch.dtype) -> None:
    given = values(4, 6).to(dtype)
    found = unpack(pack(given, FLOAT32), TensorHeader.of(given), FLOAT32)
    assert found.dtype == dtype
    assert torch.equal(found, given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers_travel_as_they_are_whatever_the_codec(dtype: torch.dtype) -> None:
    given = torch.randint(0, 100, (3, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
    form = TensorHeader.of(given)
    packed = pack(given, INT8)
    assert packed.numel() == form.packed_bytes(INT8) == given.numel() * dtype.itemsize
    found = unpack(packed.numpy().tobytes(), form, INT8)
    assert found.dtype == dtype
    assert torch.equal(found, given)


def test_any_memory_layout() -> None:
    given = values(6, 4).t()
    assert torch.equal(unpack(pack(given, FLOAT32), TensorHeader.of(given), FLOAT32), given)
    numbers = torch.arange(12).view(3, 4).t()[1:]
    assert torch.equal(unpack(pack(numbers, INT8), TensorHeader.of(numbers), INT8), numbers)


@pytest.mark.parametrize("given", [torch.arange(6), torch.ones(6)])
def test_nothing_is_shared(given: torch.Tensor) -> None:
    packed = pack(given, FLOAT32)
    found = unpack(packed, TensorHeader.of(given), FLOAT32)
    packed.zero_()
    assert bool(found[1:].all())
    assert bool(given[1:].all())


def test_gradients_are_cut_off() -> None:
    assert not pack(values(3).requires_grad_(), FLOAT32).requires_grad


def test_what_is_not_finite_is_not_sent() -> None:
    with pytest.raises(CodecError):
        pack(torch.tensor([1.0, float("nan")]), INT8)


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((2, 3), "complex64", "unknown type"),
        ((2, 3), "x" * 10_000, "unknown type"),
        ((2, -3), "float32", "of shape"),
        ((2, 0), "float32", "of shape"),
        ((2**62, 2**62), "float32", "of shape"),
        ((2**31, 2**31, 2**31), "int64", "elements; expected at most"),
        ((MAX_ELEMENTS + 1,), "uint8", "of shape"),
        ((1,) * 9, "float32", "of shape"),
    ],
)
def test_hostile_sizes_are_errors_of_the_wire(shape: Any, dtype: str, match: str) -> None:
    form = TensorHeader(shape, dtype)
    with pytest.raises(WireError, match=match) as refused:
        form.packed_bytes(INT8)
    assert len(str(refused.value)) < 500
    with pytest.raises(WireError, match=match):
        unpack(b"1234", form, INT8)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("length", [0, 1, 23, 25, 1000])
def test_bytes_of_another_length_are_errors_of_the_wire(dtype: str, length: int) -> None:
    with pytest.raises(WireError, match="cannot be unpacked"):
        unpack(bytes(length), TensorHeader((2, 3), dtype), FLOAT32)


def test_values_that_are_not_finite_are_errors_of_the_wire() -> None:
    bad = torch.tensor([1.0, float("inf")]).view(torch.uint8)
    with pytest.raises(WireError, match="NaN or infinity"):
        unpack(bad, TensorHeader((2,), "float32"), FLOAT32)


def test_what_the_receiver_expects() -> None:
    form = TensorHeader((2, 3), "float32")
    form.check((2, 3))
    for wrong in (((2, 4), "float32"), ((3,), "float32"), ((2, 3), "int64"), ((2, 3), "float64")):
        with pytest.raises(WireError, match=r"expected \(2, 3\) float32 or bfloat16 or float16"):
            TensorHeader(*wrong).check((2, 3))
    TensorHeader((2, 3), "int64").check((2, 3), ["int64"])
