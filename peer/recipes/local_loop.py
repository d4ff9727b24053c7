"""Training loop of a recipe on this machine's device: the model, what a member brings to the run, and the inner loop.

``shoal join`` trains whole models by it, and ``benchmarks/gpu.py`` measures it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shoal.peer.member.replica import TrainingSetup
from shoal.peer.recipes import Recipe, Samples
from shoal.peer.training.compiling import compiled
from shoal.peer.training.data import DataAbout
from shoal.peer.training.device import MemoryLimits, autocast, free_bytes, precision_of
from shoal.peer.training.inner_loop import InnerLoop, LossScale
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.parameters import MasterWeights
from shoal.peer.training.step_memory import plan_micro_batch
from shoal.swarm.errors import DeviceError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalLoop:
    """What ``Session.start`` and the loop over ``Session.batches(data)`` need."""

    setup: TrainingSetup
    inner: InnerLoop
    data: Samples
    precision: str

    @classmethod
    def prepare(cls, run: RunFile, recipe: Recipe, device: torch.device, limits: MemoryLimits) -> LocalLoop:
        """Build the run's model on the device and measure the micro-batch that fits.

        Raises ``DeviceError`` for a device that cannot train it, and what the recipe raises."""
        model = recipe.build_model(run.run.seed).to(device)
        trained = [one for one in model.parameters() if one.requires_grad]
        precision = _precision(run, trained, device)
        cast = autocast(device, precision)
        value_bytes = sum(one.nbytes for one in trained) / max(1, sum(one.numel() for one in trained))
        room = free_bytes(device, model, limits, account_of(run, value_bytes=value_bytes).demand())
        masters, optimizer = None, None
        if run.algorithm != "virtual_batch":
            masters = MasterWeights(model)
            optimizer = make_inner(model, run.inner, masters)
        data = recipe.training_data()

        def loss_of(samples: int, model: nn.Module = model) -> Tensor:
            with cast():
                return recipe.loss(model, data.batch([0] * samples).to(device))

        batch = run.inner.batch_samples
        micro_batch = plan_micro_batch(model, loss_of, batch, room)
        if micro_batch < batch:
            log.warning(
                "batches of %d samples are computed in micro-batches of %d, so that they fit into memory",
                batch,
                micro_batch,
            )
        called = compiled(model, partial(loss_of, micro_batch)) if run.inner.compile else model
        about = DataAbout(recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample, len(data))
        setup = TrainingSetup(model, optimizer, about, recipe.config(), masters=masters)
        scale = LossScale(trained) if precision == "float16" else None
        return cls(setup, InnerLoop(called, recipe.loss, cast, micro_batch, scale), data, precision)


def _precision(run: RunFile, trained: list[nn.Parameter], device: torch.device) -> str:
    can_scale = all(one.dtype != torch.float16 for one in trained)
    precision = precision_of(device, run.inner.precision, scales_loss=can_scale)
    if precision == "float16" and not can_scale:
        raise DeviceError(
            'inner.precision = "float16" is for models in float32, and the recipe makes one in float16, whose '
            'gradients cannot be scaled back: take "float32"'
        )
    return precision
