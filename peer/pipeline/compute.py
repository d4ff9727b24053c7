"""Forward and backward passes of micro-batches through the consecutive stages that this peer holds.

The caller decides which micro-batch comes next and whether its gradient counts. Not thread-safe.
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

from shoal.peer.training.algorithms import LocalWork
from shoal.peer.training.data import BatchShare
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


class MicroBatchShares(Protocol):
    """How the ranks of an island, over which the stages' parameters are spread, share a micro-batch.

    Each rank is given whole tensors and computes its share of the samples; the parameters' gradients become the mean of
    those that the ``groups`` of ranks with the same samples have.
    """

    @property
    def groups(self) -> int: ...

    def of(self, whole: Tensor) -> tuple[Tensor, BatchShare]:
        """Return this rank's samples of a tensor, (b, …), never none, see ``BatchShare``."""

    def gathered(self, mine: Tensor, samples: int) -> Tensor:
        """Return the whole tensor of so many samples from the ranks' shares."""

    def mean_loss(self, loss: Tensor, share: BatchShare) -> Tensor:
        """Return the mean loss of a micro-batch, (), from those of the ranks' shares."""


@dataclass(frozen=True)
class ComputeSettings:
    """Settings of ``StageCompute``.

    ``recompute``: keep only a micro-batch's input and repeat the forward pass for its gradient, a third more work for
    much less memory; ``seed``: the run's, for layers that draw random numbers; ``input_shape``: shape of one sample of
    the input where that comes from other peers, else None; ``shares``: of an island's ranks, else None.
    """

    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    max_in_flight: int = 4
    recompute: bool = False
    seed: int = 0
    input_shape: tuple[int, ...] | None = None
    shares: MicroBatchShares | None = None


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

    ``given``: input of this rank's share; ``output``: with its graph; None if backward has to compute it, with
    ``recompute`` from ``buffers``, the stages' buffers as they were before the first pass; ``output_shape``: of the
    whole micro-batch.
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
        samples = key.stop - key.start
        self._check_input(given, samples)
        kept = self._begun(given)
        if not self._is_first:
            kept.given.requires_grad_(True)
        output = None
        if self._loss is None:
            if self._settings.recompute:
                kept.buffers = [self._copied_buffers(number) for number in range(len(self._stages))]
            with torch.set_grad_enabled(not self._settings.recompute):
                output = self._run(key, kept.given, None)
            kept.output_shape = torch.Size((samples, *output.shape[1:]))
            kept.output = None if self._settings.recompute else output
        self._in_flight[key] = kept
        return None if output is None else self._gathered(output.detach(), samples)

    def backward(self, key: MicroBatchKey, received: Tensor, accumulate: Collection[int]) -> BackwardResult:
        """Run a micro-batch backward and drop it.

        ``received``: gradient of the output that ``forward`` returned; at the last stage the targets. ``accumulate``:
        numbers of the stages whose parameters' gradients count; those of the others are not computed. Raises
        ``WireError`` for a gradient or targets that do not fit this micro-batch, which is kept then.
        """
        kept, samples = self._in_flight[key], key.stop - key.start
        self._check_received(kept, received, samples)
        granted = [stage for stage in self._stages if stage.number in accumulate]
        loss = back = None
        if granted or not self._is_first or self._loss is not None:
            output, gradient, loss = self._end(key, kept, received)
            back = self._gradients(kept.given, output, gradient, granted)
        del self._in_flight[key]
        if back is not None:
            back = self._gathered_gradient(back, samples)
        for stage in granted:
            stage.work.step(samples, 1.0)
        return BackwardResult(back, loss)

    def repeat(self, key: MicroBatchKey, given: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute a micro-batch again that another replica has computed, and leave no trace of it.

        ``received`` as in ``backward``; None for a forward pass only. Returns the output (at the last stage the loss)
        and the input's gradient. Raises ``WireError`` for tensors that do not fit."""
        samples = key.stop - key.start
        self._check_input(given, samples)
        kept = self._begun(given)
        kept.buffers = [self._copied_buffers(number) for number in range(len(self._stages))]
        if received is None:
            with torch.no_grad():
                return self._gathered(self._run(key, kept.given, kept.buffers), samples), None
        kept.given.requires_grad_(True)
        if self._loss is not None:
            self._check_received(kept, received, samples)
        else:
            kept.output = self._run(key, kept.given, kept.buffers)
            kept.output_shape = torch.Size((samples, *kept.output.shape[1:]))
            self._check_received(kept, received, samples)
        output, gradient, loss = self._end(key, kept, received)
        back = self._gathered_gradient(self._input_gradient(kept.given, output, gradient), samples)
        return self._gathered(output.detach(), samples) if loss is None else loss, back

    def drop(self, key: MicroBatchKey) -> None:
        """Drop a micro-batch, if it is in flight."""
        self._in_flight.pop(key, None)

    def drop_all(self) -> None:
        """Drop all micro-batches, because the parameters that they went forward with are about to change."""
        self._in_flight.clear()

    def _end(
        self, key: MicroBatchKey, kept: _MicroBatchInFlight, received: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensor to go backward from, its gradient, and at the last stage the loss, () float32."""
        output, shares = kept.output, self._settings.shares
        if output is None:
            output = self._run(key, kept.given, kept.buffers)
        share = BatchShare(1, 1.0, 1)
        if shares is not None:
            received, share = shares.of(received)
        received = moved(received, self._settings.device)
        if self._loss is None:
            gradient = received.to(output.dtype)
            if shares is not None:  # the mean over the groups is the sum over the samples then
                gradient = gradient * float(shares.groups if share.samples else 0)
            return output, gradient, None
        with self._settings.autocast():
            loss = self._loss.loss_of(output, received)
        mean = loss.detach().float() if shares is None else shares.mean_loss(loss, share)
        return loss, torch.full_like(loss, share.weight), mean

    # The ranks of an island -----------------------------------------------------------------------------------

    def _begun(self, given: Tensor) -> _MicroBatchInFlight:
        mine = given.detach() if self._settings.shares is None else self._settings.shares.of(given.detach())[0]
        return _MicroBatchInFlight(moved(mine, self._settings.device))

    def _gathered(self, output: Tensor, samples: int) -> Tensor:
        return output if self._settings.shares is None else self._settings.shares.gathered(output, samples)

    def _gathered_gradient(self, back: Tensor, samples: int) -> Tensor:
        shares = self._settings.shares
        return back if shares is None else shares.gathered(back / shares.groups, samples)

    def _gradients(
        self, given: Tensor, output: Tensor, gradient: Tensor, granted: Sequence[HeldStage]
    ) -> Tensor | None:
        """Go backward, which leaves the gradients of the granted stages' parameters there; return the input's."""
        if not granted:
            return None if self._is_first else self._input_gradient(given, output, gradient)
        if self._settings.shares is None:
            wanted: list[Tensor] = [one for stage in granted for one in self._trainable[stage.number]]
            inputs = [] if self._is_first else [given]
            found = torch.autograd.grad(output, [*inputs, *wanted], gradient, allow_unused=True)
            for parameter, its in zip(wanted, found[len(inputs) :], strict=True):
                parameter.grad = its
            back = found[0] if inputs else None
        else:  # those of spread parameters are made as they are left at them
            torch.autograd.backward(output, gradient)
            for stage in self._stages:
                if stage not in granted:
                    stage.model.zero_grad()
            back, given.grad = given.grad, None
        if self._is_first:
            return None
        return torch.zeros_like(given) if back is None else back

    @staticmethod
    def _input_gradient(given: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
        back = torch.autograd.grad(output, [given], gradient, allow_unused=True)[0]
        return torch.zeros_like(given) if back is None else back

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
