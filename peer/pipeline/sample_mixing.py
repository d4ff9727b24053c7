"""Detection of layers whose results are not those of each sample for itself, such as batch normalisation and dropout.

Devices cannot share the samples of a micro-batch in these: another replica, which computes it as a whole, would find
other results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from shoal.peer.training.data import Dataset, take_batch
from shoal.peer.training.layers import LayeredRecipe, StageModel
from shoal.peer.training.rng import random_states, seeded

_CPU = torch.device("cpu")

_SAMPLES = 4
"""Samples on which layers are tried: in two halves of two, as some layers refuse a single sample."""

_SAME = 1e-3
"""Relative distance of results that are the same but for rounding."""


def stage_mixes_samples(
    recipe: LayeredRecipe, data: Dataset, model: StageModel, input_shape: tuple[int, ...] | None, *, is_last: bool
) -> bool:
    """Return whether a stage mixes samples, see ``mixes_samples``.

    ``input_shape``: of a sample of the stage's input where that comes from another stage, else None; ``is_last``: the
    loss belongs to the stage."""
    batch = take_batch(data, np.arange(_SAMPLES) % len(data))
    generator, targets = torch.Generator().manual_seed(0), recipe.targets_of(batch)
    if input_shape is None:
        given = recipe.input_of(batch)
    else:
        given = torch.randn((_SAMPLES, *input_shape), generator=generator)
    if not is_last:
        return mixes_samples(model, given)
    return mixes_samples(model, given, lambda output, rows: recipe.loss_of(output, targets[rows]))


def mixes_samples(
    model: StageModel, given: Tensor, loss_of: Callable[[Tensor, slice], Tensor] = lambda output, _: output
) -> bool:
    """Return whether the results of samples depend on the others in their micro-batch, or on random numbers.

    ``model``: on the CPU; ``given``: (4, …); ``loss_of``: mean loss, (), of the output of these samples."""
    persistent = model.state_dict().keys()

    def run(rows: slice) -> Tensor:
        buffers = {name: one.clone() for name, one in model.named_buffers() if name in persistent}
        return loss_of(functional_call(model, buffers, (given[rows],)), rows)

    half = len(given) // 2
    with seeded(_CPU, 0), torch.no_grad():
        before = random_states(_CPU)
        whole, halves = run(slice(None)), [run(slice(half)), run(slice(half, None))]
        if random_states(_CPU) != before:
            return True
    apart = torch.cat(halves) if whole.dim() else torch.stack(halves).mean()
    return not bool((whole - apart).norm() <= _SAME * whole.norm())
