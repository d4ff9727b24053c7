"""The recipe of ``pipeline.py``: layers that compute little and take a given time, as if each peer had a GPU of a given
speed: peers that share this machine's cores would otherwise measure these."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import check_settings
from shoal.peer.training.layers import Layered, StageModel, layered_from_makers
from shoal.swarm.protocol.run_file import DataSection

NAME = "resting"
FORWARD = 1 / 3
"""Of a layer's time; the rest is its way back."""

_SAMPLES = 1 << 20
_DRAWN = 64

slowness = 1.0
"""This process' machine takes so many times as long as the run's settings say."""


class RestingSettings(BaseModel):
    """``layer_ms``: of one micro-batch, forward and backward. ``ballast``: parameters of a layer that only are there;
    with them a layer takes so much memory that peers can be given room for one stage and no more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int
    width: int
    context: int
    ballast: int
    layer_ms: float


class _RestOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradients[0], None


class Resting(nn.Module):
    """``(b, context, width)`` to the same."""

    def __init__(self, settings: RestingSettings) -> None:
        super().__init__()
        self.linear = nn.Linear(settings.width, settings.width)
        self.ballast = nn.Parameter(torch.zeros(settings.ballast))
        self.layer_s = settings.layer_ms / 1000

    def forward(self, values: Tensor) -> Tensor:
        until_s = time.monotonic() + FORWARD * self.layer_s * slowness
        output: Tensor = values + torch.tanh(self.linear(values))
        if output.is_meta:
            return output
        if output.requires_grad:
            output = _RestOnTheWayBack.apply(output, (1 - FORWARD) * self.layer_s * slowness)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, until_s - time.monotonic()))
        return output


class Drawn:
    """A few samples, over and over: ``(1 + context * width,) float32``, the target first."""

    def __init__(self, settings: RestingSettings) -> None:
        random = torch.Generator().manual_seed(1)
        values = torch.randn(_DRAWN, settings.context * settings.width, generator=random)
        kinds = torch.randint(settings.width, (_DRAWN, 1), generator=random)
        self._samples = torch.cat([kinds.float(), values], dim=1)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int, /) -> Tensor:
        if not 0 <= index < _SAMPLES:
            raise IndexError(index)
        return self._samples[index % _DRAWN]

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64], /) -> Tensor:
        """``(len(indices), 1 + context * width) float32``."""
        return self._samples[torch.as_tensor(np.asarray(indices) % _DRAWN)]


class RestingRecipe:
    """``Recipe`` and ``LayeredRecipe``, but for what only exports need."""

    tokens_per_sample = 1

    def __init__(self, settings: dict[str, Any], data: DataSection, places: DataPlaces = NOWHERE) -> None:
        self.settings = check_settings(RestingSettings, settings)
        self.corpus_about = "drawn"
        self.corpus_digest = hashlib.sha256(NAME.encode()).digest()

    def layers(self, seed: int) -> Layered:
        make: Callable[[], nn.Module] = partial(Resting, self.settings)
        return layered_from_makers([(f"layer{number:02}", make) for number in range(self.settings.layers)], seed)

    def build_model(self, seed: int) -> StageModel:
        return self.layers(seed).build(0, self.settings.layers)

    def training_data(self) -> Drawn:
        return Drawn(self.settings)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.loss_of(model(self.input_of(batch)), self.targets_of(batch))

    def input_of(self, batch: Tensor) -> Tensor:
        """``(b, context, width) float32``."""
        return batch[:, 1:].view(-1, self.settings.context, self.settings.width)

    def targets_of(self, batch: Tensor) -> Tensor:
        """``(b,) int64``."""
        return batch[:, 0].long()

    def check_targets(self, targets: Tensor, samples: int) -> None:
        if targets.dtype != torch.int64 or targets.shape != (samples,):
            raise ValueError(f"targets: expected {samples} kinds, not {tuple(targets.shape)} {targets.dtype}")
        if bool(((targets < 0) | (targets >= self.settings.width)).any()):
            raise ValueError(f"targets: expected kinds from 0 to {self.settings.width - 1}")

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.mean(1).float(), targets)

    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        with torch.no_grad():
            return float(self.loss(model, self.training_data().batch(range(max_samples)).to(device)))

    def config(self) -> dict[str, Any]:
        return {"name": NAME, "settings": self.settings.model_dump(mode="json")}

    @classmethod
    def model_from_config(cls, config: Mapping[str, Any]) -> nn.Module:
        return RestingRecipe(config["settings"], DataSection()).build_model(0)
