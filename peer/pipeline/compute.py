"""Forward and backward passes of micro-batches through the consecutive stages that this peer holds.

The caller decides which micro-batch comes next and whether its gradient counts. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.peer.training.algorithms import LocalWork
from shoal.peer.training.device_streams import moved
from shoal.peer.training.layers import LayeredRecipe, StageModel
from shoal.peer.training.rng import derived_seed, random_states, seeded
from shoal.swarm.errors import WireError


@dataclass(frozen=True)
class MicroBatchKey:
    """Samples [start, stop) of a round on one pass through the stages; each pass has a ``job`` of its own."""

    round: int
    start: int
    stop: int
    job: int


@dataclass(frozen=True)
class HeldStage:
    """A stage that this peer holds.

    ``first_layer``: index of its first layer in the whole model; ``work``: accumulates the gradients of the stage's
    parameters, each that of a micro-batch's mean loss, with the number of samples.
    """

    number: int
    first_layer: int
    model: StageModel
    work: LocalWork


@dataclass(frozen=True)
class ComputeSettings:
    """Settings of ``StageCompute``.

    ``recompute``: keep only a micro-batch's input and repeat the forward pass for its gradient, a third more work for
    much less memory; ``seed``: the run's, for layers that draw random numbers; ``input_shape``: shape of one sample of
    the input where that comes from other peers, else None.
    """

    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    max_in_flight: int = 4
    recompute: bool = False
    seed: int = 0
    input_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BackwardResult:
    """Result of a backward pass.

    ``input_gradient``: gradient for the previous stage, shaped as its output; None at the first stage. ``loss``: mean
    loss at the last stage, () float32 on the device; reading its value waits for the device.
    """

    input_gradient: Tensor | None
    loss: Tensor | None


@dataclass
class _MicroBatchInFlight:
    """A micro-batch between its forward and its backward pass.

    ``output``: with its graph; None if backward has to compute it, with ``recompute`` from ``buffers``, the stages'
    buffers as they were before the first pass.
    """

    given: Tensor
    output: Tensor | None = None
    output_shape: torch.Size | None = None
    buffers: list[dict[str, Tensor]] | None = None


class StageCompute:
    """Forward and backward passes through consecutive stages.

    ``loss``: the recipe if the last of ``stages`` is the model's last, else None. With a loss, ``forward`` only stores
    the input, and ``backward`` computes everything from the targets.
    """

    def __init__(self, stages: Sequence[HeldStage], settings: ComputeSettings, loss: LayeredRecipe | None) -> None:
        self._stages = tuple(stages)
        self._settings = settings
        self._loss = loss
        self._is_first = stages[0].first_layer == 0
        self._trainable = {
            stage.number: [one for one in stage.model.parameters() if one.requires_grad] for stage in stages
        }
        self._persistent = [stage.model.state_dict().keys() for stage in stages]
        self._in_flight: dict[MicroBatchKey, _MicroBatchInFlight] = {}
        self._draws: dict[int, bool] = {}

    @property
    def in_flight(self) -> int:
        """Number of micro-batches that went forward and not yet backward."""
        return len(self._in_flight)

    def forward(self, key: MicroBatchKey, given: Tensor) -> Tensor | None:
        """Run a micro-batch forward and keep what its backward pass needs.

        ``given``: output of the previous stage, or the model's input, (b, …) on any device. Returns the output for the
        next stage, detached; None at the last stage. Raises ``WireError`` for an input of another shape or type.
        """
        assert key not in self._in_flight, "a micro-batch goes backward or is dropped before it comes again"
        assert len(self._in_flight) < self._settings.max_in_flight, "the engine limits the micro-batches in flight"
        self._check_input(given, key.stop - key.start)
        kept = _MicroBatchInFlight(moved(given.detach(), self._settings.device))
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
        self._in_flight[key] = kept
        return None if output is None else output.detach()

    def backward(self, key: MicroBatchKey, received: Tensor, accumulate: Collection[int]) -> BackwardResult:
        """Run a micro-batch backward and drop it.

        ``received``: gradient of the output that ``forward`` returned; at the last stage the targets. ``accumulate``:
        numbers of the stages whose parameters' gradients count; those of the others are not computed. Raises
        ``WireError`` for a gradient or targets that do not fit this micro-batch, which is kept then.
        """
        kept, samples = self._in_flight[key], key.stop - key.start
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
        del self._in_flight[key]
        back = None
        if not self._is_first:
            last = found.pop()
            back = torch.zeros_like(kept.given) if last is None else last
        for parameter, its in zip(wanted, found, strict=False):
            parameter.grad = its
        for stage in granted:
            stage.work.step(samples, 1.0)
        return BackwardResult(back, None if loss is None else loss.detach().float())

    def repeat(self, key: MicroBatchKey, given: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute a micro-batch again that another replica has computed, and leave no trace of it.

        ``received`` as in ``backward``; None for a forward pass only. Returns the output (at the last stage the loss)
        and the input's gradient. Raises ``WireError`` for tensors that do not fit."""
        samples = key.stop - key.start
        self._check_input(given, samples)
        kept = _MicroBatchInFlight(moved(given.detach(), self._settings.device))
        kept.buffers = [self._copied_buffers(number) for number in range(len(self._stages))]
        if received is None:
            with torch.no_grad():
                return self._run(key, kept.given, kept.buffers), None
        kept.given.requires_grad_(True)
        if self._loss is not None:
            self._check_received(kept, received, samples)
        else:
            kept.output = self._run(key, kept.given, kept.buffers)
            kept.output_shape = kept.output.shape
            self._check_received(kept, received, samples)
        output, gradient, _ = self._end(key, kept, received)
        back = torch.autograd.grad(output, [kept.given], gradient, allow_unused=True)[0]
        return output.detach(), torch.zeros_like(kept.given) if back is None else back

    def drop(self, key: MicroBatchKey) -> None:
        """Drop a micro-batch, if it is in flight."""
        self._in_flight.pop(key, None)

    def drop_all(self) -> None:
        """Drop all micro-batches, because the parameters that they went forward with are about to change."""
        self._in_flight.clear()

    def _end(
        self, key: MicroBatchKey, kept: _MicroBatchInFlight, received: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensor to go backward from, its gradient, and the loss at the last stage."""
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
        """Return the last layer's output. Layers change ``buffers`` in place of the model's own, if given."""
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
        """Seed a layer's random numbers (dropout) by round, samples and layer, so that every peer that repeats the
        pass draws the same. A layer whose first pass draws none is never seeded again."""
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
        """Copy the buffers that layers may change, such as running statistics. Non-persistent ones are constants."""
        named = self._stages[number].model.named_buffers()
        return {name: one.clone() for name, one in named if name in self._persistent[number]}

    def _check_input(self, given: Tensor, samples: int) -> None:
        expected = self._settings.input_shape
        if given.shape[:1] != (samples,) or (expected is not None and tuple(given.shape[1:]) != expected):
            raise WireError(
                f"an activation of shape {tuple(given.shape)}; expected {samples} samples of {expected or 'any shape'}"
            )
        if not self._is_first and not given.is_floating_point():
            raise WireError(f"an activation of type {given.dtype}; expected a floating-point type")

    def _check_received(self, kept: _MicroBatchInFlight, received: Tensor, samples: int) -> None:
        if self._loss is not None:
            try:
                self._loss.check_targets(received, samples)
            except ValueError as error:
                raise WireError(str(error)) from error
        elif received.shape != kept.output_shape or not received.is_floating_point():
            raise WireError(
                f"a gradient of shape {tuple(received.shape)} and type {received.dtype}; expected a floating-point "
                f"tensor of shape {kept.output_shape}"
            )
