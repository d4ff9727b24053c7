"""``shoal`` in a pipeline, with the same speeds everywhere: ``stage_member.py STEP TIMES ARMED join INVITE …``.

Every block of the model takes ten times as long as its first and last layer, so that plans do not depend on what else
the machine is doing. It kills itself as ``doomed_member.py`` does, at one of the steps here, or ``never``.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from doomed_member import Doom, answered

from shoal.peer.cli.main import main
from shoal.peer.pipeline import peer as pipeline_peer
from shoal.peer.pipeline.profile import ModelProfile
from shoal.peer.pipeline.training import SpanTraining
from shoal.swarm.protocol.messages import PeerToCoordinatorClaim, PeerToCoordinatorRoundReady

_STEP_S = 0.01
"""Rests before each computation, to leave the cores to the others."""


def measure_alike() -> None:
    real = pipeline_peer.profile_model

    def measured(*arguments: Any) -> ModelProfile:
        model = real(*arguments)
        seconds = [0.1 if name.startswith("blocks") else 0.01 for name in model.names]
        layers = [dataclasses.replace(one, seconds=its) for one, its in zip(model.layers, seconds, strict=True)]
        return dataclasses.replace(model, layers=tuple(layers))

    pipeline_peer.profile_model = measured  # type: ignore[attr-defined]


def _computing(step: str, doom: Doom) -> None:
    real = getattr(SpanTraining, step)

    def compute(self: Any, task: Any) -> Any:
        time.sleep(_STEP_S)
        doom.comes_to(task.compute.micro_batch.round)
        return real(self, task)

    setattr(SpanTraining, step, compute)


def never(doom: Doom) -> None:
    """Do not die."""
    _computing("_forward", Doom(0, Path("/nonexistent")))


def forward(doom: Doom) -> None:
    """Kill itself before the forward pass of a micro-batch."""
    _computing("_forward", doom)


def backward(doom: Doom) -> None:
    """Kill itself before the backward pass of a micro-batch whose samples are claimed."""
    _computing("_backward", doom)


def claimed(doom: Doom) -> None:
    """Kill itself when its claim has just been granted."""
    answered(doom, PeerToCoordinatorClaim)


def ready(doom: Doom) -> None:
    """Kill itself when the coordinator knows that its contribution is ready."""
    answered(doom, PeerToCoordinatorRoundReady)


STEPS = {step.__name__: step for step in (never, forward, backward, claimed, ready)}

if __name__ == "__main__":
    _, step, times, armed, *arguments = sys.argv
    measure_alike()
    STEPS[step](Doom(int(times), Path(armed)))
    sys.argv = ["shoal", *arguments]
    main()
