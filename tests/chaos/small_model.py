"""A recipe for tests in which computing costs next to nothing: six layers that tell random points apart."""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.peer.pipeline.profile import LayerProfile, ModelProfile
from shoal.peer.training.data import SampleOrder
from shoal.peer.training.layers import Layered, layered_from_makers
from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.model import LayerCost
from shoal.swarm.protocol.run_file import RunFile

LAYERS, WIDTH, KINDS, POINTS = 6, 8, 3, 500
SEED = 1


class Points:
    """``(WIDTH + 1,) float32``: a point and its kind."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(2)
        points = torch.randn(POINTS, WIDTH, generator=made)
        kinds = points[:, :KINDS].argmax(dim=1, keepdim=True)
        self._all = torch.cat([points, kinds.float()], dim=1)

    def __len__(self) -> int:
        return POINTS

    def __getitem__(self, index: int, /) -> Tensor:
        return self._all[index]

    def batch(self, indices: Sequence[int], /) -> Tensor:
        return self._all[torch.as_tensor(np.asarray(indices))]


class _Block(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        return given + torch.tanh(super().forward(given))


class SmallRecipe:
    """A ``LayeredRecipe``; one sample is one token."""

    tokens_per_sample = 1
    corpus_digest = hashlib.sha256(b"points").digest()
    corpus_about = "points"

    def layers(self, seed: int) -> Layered:
        blocks = [(f"block{number}", partial(_Block, WIDTH, WIDTH)) for number in range(LAYERS - 1)]
        return layered_from_makers([*blocks, ("head", partial(nn.Linear, WIDTH, KINDS))], seed)

    def build_model(self, seed: int) -> nn.Module:
        return self.layers(seed).build(0, LAYERS)

    def training_data(self) -> Points:
        return Points()

    def input_of(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def targets_of(self, batch: Tensor) -> Tensor:
        return batch[:, -1].long()

    def check_targets(self, targets: Tensor, samples: int) -> None:
        if targets.shape != (samples,) or bool(((targets < 0) | (targets >= KINDS)).any()):
            raise ValueError("targets")

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), targets)

    def config(self) -> dict[str, Any]:
        return {"name": "small", "settings": {}}


def measured(*about: object) -> ModelProfile:
    """Return a profile in which all layers cost the same, whatever the machine is doing."""
    layer = LayerProfile("block", LayerCost(10**6, 1000, 1000), 0.05)
    return ModelProfile(2, tuple(f"block{number}" for number in range(LAYERS)), (layer,) * LAYERS)


def memory_bytes(run: RunFile, layers: int) -> int:
    """For so many layers, and not for one more; of the state as the account of memory counts it."""
    return int((layers + 0.5) * 10**6 * account_of(run).demand().shared)


def plain_loop(rounds: int, batch: int) -> Tensor:
    """One process, one optimizer, the batches in order: its parameters, one after the other."""
    recipe = SmallRecipe()
    model, data = recipe.build_model(SEED), recipe.training_data()
    order = SampleOrder(len(data), SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for number in range(rounds):
        samples = data.batch(order.indices(number * batch, (number + 1) * batch))  # type: ignore[arg-type]
        optimizer.zero_grad()
        recipe.loss_of(model(recipe.input_of(samples)), recipe.targets_of(samples)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])
