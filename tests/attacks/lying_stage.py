"""``shoal`` in a pipeline whose stages send lies: ``lying_stage.py LIE join INVITE …``.

``huge``: activations and gradients a million million times too large. ``wrong``: of the usual size, random activations
and gradients of the opposite sign. ``honest``: none. Plans do not depend on what else the machine is doing.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from doomed_member import Doom
from stage_member import measure_alike, never

from shoal.peer.cli.main import main
from shoal.peer.pipeline.tensor_io import ComputedTensor
from shoal.peer.pipeline.training import ComputeResult, SpanTraining


def enlarged(tensor: Tensor) -> Tensor:
    return tensor * 1e12


def shuffled(tensor: Tensor) -> Tensor:
    other = torch.randn_like(tensor)
    return other * (tensor.norm() / other.norm())


def flipped(tensor: Tensor) -> Tensor:
    return -tensor


def lie(step: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change the results of one step that other peers get."""
    real = getattr(SpanTraining, step)

    def compute(self: Any, task: Any) -> ComputeResult:
        made: ComputeResult = real(self, task)
        if made.tensor is None:
            return made
        return replace(made, tensor=ComputedTensor.on_current_stream(change(made.tensor.tensor)))

    setattr(SpanTraining, step, compute)


LIES = {"huge": (enlarged, enlarged), "wrong": (shuffled, flipped)}

if __name__ == "__main__":
    _, kind, *arguments = sys.argv
    measure_alike()
    never(Doom(0, Path("/nonexistent")))
    for step, change in zip(("_forward", "_backward"), LIES.get(kind, ()), strict=False):
        lie(step, change)
    sys.argv = ["shoal", *arguments]
    main()
