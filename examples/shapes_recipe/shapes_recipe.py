"""A recipe of one's own: a convolutional net that tells drawn shapes apart, whole or in a pipeline.

    pip install ./examples/shapes_recipe            # on the host's and on every volunteer's machine
    shoal host examples/shapes.toml                 # prints the invite
    shoal join 'shoal://…'

The images are drawn from their numbers, so there is nothing to download, and everybody has the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import check_settings
from shoal.peer.recipes.evaluation import EvaluationFigures, EvaluationRequest, SourceFigure
from shoal.peer.training.layers import Layered, Maker, StageModel, layered_from_makers
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection

NAME = "shapes"
SIZE = 16
NAMES = ("squares", "discs", "crosses", "bars")
KINDS = len(NAMES)
TRAINING, HELD_OUT = 60_000, 1_024


class ShapesSettings(BaseModel):
    """``[recipe.settings]``. ``channels``: of the first convolutions; later ones have twice as many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels: Annotated[int, Field(ge=4, le=4096, multiple_of=4)] = 16


def draw(number: int) -> npt.NDArray[np.int64]:
    """Image ``number``, ``(SIZE * SIZE + 1,)``: pixels of 0 to 255, and the kind: square, disc, cross or bars."""
    random = np.random.default_rng(number)
    kind = int(random.integers(KINDS))
    row, column, radius = random.integers(5, SIZE - 5), random.integers(5, SIZE - 5), random.integers(3, 6)
    down, right = np.mgrid[:SIZE, :SIZE] - np.array([row, column])[:, None, None]
    near = np.maximum(abs(down), abs(right)) <= radius
    inside = [near, down**2 + right**2 <= radius**2, near & (abs(abs(down) - abs(right)) < 1), near & (down % 2 == 0)]
    image = np.where(inside[kind], 150, 50) + random.integers(-50, 51, (SIZE, SIZE))
    return np.append(image.reshape(-1), kind).astype(np.int64)


class Shapes:
    """Images from ``first`` on, drawn when they are asked for."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return torch.from_numpy(draw(self._first + index))

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64], /) -> Tensor:
        """``(b, SIZE * SIZE + 1) int64``."""
        return torch.stack([self[int(index)] for index in indices])


def makers(settings: ShapesSettings) -> list[tuple[str, Maker]]:
    """Name and maker of each layer; those without parameters belong to the layer before them."""
    few, many = settings.channels, 2 * settings.channels
    return [
        ("conv1", partial(nn.Conv2d, 1, few, 3, padding=1)),
        ("relu1", nn.ReLU),
        ("conv2", partial(nn.Conv2d, few, few, 3, stride=2, padding=1)),
        ("norm2", partial(nn.GroupNorm, 4, few)),
        ("relu2", nn.ReLU),
        ("conv3", partial(nn.Conv2d, few, many, 3, stride=2, padding=1)),
        ("norm3", partial(nn.GroupNorm, 4, many)),
        ("relu3", nn.ReLU),
        ("flatten", nn.Flatten),
        ("head", partial(nn.Linear, many * (SIZE // 4) ** 2, KINDS)),
    ]


class ShapesRecipe:
    """``Recipe`` and ``LayeredRecipe``."""

    tokens_per_sample = 1

    def __init__(self, settings: dict[str, Any], data: DataSection, places: DataPlaces = NOWHERE) -> None:
        self.settings = check_settings(ShapesSettings, settings)
        if data.tokens_per_sample not in (None, 1):
            raise RecipeError("data.tokens_per_sample: expected nothing or 1: the shapes count images")
        self.corpus_about = f"drawn shapes, {TRAINING} to train on"
        self.corpus_digest = hashlib.sha256(b"".join(draw(number).tobytes() for number in range(100))).digest()
        self._held_out = Shapes(TRAINING, HELD_OUT)

    def layers(self, seed: int) -> Layered:
        return layered_from_makers(makers(self.settings), seed)

    def build_model(self, seed: int) -> StageModel:
        layered = self.layers(seed)
        return layered.build(0, len(layered))

    def training_data(self) -> Shapes:
        return Shapes(0, TRAINING)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.loss_of(model(self.input_of(batch)), self.targets_of(batch))

    def input_of(self, batch: Tensor) -> Tensor:
        """Pixels, ``(b, 1, SIZE, SIZE) float32``, between -1 and 1."""
        return batch[:, :-1].view(-1, 1, SIZE, SIZE).float() / 100 - 1

    def targets_of(self, batch: Tensor) -> Tensor:
        """Kinds, ``(b,) int64``."""
        return batch[:, -1]

    def check_targets(self, targets: Tensor, samples: int) -> None:
        if targets.dtype != torch.int64 or targets.shape != (samples,) or bool((targets < 0).any()):
            raise ValueError(f"targets: expected {samples} kinds, not {tuple(targets.shape)} {targets.dtype}")
        if bool((targets >= KINDS).any()):
            raise ValueError(f"targets: expected kinds from 0 to {KINDS - 1}")

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), targets)

    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        return self.evaluate(model, device, EvaluationRequest(max_samples)).loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device | str, request: EvaluationRequest) -> EvaluationFigures:
        """Loss, share of the shapes that are told rightly, and the loss by kind."""
        count = min(max(1, request.samples), HELD_OUT)
        batch = self._held_out.batch(range(count)).to(device)
        was_training = model.training
        model.eval()
        try:
            output, kinds = model(self.input_of(batch)), self.targets_of(batch)
        finally:
            model.train(was_training)
        losses = F.cross_entropy(output.float(), kinds, reduction="none")
        by_kind = [(name, losses[kinds == kind]) for kind, name in enumerate(NAMES)]
        return EvaluationFigures(
            loss=float(losses.mean()),
            samples=count,
            accuracy=float((output.argmax(dim=1) == kinds).float().mean()),
            sources=tuple(SourceFigure(name, float(one.mean()), len(one)) for name, one in by_kind if len(one)),
        )

    def config(self) -> dict[str, Any]:
        return {"name": NAME, "settings": self.settings.model_dump(mode="json")}

    @classmethod
    def model_from_config(cls, config: Mapping[str, Any]) -> nn.Module:
        if config.get("name") != NAME:
            raise RecipeError(f"model config: name: expected {NAME!r}, not {config.get('name')!r}")
        settings = check_settings(ShapesSettings, config.get("settings"), "model config: settings")
        layered = layered_from_makers(makers(settings), 0)
        return layered.build(0, len(layered))
