"""Tests of training/algorithms: contributions and steps of each algorithm, also with overlap."""

import math

import pytest
import torch
from torch import Tensor, nn

from shoal.peer.training.algorithms import AccumulatedGradient, OverlappedPseudoGradient, PseudoGradient
from shoal.peer.training.parameters import ParameterVector

DATA = torch.randn(12, 3, generator=torch.Generator().manual_seed(3))


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 1)


def backward(model: nn.Module, batch: Tensor, factor: float = 1.0) -> None:
    (factor * model(batch).square().mean()).backward()


def test_a_pseudo_gradient_is_the_way_back_to_the_anchor() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = vector.read()
    work = PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None)
    assert not bool(work.contribution(anchor).any())
    for _ in range(3):
        backward(model, DATA)
        work.step(12, 1.0)
    moved = work.contribution(anchor)
    assert torch.equal(moved, anchor - vector.read())
    assert bool(moved.any())
    assert all(parameter.grad is None for parameter in model.parameters())
    work.restart_from(anchor)
    assert torch.equal(vector.read(), anchor)


def test_what_the_inner_optimizer_remembers_can_be_forgotten() -> None:
    """One gradient that is not a number stays in its moments for ever."""
    model = make_model()
    vector = ParameterVector(model)
    anchor = vector.read()
    work = PseudoGradient(vector, torch.optim.AdamW(model.parameters(), lr=0.1), None)
    backward(model, DATA, math.nan)
    work.step(12, 1.0)
    work.reset_optimizer()
    work.restart_from(anchor)
    backward(model, DATA)
    work.step(12, 1.0)
    assert bool(work.contribution(anchor).isfinite().all())


def overlapped() -> tuple[nn.Module, ParameterVector, OverlappedPseudoGradient]:
    model = make_model()
    vector = ParameterVector(model)
    return model, vector, OverlappedPseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None)


def train(model: nn.Module, work: PseudoGradient, steps: int) -> None:
    for _ in range(steps):
        backward(model, DATA)
        work.step(12, 1.0)


def test_work_done_under_an_exchange_is_in_the_next_contribution_in_full() -> None:
    model, vector, work = overlapped()
    anchor = vector.read()
    train(model, work, 2)
    offered = work.contribution(anchor)
    at_offer = vector.read()
    train(model, work, 3)
    done_since = at_offer - vector.read()
    assert bool(done_since.any())
    anchor = anchor - 0.7 * offered + 0.25
    work.continue_from(anchor)
    torch.testing.assert_close(work.contribution(anchor), done_since)


def test_whoever_did_nothing_under_an_exchange_is_exactly_at_the_anchor() -> None:
    model, vector, work = overlapped()
    anchor = vector.read()
    train(model, work, 2)
    work.contribution(anchor)
    anchor = anchor * 1.1 + 0.3
    work.continue_from(anchor)
    assert torch.equal(vector.read(), anchor)


def test_an_aborted_rounds_work_is_in_the_next_contribution_with_what_is_done_since() -> None:
    model, vector, work = overlapped()
    anchor = vector.read()
    train(model, work, 2)
    work.contribution(anchor)
    train(model, work, 1)
    both = work.contribution(anchor)
    assert torch.equal(both, anchor - vector.read())
    train(model, work, 1)
    last = vector.read()
    work.continue_from(anchor)
    torch.testing.assert_close(vector.read(), anchor + (last - (anchor - both)))


def test_an_offer_is_not_changed_by_what_is_done_since() -> None:
    model, vector, work = overlapped()
    anchor = vector.read()
    train(model, work, 1)
    offered = work.contribution(anchor)
    as_offered = offered.clone()
    train(model, work, 2)
    work.continue_from(anchor * 2)
    assert torch.equal(offered, as_offered)


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0])
def test_the_schedule_scales_the_base_rate_each_time(factor: float) -> None:
    model = make_model()
    vector = ParameterVector(model)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.4}]  # type: ignore[list-item]
    )
    work = PseudoGradient(vector, optimizer, None)
    for _ in range(2):
        anchor = vector.read()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        work.step(1, factor)
        expected = torch.tensor([0.1, 0.1, 0.1, 0.4]) * factor
        torch.testing.assert_close(work.contribution(anchor), expected)


def test_gradients_are_clipped_before_the_step() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = vector.read()
    work = PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=1.0), 0.5)
    backward(model, DATA, 1000.0)
    work.step(12, 1.0)
    assert float(work.contribution(anchor).norm()) == pytest.approx(0.5, rel=1e-4)


def test_accumulated_gradients_are_the_mean_over_all_samples() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = vector.read()
    work = AccumulatedGradient(vector)
    for start, stop in ((0, 2), (2, 3), (3, 12)):
        backward(model, DATA[start:stop])
        work.step(stop - start, 0.5)
    found = work.contribution(anchor)
    assert torch.equal(vector.read(), anchor), "no inner step"
    backward(model, DATA)
    torch.testing.assert_close(found, vector.take_gradients())


def test_a_contribution_may_be_changed_and_made_again() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = vector.read()
    for work in (
        AccumulatedGradient(vector),
        PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None),
    ):
        backward(model, DATA)
        work.step(1, 1.0)
        first = work.contribution(anchor)
        kept = first.clone()
        first.fill_(0.0)
        assert torch.equal(work.contribution(anchor), kept)


def test_a_restart_forgets() -> None:
    model = make_model()
    vector = ParameterVector(model)
    work = AccumulatedGradient(vector)
    backward(model, DATA)
    work.step(12, 1.0)
    anchor = torch.arange(4.0)
    work.restart_from(anchor)
    assert torch.equal(vector.read(), anchor)
    assert torch.equal(work.contribution(anchor), torch.zeros(4))
    backward(model, DATA[:3])
    work.step(3, 1.0)
    found = work.contribution(anchor)
    backward(model, DATA[:3])
    torch.testing.assert_close(found, vector.take_gradients())
