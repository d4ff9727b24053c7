"""Forward and backward passes of micro-batches through the consecutive stages that this peer holds.

The caller decides which micro-batch is next and whether its gradient counts. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.peer.pipeline.tensor_io import moved
from shoal.peer.training.algorithms import LocalWork
from shoal.peer.training.layers import StageModel
from shoal.peer.training.rng import derived_seed, random_states, seeded
from shoal.swarm.errors import WireError


class MicroBatchKey(Protocol):
    """Samples [start, stop) of a round; hashable, and another one for each of its ways through the stages."""

    @property
    def round(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class Loss(Protocol):
    """How the last stage ends: see ``LayeredRecipe``."""

    def check_targets(self, targets: Tensor, samples: int) -> None: ...

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeldStage:
    """A stage that this peer holds. ``first_layer``: its place in the whole model. ``work`` takes in the gradients of
    its parameters, the mean loss's, with the number of samples."""

    number: int
    first_layer: int
    model: StageModel
    work: LocalWork


@dataclass(frozen=True)
class ComputeSettings:
    """``recompute``: keep only a micro-batch's input and run it forward again for its gradient: a third more work for
    much less memory. ``seed``: the run's, for layers that draw random numbers. ``input_shape``: of one sample, where
    inputs come from other peers."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    max_in_flight: int = 4
    recompute: bool = False
    seed: int = 0
    input_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BackwardResult:
    """``input_gradient``: for the stage before, shaped as its output; None at the first. ``loss``: the mean, at the
    last stage, () float32 on the device: reading it waits for the device."""

    input_gradient: Tensor | None
    loss: Tensor | None


@dataclass
class _Kept:
    """A micro-batch between forward and backward. ``output`` with its graph; None where it is still to be computed, or
    again: with ``buffers``, by stage, as they were the first time."""

    given: Tensor
    output: Tensor | None = None
    output_shape: torch.Size | None = None
    buffers: list[dict[str, Tensor]] | None = None


class StageCompute:
    """Forward and backward through ``stages``, which follow each other. ``loss`` where the last of them is the model's
    last: then nothing is computed before the targets are there, and everything at once."""

    def __init__(self, stages: Sequence[HeldStage], settings: ComputeSettings, loss: Loss | None) -> None:
        self._stages = tuple(stages)
        self._settings = settings
        self._loss = loss
        self._is_first = stages[0].first_layer == 0
        self._trainable = {
            stage.number: [one for one in stage.model.parameters() if one.requires_grad] for stage in stages
        }
        self._persistent = [stage.model.state_dict().keys() for stage in stages]
        self._kept: dict[MicroBatchKey, _Kept] = {}
        self._draws: dict[int, bool] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches that went forward and not yet backward."""
        return len(self._kept)

    def forward(self, key: MicroBatchKey, given: Tensor) -> Tensor | None:
        """Take in a micro-batch: ``given`` is the output of the stage before, or the first layer's input, ``(b, …)`` on
        any device. Returns the output, detached, for the next stage; None at the last one. Raises ``WireError`` for an
        input that is not this micro-batch's."""
        assert key not in self._kept, "gone backward or dropped first"
        assert len(self._kept) < self._settings.max_in_flight, "nobody takes in more than may be in flight"
        self._check_input(given, key.stop - key.start)
        kept = _Kept(moved(given.detach(), self._settings.device))
        if not self._is_first:
            kept.given.requires_grad_(True)
        output = None
        if self._loss is None:
            if self._settings.recompute:
                kept.buffers = [self._copied_buffers(number) for number in range(len(self._stages))]
            with torch.set_grad_enabled(not self._settings.recompute):
                output = self._run(key, kept.given, None)
            kept.output_shape = output.shape
            kept.output = None if self._settings.recompute else output
        self._kept[key] = kept
        return None if output is None else output.detach()

    def backward(self, key: MicroBatchKey, received: Tensor, accumulate: Collection[int]) -> BackwardResult:
        """The way back of a micro-batch, which is forgotten then: ``received`` is the gradient of what ``forward``
        returned, or at the last stage the targets. Stages with numbers in ``accumulate`` take in the gradient of their
        parameters; for the others it is not even computed. Raises ``WireError`` for a gradient or targets that are not
        this micro-batch's: then all is as before.
        """
        kept, samples = self._kept[key], key.stop - key.start
        self._check_received(kept, received, samples)
        granted = [stage for stage in self._stages if stage.number in accumulate]
        wanted: list[Tensor] = [one for stage in granted for one in self._trainable[stage.number]]
        if not self._is_first:
            wanted.append(kept.given)
        found: list[Tensor | None] = []
        loss = None
        if wanted or self._loss is not None:
            output, gradient, loss = self._end(key, kept, received)
            if wanted:
                found.extend(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        del self._kept[key]
        back = None
        if not self._is_first:
            last = found.pop()
            back = torch.zeros_like(kept.given) if last is None else last
        for parameter, its in zip(wanted, found, strict=False):
            parameter.grad = its
        for stage in granted:
            stage.work.step(samples, 1.0)
        return BackwardResult(back, None if loss is None else loss.detach().float())

    def drop(self, key: MicroBatchKey) -> None:
        """Forget a micro-batch, if it is there."""
        self._kept.pop(key, None)

    def drop_all(self) -> None:
        """Forget all: gradients at parameters that are about to change are of no use."""
        self._kept.clear()

    def _end(self, key: MicroBatchKey, kept: _Kept, received: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What to go back from, its gradient, and the loss."""
        output = kept.output
        if output is None:
            output = self._run(key, kept.given, kept.buffers)
        received = moved(received, self._settings.device)
        if self._loss is None:
            return output, received.to(output.dtype), None
        with self._settings.autocast():
            loss = self._loss.loss_of(output, received)
        return loss, torch.ones_like(loss), loss

    def _run(self, key: MicroBatchKey, given: Tensor, buffers: list[dict[str, Tensor]] | None) -> Tensor:
        """The last layer's output, with the model's buffers or, changed then in their stead, ``buffers``."""
        with self._settings.autocast():
            for number, stage in enumerate(self._stages):
                around = partial(self._seeded, key, stage.first_layer)
                if buffers is None or not buffers[number]:
                    given = stage.model(given, around)
                else:
                    given = functional_call(stage.model, buffers[number], (given, around))
        return given

    @contextmanager
    def _seeded(self, key: MicroBatchKey, first_layer: int, layer: int) -> Iterator[None]:
        """What a layer draws (dropout) is a function of round, samples and layer: the same when it is computed again,
        by whomever. Whether it draws at all is seen in its first pass."""
        number, device = first_layer + layer, self._settings.device
        draws = self._draws.get(number)
        if draws is False:
            yield
            return
        with seeded(device, derived_seed(self._settings.seed, key.round, key.start, number)):
            before = random_states(device) if draws is None else None
            yield
            if before is not None:
                self._draws[number] = random_states(device) != before

    def _copied_buffers(self, number: int) -> dict[str, Tensor]:
        """Those that layers may change, such as running statistics; the others, which are not saved, are constants."""
        named = self._stages[number].model.named_buffers()
        return {name: one.clone() for name, one in named if name in self._persistent[number]}

    def _check_input(self, given: Tensor, samples: int) -> None:
        expected = self._settings.input_shape
        if given.shape[:1] != (samples,) or (expected is not None and tuple(given.shape[1:]) != expected):
            raise WireError(
                f"an input of {tuple(given.shape)}; expected {samples} samples of {expected or 'any shape'}"
            )
        if not self._is_first and not given.is_floating_point():
            raise WireError(f"an input of {given.dtype}; activations are of a floating-point type")

    def _check_received(self, kept: _Kept, received: Tensor, samples: int) -> None:
        if self._loss is not None:
            try:
                self._loss.check_targets(received, samples)
            except ValueError as error:
                raise WireError(str(error)) from error
        elif received.shape != kept.output_shape or not received.is_floating_point():
            raise WireError(
                f"a gradient of {tuple(received.shape)} {received.dtype}; expected one of {kept.output_shape}"
            )
