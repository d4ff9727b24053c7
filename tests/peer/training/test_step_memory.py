"""Tests of training/step_memory: the peak of a step, the micro-batch that fits, and activations computed again."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training import step_memory
from shoal.peer.training.parameters import named_parameters
from shoal.peer.training.step_memory import StepMemory, peak_bytes, plan_micro_batch, recompute_activations
from shoal.swarm.errors import DeviceError
from shoal.swarm.protocol.run_file import DataSection

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_is_what_is_in_use_at_a_time() -> None:
    kept = torch.ones(1000)

    def work() -> Tensor:
        first = kept * 2  # 4000 bytes
        second = first + 1  # 4000 more
        del first
        third = second + kept[:500].sum()  # 4000 more, and four for the sum
        kept.add_(1)  # nothing new
        return third.view(10, 100)

    assert peak_bytes(CPU, work, MIB) == 8004


def test_the_meta_device_counts_as_others_do() -> None:
    def step(device: str) -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
        given = torch.ones(16, 64, device=device)
        return peak_bytes(torch.device(device), lambda: model(given).sum().backward(), MIB)

    assert step("meta") == step("cpu") > 16 * 64 * 4 + 4 * 64 * 64


def test_a_sample_that_needs_too_much_is_given_up_before_it_has_taken_it() -> None:
    """A small model with a long context: nobody may be ended by measuring that it does not fit."""
    layers = nn.Sequential(nn.Linear(1, 1), *[nn.Tanh() for _ in range(64)])
    given, made = torch.zeros(2**18, 1, requires_grad=True), []
    for layer in layers:
        layer.register_forward_hook(lambda *_: made.append(1))
    with pytest.raises(DeviceError, match="--max-memory"):
        peak_bytes(CPU, lambda: layers(given).sum(), 6 * MIB)
    assert len(made) < 8


class Wide(nn.Module):
    """A model whose samples take 1000 values each, and 500 once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def loss(self, samples: int) -> Tensor:
        once = self.weight.expand(500) * 2
        return (self.weight * torch.ones(samples, 1000)).exp().sum() + once.exp().sum()


def test_samples_are_counted_by_their_measured_peak() -> None:
    model = Wide()
    one, two = (peak_bytes(CPU, lambda n=n: model.loss(n).backward(), MIB) for n in (1, 2))
    model.weight.grad = None
    sample = two - one
    assert sample >= 4000
    assert plan_micro_batch(model, model.loss, 64, one + 9 * sample + sample // 2) == 10
    assert plan_micro_batch(model, model.loss, 4, 10 * MIB) == 4
    assert plan_micro_batch(model, model.loss, 1, one) == 1
    assert plan_micro_batch(model, model.loss, 64, one) == 1
    with pytest.raises(DeviceError, match="--max-memory"):
        plan_micro_batch(model, model.loss, 64, one - 1)
    assert model.weight.grad is None, "nothing is left of the measurement"


def test_what_is_taken_once_is_no_samples_memory() -> None:
    """Autocast's copies of the weights are many times a sample's activations here."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])

    def loss_of(samples: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(torch.ones(samples, 256)).float().sum()
            return loss

    one = peak_bytes(CPU, lambda: loss_of(1).backward(), 10 * MIB)
    assert one > 2 * 2 * 256 * 256
    assert plan_micro_batch(model, loss_of, 64, 2 * one) == 64
    assert StepMemory(100, 10).samples_in(155) == 5


class Drawing(nn.Module):
    """A model with running statistics that draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, samples: int) -> Tensor:
        self.seen = self.seen + samples  # in place of the one that there was
        given = torch.ones(1 + samples, 8) * (np.random.random() + random.random())
        loss: Tensor = self.drop(self.norm(given)).sum()
        return loss


def test_measuring_leaves_buffers_and_random_numbers_as_they_were() -> None:
    model = Drawing()
    buffers = {name: (one, one.clone()) for name, one in model.named_buffers()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert plan_micro_batch(model, model.loss, 4, MIB) == 4
    for name, one in model.named_buffers():
        assert one is buffers[name][0]
        assert torch.equal(one, buffers[name][1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    model.loss(4)
    assert not torch.equal(model.norm.running_mean, buffers["norm.running_mean"][1]), "training does change them"


# Activations that are computed again ------------------------------------------------------------------------


def gpt() -> tuple[GptRecipe, nn.Module]:
    recipe = GptRecipe({"layers": 4, "width": 32, "heads": 2, "context": 64}, DataSection(source="stdlib"))
    return recipe, recipe.build_model(1)


def batch_of(samples: int) -> Tensor:
    return torch.randint(0, 200, (samples, 65), generator=torch.Generator().manual_seed(3))


def test_blocks_are_computed_again_where_a_sample_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    recipe, model = gpt()

    def loss_of(samples: int) -> Tensor:
        return recipe.loss(model, batch_of(samples))

    plain = step_memory.step_peak(model, loss_of, 1, 100 * MIB)
    assert plan_micro_batch(model, loss_of, 4, 2 * plain) >= 2
    assert "computed again" not in caplog.text
    room = plain * 3 // 4
    assert plan_micro_batch(model, loss_of, 4, room) >= 1
    assert "the activations of 4 blocks are computed again" in caplog.text
    assert step_memory.step_peak(model, loss_of, 1, room) <= room
    with pytest.raises(DeviceError, match="one sample needs"):
        plan_micro_batch(model, loss_of, 4, room // 20)


def test_blocks_that_are_computed_again_have_the_same_gradients_and_names() -> None:
    recipe, model = gpt()
    _, other = gpt()
    assert recompute_activations(other) == 4
    assert recompute_activations(other) == 0, "once is enough"
    for one in (model, other):
        recipe.loss(one, batch_of(2)).backward()  # type: ignore[no-untyped-call]
    assert [name for name, _ in named_parameters(model)] == [name for name, _ in named_parameters(other)]
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
