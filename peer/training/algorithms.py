"""Algorithms of local work between rounds and of its contribution to the next round; one class an algorithm."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.compression.scratch import empty_aligned
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunFile


class LocalWork(Protocol):
    """Local work of one peer since the anchor."""

    def step(self, samples: int, lr_factor: float) -> None:
        """Take in and clear the gradients at the model's parameters, those of a mean loss over ``samples``.

        ``lr_factor``: the schedule's factor on the inner learning rate.
        """

    def contribution(self, anchor: Tensor) -> Tensor:
        """Return the contribution, a new (n,) float32 on the CPU; zeros if no work was done."""

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

    def __init__(self, vector: ParameterVector, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._vector = vector
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    def step(self, samples: int, lr_factor: float) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._vector.parameters, self._clip_norm)
        for group, lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * lr_factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def contribution(self, anchor: Tensor) -> Tensor:
        local = self._vector.read()
        return torch.sub(anchor, local, out=local)

    def reset_optimizer(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def restart_from(self, anchor: Tensor) -> None:
        self._vector.write(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        self.restart_from(anchor)


class OverlappedPseudoGradient(PseudoGradient):
    """``PseudoGradient`` whose rounds are averaged while the inner optimizer goes on.

    The work done meanwhile is kept in full for the next contribution: local parameters move by the difference between
    the new anchor and the parameters that were contributed. (Streaming DiLoCo, arXiv:2501.18512, mixes local and global
    parameters instead.)
    """

    def __init__(self, vector: ParameterVector, optimizer: Optimizer, clip_norm: float | None) -> None:
        super().__init__(vector, optimizer, clip_norm)
        self._offered: Tensor | None = None

    def contribution(self, anchor: Tensor) -> Tensor:
        self._offered = self._vector.read()
        return torch.sub(anchor, self._offered, out=empty_aligned(anchor.numel()))

    def restart_from(self, anchor: Tensor) -> None:
        self._offered = None
        super().restart_from(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        assert self._offered is not None, "contribution() comes first"
        # In this order the result is exactly the anchor if no work was done meanwhile.
        self._vector.write(self._vector.read().sub_(self._offered).add_(anchor))
        self._offered = None


class AccumulatedGradient:
    """Gradient accumulation without inner steps; contributes the mean gradient over all its samples.

    The round's weighted mean is then the gradient of the global batch.
    """

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector
        self._sum: Tensor | None = None
        self._samples = 0

    def step(self, samples: int, lr_factor: float) -> None:
        gradient = self._vector.take_gradients().mul_(float(samples))
        self._sum = gradient if self._sum is None else self._sum.add_(gradient)
        self._samples += samples

    def contribution(self, anchor: Tensor) -> Tensor:
        if self._sum is None:
            return torch.zeros_like(anchor)
        return (self._sum / float(self._samples)).to("cpu", copy=True)

    def reset_optimizer(self) -> None:
        """Do nothing: there is no inner optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        self._sum, self._samples = None, 0
        self._vector.write(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        self.restart_from(anchor)


def local_work(run: RunFile, vector: ParameterVector, inner: Optimizer | None) -> LocalWork:
    """Make the local work of the run's algorithm. Raises ``UserError`` if a required inner optimizer is missing."""
    if run.algorithm == "virtual_batch":
        return AccumulatedGradient(vector)
    if inner is None:
        raise UserError("the run's algorithm diloco needs an inner optimizer: give the session an inner_optimizer")
    kind = OverlappedPseudoGradient if run.averaging.overlap else PseudoGradient
    return kind(vector, inner, run.inner.clip_norm)
