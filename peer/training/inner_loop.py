"""Inner loop of recipes: batches to gradients in micro-batches that fit, under autocast, and the inner optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from shoal.peer.training.parameters import MasterWeights
from shoal.swarm.protocol.run_file import InnerSection

LossFunction = Callable[[nn.Module, Tensor], Tensor]


def make_inner(model: nn.Module, inner: InnerSection, masters: MasterWeights | None = None) -> Optimizer:
    """Make the inner optimizer, of the masters if given: AdamW or SGD with momentum; weight decay spares vectors
    (norms, biases)."""
    trainable = [
        parameter if masters is None else masters.of(parameter)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    groups = [
        {"params": [one for one in trainable if one.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [one for one in trainable if one.dim() < 2], "weight_decay": 0.0},
    ]
    if inner.optimizer == "adamw":
        return AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps)
    return SGD(groups, lr=inner.lr, momentum=inner.momentum)


class InnerLoop:
    """Forward and backward over a batch in micro-batches; the gradients add up to those of the batch's mean loss."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        autocast: Callable[[], AbstractContextManager[Any]],
        micro_batch: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._autocast = autocast
        self.micro_batch = micro_batch
        self._device = next(model.parameters()).device

    def backward(self, batch: Tensor) -> Tensor:
        """Add the gradient of a batch's mean loss to the model's gradients and return that loss, () float32.

        ``batch``: (b, …) on any device.
        """
        total = torch.zeros((), device=self._device)
        for micro in torch.split(batch, self.micro_batch):
            moved = micro.to(self._device, non_blocking=True)
            with self._autocast():
                loss = self._loss(self._model, moved)
            part = loss * (len(micro) / len(batch))
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach().float()
        return total
