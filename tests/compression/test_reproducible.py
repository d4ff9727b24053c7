"""The same bits everywhere: what all peers compute from the same means, against plain Python floats."""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.compression.lowrank import PowerSGD
from shoal.compression.reproducible import multiply_transposed, orthonormal

TINY = torch.finfo(torch.float32).tiny


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def folded_sum(terms: list[float]) -> float:
    while len(terms) > 1:
        half = len(terms) // 2
        right = terms[len(terms) - half :]
        left = terms[: len(terms) - half]
        terms = [x + y for x, y in zip(left, right, strict=False)] + left[half:]
    return terms[0]


def flushed(x: float) -> float:
    return 0.0 if abs(x) < TINY else x


def plain_orthonormal(columns: Tensor) -> Tensor:
    """As the module says it, in Python's floats, which round each operation once."""
    vectors = [[flushed(x) for x in column] for column in columns.t().tolist()]
    lengths = [math.sqrt(folded_sum([x * x for x in vector])) for vector in vectors]
    for k, vector in enumerate(vectors):
        length = math.sqrt(folded_sum([x * x for x in vector]))
        if length <= 2.0**-30 * lengths[k]:
            vectors[k] = [0.0] * len(vector)
            continue
        vectors[k] = [x * (1.0 / length) for x in vector]
        for j in range(k + 1, len(vectors)):
            share = folded_sum([x * y for x, y in zip(vectors[j], vectors[k], strict=True)])
            vectors[j] = [x - share * y for x, y in zip(vectors[j], vectors[k], strict=True)]
    return torch.tensor([[flushed(x) for x in vector] for vector in vectors], dtype=torch.float64).float().t()


def plain_product(left: Tensor, right: Tensor) -> Tensor:
    rows = []
    for p in left.tolist():
        row = []
        for q in right.tolist():
            total = flushed(p[0]) * flushed(q[0])
            for x, y in zip(p[1:], q[1:], strict=True):
                total += flushed(x) * flushed(y)
            row.append(flushed(total))
        rows.append(row)
    return torch.from_numpy(np.array(rows, dtype=np.float64).reshape(left.shape[0], right.shape[0])).float()


@given(m=st.integers(1, 40), r=st.integers(1, 5), seed=st.integers(0, 99), exponent=st.integers(-44, 30))
@settings(deadline=None)
def test_results_equal_those_of_plain_python(m: int, r: int, seed: int, exponent: int) -> None:
    columns, other = normal(seed, m, r) * 10.0**exponent, normal(seed + 1, 7, r)
    assert same_bits(orthonormal(columns), plain_orthonormal(columns).contiguous())
    out = torch.empty(m, 7)
    multiply_transposed(columns, other, out)
    assert same_bits(out, plain_product(columns, other))


def test_tiles_make_no_difference() -> None:
    left, right = normal(0, 23, 3), normal(1, 5000, 3)
    out = torch.empty(23, 5000)
    multiply_transposed(left, right, out)
    assert same_bits(out, plain_product(left, right))


@pytest.mark.parametrize("m", [1, 2, 3, 64, 1001])
def test_bases_are_orthonormal_and_span_the_columns(m: int) -> None:
    r = min(m, 6)
    columns = normal(0, m, r)
    columns[:, 1:] = columns[:, :1] + 1e-3 * columns[:, 1:]  # nearly dependent
    basis = orthonormal(columns).double()
    torch.testing.assert_close(basis.t() @ basis, torch.eye(r, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(basis @ (basis.t() @ columns.double()), columns.double(), rtol=0, atol=1e-5)


def test_dependent_columns_become_zero() -> None:
    x, y = normal(0, 50), normal(1, 50)
    basis = orthonormal(torch.stack([torch.zeros(50), x, -2 * x, y, x], dim=1))
    assert basis.any(0).tolist() == [False, True, False, True, False]


def test_subnormals_count_as_zero_going_in_and_coming_out() -> None:
    columns = torch.tensor([[1.0], [1.0], [TINY * 1.2], [TINY / 2]])
    assert orthonormal(columns)[:, 0].tolist()[2:] == [0.0, 0.0]
    out = torch.empty(1, 3)
    multiply_transposed(torch.tensor([[1e10, TINY / 2]]), torch.tensor([[1e-40, 0.0], [0.0, 1e20], [1e-35, 0]]), out)
    assert out.tolist() == [[0.0, 0.0, pytest.approx(1e-25)]]


@pytest.fixture
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def digest_of_rounds(threads: int) -> str:
    """All that follows from given means, over three rounds. Large enough for torch to use its threads."""
    torch.set_num_threads(threads)
    power = PowerSGD([("a", (700, 900)), ("b", (3, 200_000)), ("c", (90_000, 5)), ("bias", (50_000,))], 3, 0.1)
    sha = hashlib.sha256()
    for number in range(3):
        first = normal(2 * number, power.first_size)
        first[:50] *= 1e-42
        second = normal(2 * number + 1, power.second_size)
        second[:90] *= 1e-30
        sha.update(power.follow(first, second).numpy().tobytes())
        power.commit()
        for tensor in power.state().values():
            sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.usefixtures("_restore_threads")
def test_same_bits_with_one_thread_and_two() -> None:
    assert digest_of_rounds(1) == digest_of_rounds(2)


def golden() -> str:
    power = PowerSGD([("a", (37, 41)), ("b", (5, 9)), ("c", (6,))], 3, 1.0, seed=2**63 + 5)
    sha = hashlib.sha256()
    for number in range(1, 4):
        # Exact in float32 however they are computed, so only this module's arithmetic is tested.
        first = ((torch.arange(power.first_size) * 7919 * number) % 1009 - 504).float() / 512
        second = ((torch.arange(power.second_size) * 6007 * number) % 997 - 498).float() / 1024
        sha.update(power.follow(first, second).numpy().tobytes())
        power.commit()
        for tensor in power.state().values():
            sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def test_bits_never_change_by_accident() -> None:
    assert golden() == GOLDEN


GOLDEN = "63fab6804a8b6add39c65d74762c57ca43e5776bf354e59d88f2e2c93a645b7d"


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_make_no_difference(flush: bool) -> None:
    power = PowerSGD([("a", (8, 8))], 2, 0.5)
    first, second = normal(0, power.first_size), normal(1, power.second_size)
    first[3], second[5], second[7] = 1e-40, -1e-40, 1.5e-38
    torch.set_flush_denormal(flush)
    try:
        mean = power.follow(first, second)
        power.commit()
    finally:
        torch.set_flush_denormal(False)
    first[3] = second[5] = 0.0
    other = PowerSGD([("a", (8, 8))], 2, 0.5)
    assert same_bits(mean, other.follow(first, second))
    other.commit()
    assert same_bits(power.state()["q.a"], other.state()["q.a"])
    tiny = torch.finfo(torch.float32).tiny
    assert bool(((mean == 0) | (mean.abs() >= tiny)).all())
