"""Tests of training/tensor_sequence: tensors of any type and layout as one vector, read and written by range."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from shoal.compression.range_reader import whole_vector
from shoal.peer.training import tensor_sequence
from shoal.peer.training.tensor_sequence import TensorSequence


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_sequence, "_PIECE", 7)


def make_tensors() -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [
        torch.randn(3, 4, generator=draws).t(),
        torch.randn((), generator=draws),
        torch.randn(0, 3),
        torch.randn(2, 3, 4, 2, generator=draws).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        torch.randn(10, generator=draws)[::2],
        torch.randn(4, 1, generator=draws).to(torch.bfloat16),
        torch.randn(6, generator=draws).to(torch.float64),
    ]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1).float() for one in tensors])


def test_every_range_is_that_of_the_flat_vector() -> None:
    tensors = make_tensors()
    sequence, expected = TensorSequence(tensors), flat(tensors)
    assert sequence.elements == expected.numel()
    for start in range(sequence.elements + 1):
        for stop in range(start, sequence.elements + 1):
            out = torch.empty(stop - start)
            sequence.read(start, stop, out)
            assert torch.equal(out, expected[start:stop]), (start, stop)


def test_every_range_is_written_and_nothing_else() -> None:
    for start in range(0, 76, 3):
        for stop in range(start, 76, 5):
            tensors = make_tensors()
            sequence, expected = TensorSequence(tensors), flat(tensors)
            values = torch.arange(float(stop - start))
            sequence.write(values, start)
            expected[start:stop] = values
            assert torch.equal(flat(tensors), expected), (start, stop)


def test_rounded_is_what_is_read_after_writing() -> None:
    sequence = TensorSequence(make_tensors())
    values = torch.randn(sequence.elements, generator=torch.Generator().manual_seed(2))
    sequence.write(values)
    found = whole_vector(sequence)
    assert torch.equal(sequence.rounded(values), found)
    assert torch.equal(sequence.rounded(values[60:74], 60), found[60:74])
    assert not torch.equal(values, found), "one tensor is bfloat16"
    exact = TensorSequence(make_tensors()[:5])
    assert exact.rounded(values[: exact.elements]) is not None
    assert exact.rounded(some := values[:9]) is some, "no copy where nothing is rounded"


def test_threads_read_and_write_disjoint_ranges() -> None:
    tensors = make_tensors()
    sequence = TensorSequence(tensors)
    values, found = torch.arange(float(sequence.elements)), torch.empty(sequence.elements)
    ranges = [(start, min(start + 5, sequence.elements)) for start in range(0, sequence.elements, 5)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: sequence.write(values[slice(*one)], one[0]), ranges))
        list(pool.map(lambda one: sequence.read(*one, found[slice(*one)]), ranges))
    assert torch.equal(found, values)
