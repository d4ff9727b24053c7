"""Small models in layers for tests, and their computation as one piece."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tests.fakes.gradients import take_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.compression.range_reader import whole_vector
from shoal.compression.registry import get_codec
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, StageCompute
from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging, TensorHeader
from shoal.peer.recipes import Recipe, Samples
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training.algorithms import AccumulatedGradient
from shoal.peer.training.layers import Layered, LayeredRecipe
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.protocol.run_file import DataSection

GPT = {"layers": 4, "heads": 2, "width": 32, "context": 16, "tie_embedding": False}
CPU = torch.device("cpu")
SHAPES_FOLDER = Path(__file__).parents[2] / "examples" / "shapes_recipe"


class LayeredAndWhole(Recipe, LayeredRecipe, Protocol):
    """What ``gpt`` and the example are."""


def gpt(**settings: Any) -> GptRecipe:
    return GptRecipe(GPT | settings, DataSection())


def shapes(**settings: Any) -> LayeredAndWhole:
    if str(SHAPES_FOLDER) not in sys.path:
        sys.path.append(str(SHAPES_FOLDER))
    recipe: LayeredAndWhole = importlib.import_module("shapes_recipe").ShapesRecipe(settings, DataSection())
    return recipe


class Key(NamedTuple):
    """A micro-batch."""

    round: int
    start: int
    stop: int
    attempt: int = 0


class SquaredError:
    """A loss that takes any floats."""

    def check_targets(self, targets: Tensor, samples: int) -> None:
        if len(targets) != samples:
            raise ValueError(f"{len(targets)} targets")

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output.float(), targets)


def held(layered: Layered, boundaries: tuple[int, ...], number: int, device: torch.device) -> HeldStage:
    first, stop = boundaries[number : number + 2]
    model = layered.build(first, stop).to(device)
    return HeldStage(number, first, model, AccumulatedGradient(ParameterVector(model)))


def batch_of(data: Samples, start: int, stop: int) -> Tensor:
    return data.batch([number % len(data) for number in range(start, stop)])


def mean_gradient(recipe: LayeredAndWhole, model: nn.Module, batch: Tensor) -> Tensor:
    """In one piece, by plain autograd: (n,) float32."""
    recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return take_gradients(ParameterVector(model))


class Line:
    """Peers that hold spans of stages, in one process: micro-batches go through chosen ones, packed in between."""

    def __init__(
        self,
        recipe: LayeredAndWhole,
        boundaries: tuple[int, ...],
        spans: Sequence[tuple[int, int]],
        activations: str = "float32",
        device: torch.device = CPU,
        **settings: Any,
    ) -> None:
        self._recipe = recipe
        layered = recipe.layers(1)
        self.stages = len(boundaries) - 1
        self.peers: list[list[HeldStage]] = []
        self.computes: list[StageCompute] = []
        for first, last in spans:
            stages = [held(layered, boundaries, number, device) for number in range(first, last + 1)]
            self.peers.append(stages)
            loss = recipe if last + 1 == self.stages else None
            self.computes.append(StageCompute(stages, ComputeSettings(device, **settings), loss))
        self._staging = Staging(device, get_codec(activations))
        self.weights: dict[tuple[int, int], int] = {}

    def drive(self, key: Key, batch: Tensor, way: Sequence[int], granted: Collection[int] | None = None) -> float:
        """Through the peers of ``way`` and back; all stages take the gradient in unless only some are ``granted``.
        Returns the loss."""
        with self._staging.computing():
            return self._drive(key, batch, way, granted)

    def _drive(self, key: Key, batch: Tensor, way: Sequence[int], granted: Collection[int] | None) -> float:
        flowing: Tensor | None = self._recipe.input_of(batch)
        for peer in way:
            assert flowing is not None
            flowing = self.computes[peer].forward(key, flowing)
            flowing = None if flowing is None else self._sent(flowing)
        received = self._recipe.targets_of(batch)
        loss = 0.0
        for peer in reversed(way):
            numbers = [stage.number for stage in self.peers[peer]]
            accumulate = [number for number in numbers if granted is None or number in granted]
            for number in accumulate:
                self.weights[peer, number] = self.weights.get((peer, number), 0) + key.stop - key.start
            done = self.computes[peer].backward(key, received, accumulate)
            if done.loss is not None:
                loss = float(done.loss)
            if done.input_gradient is not None:
                received = self._sent(done.input_gradient)
        return loss

    def means(self) -> list[Tensor]:
        """By stage: the replicas' contributions, averaged by samples."""
        sums: dict[int, Tensor] = {}
        samples: dict[int, int] = {}
        for peer, stages in enumerate(self.peers):
            for stage in stages:
                weight = self.weights.get((peer, stage.number), 0)
                contribution = whole_vector(stage.work.contribution(whole_vector(ParameterVector(stage.model))))
                sums[stage.number] = sums.get(stage.number, 0) + contribution * weight
                samples[stage.number] = samples.get(stage.number, 0) + weight
        return [sums[number] / samples[number] for number in range(self.stages)]

    def anchors(self) -> list[Tensor]:
        """By stage; its replicas hold the same."""
        found: dict[int, Tensor] = {}
        for stages in self.peers:
            for stage in stages:
                anchor = found.setdefault(stage.number, whole_vector(ParameterVector(stage.model)))
                assert torch.equal(anchor, whole_vector(ParameterVector(stage.model)))
        return [found[number] for number in range(self.stages)]

    def restart(self, anchors: Sequence[Tensor]) -> None:
        """The next round, from these."""
        self.weights.clear()
        for stages in self.peers:
            for stage in stages:
                stage.work.restart_from(anchors[stage.number])

    def _sent(self, tensor: Tensor) -> Tensor:
        return self._staging.unpack_received(
            self._staging.pack_result(ComputedTensor.on_current_stream(tensor)), TensorHeader.of(tensor)
        )[0]
