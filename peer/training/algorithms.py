"""Algorithms of local work between rounds and of its contribution to the next round; one class an algorithm.

A contribution is the work and nothing else: zero work contributes zeros, also where the parameters cannot hold the
anchor's low bits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import zeros
from shoal.peer.training.parameters import LOW_PRECISION, ParameterVector, type_name
from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)

_LOW_PRECISION = (
    "the model's trainable parameters are %s and the inner optimizer steps them directly: every update smaller than "
    "half of a parameter's last bit is lost, which are most of them at usual learning rates; make the model with "
    ".float() and use torch.autocast in your loop, which computes in low precision and keeps float32 weights"
)


class LocalWork(Protocol):
    """Local work of one peer since the anchor."""

    def step(self, samples: int, lr_factor: float) -> None:
        """Take in and clear the gradients at the model's parameters, those of a mean loss over ``samples``.

        ``lr_factor``: the schedule's factor on the inner learning rate.
        """

    def contribution(self, anchor: Tensor) -> RangeReader:
        """Return the contribution, (n,), zeros if no work was done.

        It may be read until the next call of any other method, while nothing else changes model or anchor.
        """

    def restart_from(self, anchor: Tensor) -> None:
        """Drop the work and begin again from ``anchor``, (n,) float32."""

    def reset_optimizer(self) -> None:
        """Reset the inner optimizer's state, which may be infinite or not a number as the work was."""

    def continue_from(self, anchor: Tensor) -> None:
        """Go on from ``anchor``, that of the round which the last contribution was for.

        Algorithms with overlap keep the work since that contribution; others drop it.
        """


class PseudoGradient:
    """Steps of an inner optimizer; contributes anchor - local parameters (DiLoCo, arXiv:2311.08105)."""

    def __init__(
        self, vector: ParameterVector, optimizer: Optimizer, clip_norm: float | None, *, sets_lr: bool = True
    ) -> None:
        """``clip_norm``: norm to which gradients are clipped, None for no limit; ``sets_lr``: the learning rates are
        those of the optimizer at this time, times the schedule's factor, and not whatever they are at the step."""
        self._vector = vector
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups] if sets_lr else None

    def step(self, samples: int, lr_factor: float) -> None:
        masters = self._vector.masters
        if masters is not None:
            masters.take_gradients()
        if self._clip_norm is not None:
            self._vector.clip_gradients(self._clip_norm)
        if self._base_lrs is not None:
            for group, lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = lr * lr_factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if masters is not None:
            masters.update_parameters()

    def contribution(self, anchor: Tensor) -> RangeReader:
        return _Difference(self._vector, anchor, self._vector.settled())

    def reset_optimizer(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.zero_grad(set_to_none=True)
        self._vector.drop_gradients()

    def restart_from(self, anchor: Tensor) -> None:
        self._vector.write(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        self.restart_from(anchor)


class _Difference:
    """Reader of an anchor, as the parameters hold it, minus ``local``: exactly zero where no work was done."""

    def __init__(self, vector: ParameterVector, anchor: Tensor, local: RangeReader) -> None:
        self._vector = vector
        self._anchor = anchor
        self._local = local

    @property
    def elements(self) -> int:
        return self._vector.elements

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self._local.read(start, stop, out)
        torch.sub(self._vector.rounded(self._anchor[start:stop], start), out, out=out)


class OverlappedPseudoGradient(PseudoGradient):
    """``PseudoGradient`` whose rounds are averaged while the inner optimizer goes on.

    The work done meanwhile is kept in full for the next contribution: local parameters move by the difference between
    the new anchor and the parameters that were contributed, of which this keeps a copy where they are, as copies within
    a GPU take next to no time. (Streaming DiLoCo, arXiv:2501.18512, mixes local and global parameters instead.)
    """

    def __init__(
        self, vector: ParameterVector, optimizer: Optimizer, clip_norm: float | None, *, sets_lr: bool = True
    ) -> None:
        super().__init__(vector, optimizer, clip_norm, sets_lr=sets_lr)
        self._offered: TensorSequence | None = None

    def contribution(self, anchor: Tensor) -> RangeReader:
        self._offered = self._vector.copy()
        return _Difference(self._vector, anchor, self._offered.settled())

    def restart_from(self, anchor: Tensor) -> None:
        self._offered = None
        super().restart_from(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        assert self._offered is not None, "contribution() comes first"
        self._vector.rebase(self._offered, anchor)
        self._offered = None


class AccumulatedGradient:
    """Gradient accumulation without inner steps; contributes the mean gradient over all its samples.

    The round's weighted mean is then the gradient of the global batch. The sums are on the model's device, one tensor a
    parameter, each of which replaces a gradient, so that parameters, gradients and sums are all there is.
    """

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector
        self._sums: list[Tensor | None] = [None] * len(vector.parameters)
        self._samples = 0

    @torch.no_grad()
    def step(self, samples: int, lr_factor: float) -> None:
        for number, parameter in enumerate(self._vector.parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            total = self._sums[number]
            if total is None:
                total = self._sums[number] = torch.zeros_like(gradient, dtype=torch.float32)
            total.add_(gradient, alpha=samples)
        self._samples += samples

    def contribution(self, anchor: Tensor) -> RangeReader:
        if self._samples == 0:
            return TensorReader(zeros(self._vector.elements))
        return _Mean(self._vector.alike(self._sums).settled(), float(self._samples))

    def reset_optimizer(self) -> None:
        """Do nothing: there is no inner optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        self._sums, self._samples = [None] * len(self._vector.parameters), 0
        self._vector.write(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        self.restart_from(anchor)


class _Mean:
    """Reader of sums divided by a number of samples."""

    def __init__(self, sums: RangeReader, samples: float) -> None:
        self._sums = sums
        self._samples = samples

    @property
    def elements(self) -> int:
        return self._sums.elements

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self._sums.read(start, stop, out)
        out.div_(self._samples)


@dataclass(frozen=True)
class OwnLoop:
    """A training loop of one's own, whose optimizer keeps the learning rates that the loop gives it.

    ``clip_norm``: norm to which gradients are clipped before the optimizer steps, None for no limit.
    """

    clip_norm: float | None = None


def local_work(
    run: RunFile, vector: ParameterVector, inner: Optimizer | None, own_loop: OwnLoop | None = None
) -> LocalWork:
    """Make the local work of the run's algorithm. Raises ``UserError`` if a required inner optimizer is missing.

    ``own_loop``: None for a recipe's loop, whose learning rate and clipping are the run file's.
    """
    if run.algorithm == "virtual_batch":
        return AccumulatedGradient(vector)
    if inner is None:
        raise UserError("the run's algorithm diloco needs an inner optimizer: give the session an inner_optimizer")
    low = next((one.dtype for one in vector.weights if one.dtype in LOW_PRECISION), None)
    if low is not None:
        log.warning(_LOW_PRECISION, type_name(low))
    kind = OverlappedPseudoGradient if run.averaging.overlap else PseudoGradient
    clip_norm = run.inner.clip_norm if own_loop is None else own_loop.clip_norm
    return kind(vector, inner, clip_norm, sets_lr=own_loop is None)
