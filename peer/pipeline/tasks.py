"""Tasks that the event loop hands to a pipeline peer's training thread, and their results."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline.tensor_io import ComputedTensor
from shoal.swarm.pipeline.engine.effects import ComputeBackward, ComputeForward


@dataclass(frozen=True)
class ForwardTask:
    """Forward pass of one micro-batch.

    ``given``: the input of ``from_stage``, ``(b, …)``, and ``targets``, as they came from the previous stage; None:
    this peer drives the micro-batch and reads its samples.
    """

    compute: ComputeForward
    given: Tensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class BackwardTask:
    """Backward pass of one micro-batch.

    ``gradient``: of the forward pass's output; None at the last stage, which has the targets.
    """

    compute: ComputeBackward
    gradient: Tensor | None = None


@dataclass(frozen=True)
class ForgetTask:
    """Drop of a job that is not needed any more; of all jobs for None."""

    job: int | None


@dataclass(frozen=True)
class AttentionTask:
    """Request to attend to something before computing goes on; ``reason`` says to what."""

    reason: Attention


Task = ForwardTask | BackwardTask | ForgetTask | AttentionTask


@dataclass(frozen=True)
class ComputeResult:
    """Result of a computation: an activation and its targets, or a gradient; None where nobody wants one."""

    compute: ComputeForward | ComputeBackward
    tensor: ComputedTensor | None = None
    targets: Tensor | None = None
