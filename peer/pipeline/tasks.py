"""What the event loop hands to the training thread of a pipeline's peer, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.peer.pipeline.tensor_io import ComputedTensor
from shoal.peer.pipeline.view_watch import Attention
from shoal.swarm.pipeline.engine.effects import ComputeBackward, ComputeForward


@dataclass(frozen=True)
class ForwardTask:
    """``given``: the input of ``from_stage``, ``(b, …)``, and ``targets``, where they came from the stage before; None:
    this peer drives the micro-batch, and has its samples."""

    compute: ComputeForward
    given: Tensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class BackwardTask:
    """``gradient``: of the output that ``ForwardTask`` gave; None at the last stage, where the targets end it."""

    compute: ComputeBackward
    gradient: Tensor | None = None


@dataclass(frozen=True)
class ForgetTask:
    """A job that is not needed any more; all of them, for None."""

    job: int | None


@dataclass(frozen=True)
class AttentionTask:
    """Something else goes before computing: why."""

    reason: Attention


Task = ForwardTask | BackwardTask | ForgetTask | AttentionTask


@dataclass(frozen=True)
class ComputeResult:
    """What a computation gave: an activation and the targets that go with it, or a gradient; None where nobody wants
    one."""

    compute: ComputeForward | ComputeBackward
    tensor: ComputedTensor | None = None
    targets: Tensor | None = None
