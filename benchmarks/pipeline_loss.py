"""Cost in loss of a codec for activations: a small ``gpt`` on real text, its stages one after the other in this
process, with everything between them packed and unpacked as for another peer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.range_reader import RangeReader
from shoal.compression.registry import get_codec
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, MicroBatchKey, StageCompute
from shoal.peer.pipeline.tensor_io import TensorHeader, pack, unpack
from shoal.peer.pipeline.training import TrainingSamples
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training.data import SampleOrder
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.pipeline.engine.effects import MicroBatch
from shoal.swarm.protocol.run_file import DataSection

SETTINGS = {"layers": 4, "width": 96, "heads": 4, "context": 64, "tie_embedding": False}
BOUNDARIES = (0, 2, 4, 6)
"""Of six layers: the embedding, four blocks, the output."""
MICRO_BATCH, MICRO_BATCHES = 8, 2
_LR = 2e-3
_WARM_UP = 10


class _Summed:
    """As much of ``LocalWork`` as computing needs: gradients of a step's micro-batches, added up."""

    def __init__(self, vector: ParameterVector) -> None:
        self._parameters = vector.parameters
        self.sums = [torch.zeros_like(one) for one in vector.parameters]

    def step(self, samples: int, lr_factor: float) -> None:
        for parameter, total in zip(self._parameters, self.sums, strict=True):
            if parameter.grad is not None:
                total += parameter.grad * samples
            parameter.grad = None

    def contribution(self, anchor: Tensor) -> RangeReader:
        raise NotImplementedError

    def reset_optimizer(self) -> None:
        raise NotImplementedError

    def restart_from(self, anchor: Tensor) -> None:
        raise NotImplementedError

    def continue_from(self, anchor: Tensor) -> None:
        raise NotImplementedError


class Chain:
    """All stages of the model in a chain. ``codec``: for tensors between two stages."""

    def __init__(self, recipe: GptRecipe, seed: int, codec: Codec) -> None:
        self._recipe, self._codec, self._seed = recipe, codec, seed
        self._layered = recipe.layers(seed)
        data = recipe.training_data()
        self._samples = TrainingSamples(recipe, data, SampleOrder(len(data), seed))
        self._works: list[_Summed] = []
        self._computes: list[StageCompute] = []
        self._models = [self._layered.build(first, stop) for first, stop in pairwise(BOUNDARIES)]
        settings = ComputeSettings(torch.device("cpu"), seed=seed)
        for number, model in enumerate(self._models):
            work = _Summed(ParameterVector(model))
            held = HeldStage(number, BOUNDARIES[number], model, work)
            is_last = number == len(self._models) - 1
            self._works.append(work)
            self._computes.append(StageCompute([held], settings, recipe if is_last else None))
        self._parameters = [one for model in self._models for one in model.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=_LR, betas=(0.9, 0.95))

    def train(self, steps: int) -> None:
        """From the start; a step has ``MICRO_BATCHES``."""
        batch = MICRO_BATCH * MICRO_BATCHES
        for step in range(steps):
            for at in range(step * batch, (step + 1) * batch, MICRO_BATCH):
                self._through(MicroBatch(step, at, at + MICRO_BATCH))
            totals = [total for work in self._works for total in work.sums]
            for parameter, total in zip(self._parameters, totals, strict=True):
                parameter.grad = total / batch
            for group in self._optimizer.param_groups:
                group["lr"] = _LR * min(1.0, (step + 1) / _WARM_UP)
            self._optimizer.step()
            self._optimizer.zero_grad()
            for total in totals:
                total.zero_()

    def held_out_loss(self, samples: int) -> float:
        whole = self._layered.build(0, BOUNDARIES[-1])
        whole.load_state_dict({name: one for model in self._models for name, one in model.state_dict().items()})
        return self._recipe.held_out_loss(whole, "cpu", samples)

    def _through(self, micro_batch: MicroBatch) -> None:
        given, received = self._samples.read(micro_batch)
        key = MicroBatchKey(micro_batch.round, micro_batch.start, micro_batch.stop, job=0)
        for compute in self._computes:
            output = compute.forward(key, given)
            if output is not None:
                given = self._sent(output)
        for number, compute in reversed(list(enumerate(self._computes))):
            back = compute.backward(key, received, [number]).input_gradient
            if back is not None:
                received = self._sent(back)

    def _sent(self, tensor: Tensor) -> Tensor:
        return unpack(pack(tensor, self._codec).numpy().data, TensorHeader.of(tensor), self._codec)


def held_out_losses(codec: str, seeds: Sequence[int], steps: int, samples: int = 256) -> list[float]:
    """Held-out losses in nats a token after ``steps`` steps, by seed."""
    recipe = GptRecipe(SETTINGS, DataSection(source="stdlib"))
    losses = []
    for seed in seeds:
        chain = Chain(recipe, seed, get_codec(codec))
        chain.train(steps)
        losses.append(chain.held_out_loss(samples))
    return losses
