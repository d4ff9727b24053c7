"""Tests of training/inner_loop: the loss scale of float16."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shoal.peer.training.device import autocast
from shoal.peer.training.inner_loop import InnerLoop, LossScale

CPU = torch.device("cpu")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def mean_of_squares(model: nn.Module, batch: Tensor, factor: float = 1.0) -> Tensor:
    return (model(batch).float() * factor).square().mean()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None])


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def test_small_gradients_survive_float16_by_the_scale() -> None:
    loss = partial(mean_of_squares, factor=1e-4)
    exact, plain, scaled = make_model(), make_model(), make_model()
    InnerLoop(exact, loss, autocast(CPU, "float32"), 6).backward(batch())
    InnerLoop(plain, loss, autocast(CPU, "float16"), 6).backward(batch())
    InnerLoop(scaled, loss, autocast(CPU, "float16"), 2, LossScale(scaled.parameters())).backward(batch())
    expected = gradients(exact)

    def apart(model: nn.Module) -> float:
        return float((gradients(model) - expected).norm() / expected.norm())

    assert apart(plain) > 0.1, "float16 loses them"
    assert apart(scaled) < 0.01


def test_a_batch_that_overflows_is_computed_again_with_a_smaller_scale() -> None:
    loss = partial(mean_of_squares, factor=300.0)
    exact, scaled = make_model(), make_model()
    calls: list[int] = []

    def counted(model: nn.Module, given: Tensor) -> Tensor:
        calls.append(len(given))
        return loss(model, given)

    InnerLoop(exact, loss, autocast(CPU, "float32"), 6).backward(batch())
    loop = InnerLoop(scaled, counted, autocast(CPU, "float16"), 6, LossScale(scaled.parameters()))
    found = loop.backward(batch())
    first = len(calls)
    assert first > 1, "the first scale was too large"
    assert float((gradients(scaled) - gradients(exact)).norm() / gradients(exact).norm()) < 0.01
    assert float(found) == pytest.approx(float(loss(exact, batch()).detach()), rel=0.01)
    for parameter in scaled.parameters():
        parameter.grad = None
    loop.backward(batch())
    assert len(calls) == first + 1, "the scale stays where it works"


def test_a_model_that_diverges_is_not_tried_for_ever() -> None:
    model = make_model()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    loop = InnerLoop(model, mean_of_squares, autocast(CPU, "float16"), 6, LossScale(model.parameters()))
    loop.backward(batch())
    assert not torch.isfinite(gradients(model)).all(), "as it is found out from"


def test_a_model_that_has_diverged_goes_on_with_the_usual_scale() -> None:
    model = make_model()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    scale = LossScale(model.parameters())
    InnerLoop(model, mean_of_squares, autocast(CPU, "float16"), 6, scale).backward(batch())
    assert float(scale.apply(torch.ones(()))) > 1000, "small gradients would be lost again"


def test_a_scale_needs_no_gradients() -> None:
    model = make_model()
    assert LossScale(model.parameters()).unscale()
