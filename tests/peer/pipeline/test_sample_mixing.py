"""Layers in which the ranks of an island may not share the samples of a micro-batch."""

import pytest
import torch
from tests.peer.layered_models import gpt
from torch import Tensor, nn

from shoal.peer.pipeline.sample_mixing import mixes_samples, stage_mixes_samples
from shoal.peer.training.layers import layered_from_sequential
from shoal.peer.training.rng import random_states

GIVEN = torch.randn((4, 6), generator=torch.Generator().manual_seed(1))


class Centered(nn.Module):
    """Subtracts the mean over the samples, without buffers."""

    def forward(self, given: Tensor) -> Tensor:
        return given - given.mean(0)


def mixes(*layers: nn.Module) -> bool:
    layered = layered_from_sequential(nn.Sequential(nn.Linear(6, 6), *layers))
    return mixes_samples(layered.build(0, len(layered)), GIVEN)


@pytest.mark.parametrize("layer", [nn.LayerNorm(6), nn.Identity(), nn.BatchNorm1d(6).eval(), nn.Dropout().eval()])
def test_layers_of_each_sample_for_itself(layer: nn.Module) -> None:
    assert not mixes(layer)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.Dropout(), Centered()])
def test_layers_that_mix_samples_or_draw(layer: nn.Module) -> None:
    assert mixes(layer)


def test_results_that_are_no_numbers_are_not_divided() -> None:
    layer = nn.Linear(6, 6)
    nn.init.constant_(layer.weight, float("nan"))
    assert mixes(layer)


def test_nothing_is_left_of_the_trial() -> None:
    norm = nn.BatchNorm1d(6)
    model = layered_from_sequential(nn.Sequential(nn.Linear(6, 6), norm, nn.Dropout())).build(0, 2)
    before = random_states(torch.device("cpu"))
    assert mixes_samples(model, GIVEN)
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    assert random_states(torch.device("cpu")) == before


def test_losses_over_pairs_of_samples() -> None:
    model = layered_from_sequential(nn.Sequential(nn.Linear(6, 6))).build(0, 1)
    assert not mixes_samples(model, GIVEN, lambda output, _: output.square().mean())
    assert mixes_samples(model, GIVEN, lambda output, _: (output @ output.T).logsumexp(1).mean())


def test_stages_of_gpt() -> None:
    recipe = gpt()
    data, layered = recipe.training_data(), recipe.layers(1)
    shape = (16, 32)
    assert not stage_mixes_samples(recipe, data, layered.build(0, 2), None, is_last=False)
    assert not stage_mixes_samples(recipe, data, layered.build(2, 4), shape, is_last=False)
    assert not stage_mixes_samples(recipe, data, layered.build(4, len(layered)), shape, is_last=True)
