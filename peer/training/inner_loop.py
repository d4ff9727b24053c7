"""Inner loop of recipes: batches to gradients in micro-batches that fit, under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from shoal.peer.training.data import BatchShare
from shoal.peer.training.device_streams import moved

_FIRST_SCALE = 2.0**16

LossFunction = Callable[[nn.Module, Tensor], Tensor]


class LossScale:
    """Scale of the loss, so that small gradients are not lost in float16 (arXiv:1710.03740); torch's ``GradScaler``
    finds it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters``: those that are trained, in no float16 themselves."""
        self._parameters = list(parameters)
        self._scaler = GradScaler(self._parameters[0].device.type, init_scale=_FIRST_SCALE)
        self._gradients = _Gradients(self._parameters, {})

    def apply(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self) -> bool:
        """Divide the gradients by the scale; returns False if they are not finite and are worth another attempt with a
        smaller scale. Waits for the device."""
        if all(one.grad is None for one in self._parameters):
            return True
        before = self._scaler.get_scale()
        self._scaler.unscale_(self._gradients)
        self._scaler.step(self._gradients)
        self._scaler.update()
        after = self._scaler.get_scale()
        if after >= before:
            return True
        if after >= 1.0:
            return False
        # Not the scale is the cause but the model, which goes on from elsewhere, with the usual scale.
        self._scaler.update(_FIRST_SCALE)
        return True


class _Gradients(Optimizer):
    """The gradients of parameters in the form in which ``GradScaler`` takes them; another optimizer steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class InnerLoop:
    """Forward and backward over a batch in micro-batches; the gradients add up to those of the batch's mean loss."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        autocast: Callable[[], AbstractContextManager[Any]],
        micro_batch: int,
        scale: LossScale | None = None,
    ) -> None:
        """``scale``: of the loss, for float16."""
        self._model = model
        self._loss = loss
        self._autocast = autocast
        self.micro_batch = micro_batch
        self._scale = scale
        self._device = next(model.parameters()).device

    def backward(self, batch: Tensor, share: BatchShare | None = None) -> Tensor:
        """Add the gradient of a batch's mean loss to the model's gradients and return that loss, () float32.

        ``batch``: (b, …) on any device; ``share``: of a rank of an island, whose part of the batch that is. All ranks
        make as many passes, as they take part in each other's; a pass without samples is of one that counts nothing.
        With a scale there are no gradients before; a batch whose gradients overflow is computed again with a smaller
        one, so no sample is left out.
        """
        batch, share = moved(batch, self._device), share or BatchShare(len(batch), len(batch), len(batch))
        loss = self._add_gradients(batch, share)
        while self._scale is not None and not self._scale.unscale():
            for parameter in self._model.parameters():
                parameter.grad = None
            loss = self._add_gradients(batch, share)
        return loss

    def _add_gradients(self, batch: Tensor, share: BatchShare) -> Tensor:
        total = torch.zeros((), device=self._device)
        for start in range(0, share.most, self.micro_batch):
            samples = max(0, min(self.micro_batch, share.samples - start))
            with self._autocast():
                loss = self._loss(self._model, batch[start : start + samples] if samples else batch[:1])
            part = loss * (samples / share.mean)
            (part if self._scale is None else self._scale.apply(part)).backward()  # type: ignore[no-untyped-call]
            if samples:
                total += loss.detach().float() * (samples / share.samples)
        return total
