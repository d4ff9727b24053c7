"""PowerSGD: linear, exact for low ranks, the same on every peer, and nothing lost."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.lowrank_cases import PLAIN, SHAPES, N, mean_of, normal, one_round, same_bits
from torch import Tensor

from shoal.compression.lowrank import PowerSGD
from shoal.compression.registry import get_codec


def test_sizes_are_known_beforehand() -> None:
    power = PowerSGD(SHAPES, rank=2)
    assert power.n == N
    assert power.plain_at == 2 * (48 + 12 + 16 + 301)
    assert power.first_size == power.plain_at + 80 + 1 + 20
    assert power.second_size == 2 * (80 + 300 + 72 + 9)
    assert power.first(normal(0, N)).shape == (power.first_size,)
    assert power.second(normal(1, power.first_size)).shape == (power.second_size,)
    assert power.finish(normal(2, power.second_size)).shape == (N,)


@pytest.mark.parametrize(("rank", "ratio", "compressed"), [(5, 1.0, True), (5, 1.1, False), (99, 0.1, True)])
def test_what_is_compressed(rank: int, ratio: float, compressed: bool) -> None:
    power = PowerSGD([("w", (10, 10))], rank, ratio)
    assert power.second_size == (10 * min(rank, 10) if compressed else 0)
    assert power.first_size == (10 * min(rank, 10) if compressed else 100)


def test_uncompressed_tensors_are_exact() -> None:
    power, values = PowerSGD(SHAPES, 2), normal(0, N)
    first = power.first(values)
    mean = power.finish(power.second(first))
    residual = power.residual()
    assert torch.equal(first[power.plain_at :], torch.cat([values[start:stop] for start, stop in PLAIN]))
    for start, stop in PLAIN:
        assert same_bits(mean[start:stop], values[start:stop])
        assert not residual[start:stop].any()


@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=4), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_mean_of_factors_is_factor_of_mean(weights: list[float], seed: int) -> None:
    peers = [PowerSGD(SHAPES, 3) for _ in weights]
    alone = PowerSGD(SHAPES, 3)
    values = [normal(seed + i, N) for i in range(len(weights))]
    mean = mean_of(values, weights)
    first = mean_of([p.first(v) for p, v in zip(peers, values, strict=True)], weights)
    torch.testing.assert_close(first, alone.first(mean), rtol=1e-5, atol=1e-5)
    second = mean_of([p.second(first) for p in peers], weights)
    torch.testing.assert_close(second, alone.second(first), rtol=1e-5, atol=1e-5)
    approximations = [p.finish(second) for p in [*peers, alone]]
    assert all(same_bits(a, approximations[0]) for a in approximations)


def low_rank(shapes: Sequence[tuple[str, tuple[int, int]]], rank: int, seed: int) -> Tensor:
    return torch.cat([(normal(seed, a, rank) @ normal(seed + 1, rank, b)).flatten() for _, (a, b) in shapes])


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("true_rank", [1, 2, 5])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
def test_matrices_of_low_rank_are_recovered(rank: int, true_rank: int, magnitude: float) -> None:
    shapes = [("a", (40, 60)), ("b", (70, 30))]
    power = PowerSGD(shapes, rank, 1.0)
    for number in range(3):
        values = low_rank(shapes, true_rank, number) * magnitude
        (mean,) = one_round([power], [values], [1.0])
        error = float((mean - values).norm() / values.norm())
        assert (error < 1e-5) if true_rank <= rank else (0.01 < error < 1.0)
        power.commit()


def test_warm_start_comes_close_to_the_best_approximation() -> None:
    shapes = [("a", (40, 60))]
    u, _, v = torch.linalg.svd(normal(0, 40, 60))
    s = 0.8 ** torch.arange(40)
    values = (u * s @ v[:40]).flatten()
    best = float(s[4:].norm() / s.norm())
    power, errors = PowerSGD(shapes, 4), []
    for _ in range(12):
        (mean,) = one_round([power], [values], [1.0])
        errors.append(float((mean - values).norm() / values.norm()))
        power.commit()
    assert errors[0] > 1.1 * best
    assert errors[-1] < 1.001 * best


def test_a_direction_that_vanished_is_found_again() -> None:
    """A rank that was not needed for a while, and in columns that no Q had anything of."""
    power = PowerSGD([("a", (20, 40))], 2)
    left, right = torch.zeros(20, 40), torch.zeros(20, 40)
    left[:, :10] = normal(0, 20, 1) @ normal(1, 1, 10)
    right[:, 30:] = normal(2, 20, 2) @ normal(3, 2, 10)
    for matrix in (left, left, torch.zeros(20, 40), left, left):
        (mean,) = one_round([power], [matrix.flatten()], [1.0])
        torch.testing.assert_close(mean, matrix.flatten(), rtol=1e-4, atol=1e-5)
        power.commit()
    errors = []
    for _ in range(3):
        (mean,) = one_round([power], [right.flatten()], [1.0])
        errors.append(float((mean - right.flatten()).norm() / right.norm()))
        power.commit()
    assert errors[-1] < 1e-5


def test_error_feedback_converges() -> None:
    """The mean of T approximations is within residual / T of the mean gradient, with peers that differ."""
    shapes = [("a", (32, 48)), ("bias", (7,))]
    peers = [PowerSGD(shapes, 2) for _ in range(3)]
    gradients = [normal(seed, 32 * 48 + 7) for seed in range(3)]
    weights = [1.0, 2.0, 5.0]
    target = mean_of(gradients, weights).double()
    residuals = [torch.zeros_like(g) for g in gradients]
    applied, errors = torch.zeros_like(target), []
    for number in range(1, 81):
        corrected = [g + r for g, r in zip(gradients, residuals, strict=True)]
        mean = one_round(peers, corrected, weights)[0]
        residuals = [p.residual() for p in peers]
        lost = mean_of(corrected, weights) - mean_of(residuals, weights)
        torch.testing.assert_close(lost, mean, rtol=1e-4, atol=1e-4)
        applied += mean.double()
        errors.append(float((applied / number - target).norm() / target.norm()))
        for power in peers:
            power.commit()
    assert errors[0] > 0.8
    assert errors[-1] < 0.25
    assert max(float(r.norm()) for r in residuals) < 20 * float(target.norm())


@pytest.mark.parametrize("codec_name", ["int8", "bfloat16"])
def test_residual_holds_what_a_codec_and_void_chunks_lost(codec_name: str) -> None:
    """Means of what was sent and the residuals add up to the means of the values."""
    codec, weights = get_codec(codec_name), [1.0, 3.0]
    peers = [PowerSGD(SHAPES, 2) for _ in weights]
    values = [normal(seed, N) for seed in range(2)]

    def through_the_wire(vectors: list[Tensor]) -> list[Tensor]:
        sent = [codec.decode(codec.encode(v), v.numel()) for v in vectors]
        for vector in sent:
            vector[30:60] = 0.0  # void for all
        sent[1][-40:] = 0.0  # came too late
        return sent

    sent_first = through_the_wire([p.first(v) for p, v in zip(peers, values, strict=True)])
    mean_first = mean_of(sent_first, weights)
    sent_second = through_the_wire([p.second(mean_first) for p in peers])
    mean = peers[0].finish(mean_of(sent_second, weights))
    residuals = [p.residual(f, s) for p, f, s in zip(peers, sent_first, sent_second, strict=True)]
    torch.testing.assert_close(mean + mean_of(residuals, weights), mean_of(values, weights), rtol=1e-4, atol=1e-4)
    start, stop = PLAIN[1]
    assert same_bits(residuals[1][start:stop], values[1][start:stop])


def test_a_late_joiner_gets_the_same_q() -> None:
    old, values = PowerSGD(SHAPES, 2, seed=9), normal(0, N)
    values[: 48 * 80] = 0.0  # a lost column is drawn from seed and generation, which travel along
    for _ in range(3):
        one_round([old], [values], [1.0])
        old.commit()
    state = old.state()
    joiner = PowerSGD(SHAPES, 2, seed=9)
    joiner.load(state)
    for number in range(3):
        first = old.first(values)
        second = old.second(first)
        assert same_bits(old.finish(second), joiner.follow(first, second))
        old.commit()
        joiner.commit()
        assert all(torch.equal(old.state()[name], tensor) for name, tensor in joiner.state().items()), number
    assert not torch.equal(state["q.w"], old.state()["q.w"])


def test_an_aborted_round_leaves_no_trace() -> None:
    power, other = PowerSGD(SHAPES, 2), PowerSGD(SHAPES, 2)
    one_round([power], [normal(0, N)], [1.0])
    power.discard()
    values = normal(1, N)
    assert same_bits(*[one_round([p], [values], [1.0])[0] for p in (power, other)])
    power.commit()
    other.commit()
    assert torch.equal(power.state()["q.w"], other.state()["q.w"])


def test_seeds_and_matrices_draw_differently() -> None:
    shapes = [("a", (30, 50)), ("b", (30, 50))]
    one, two = PowerSGD(shapes, 2, seed=1).state(), PowerSGD(shapes, 2, seed=2).state()
    columns = [state[name][:, i] for state in (one, two) for name in ("q.a", "q.b") for i in range(2)]
    gram = torch.stack([c / c.norm() for c in columns]) @ torch.stack([c / c.norm() for c in columns]).t()
    assert float((gram - torch.eye(8)).abs().max()) < 0.6
    assert all(0.25 < float(c.norm()) < 2.0 for c in columns)


def test_an_empty_model_and_one_without_matrices() -> None:
    empty = PowerSGD([], 4)
    assert one_round([empty], [torch.empty(0)], [1.0])[0].shape == (0,)
    empty.commit()
    plain = PowerSGD([("bias", (5,))], 4)
    assert same_bits(one_round([plain], [torch.arange(5.0)], [1.0])[0], torch.arange(5.0))
