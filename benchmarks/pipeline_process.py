"""``shoal`` as one process of ``pipeline.py``: the same commands, with the benchmark's recipe and what it notes down.

``pipeline_process.py host PEERS NAMESPACE host …``: makes no plan before so many peers are there, so that plans do not
depend on who was first. ``pipeline_process.py peer SLOWNESS NAMESPACE join …``: a machine of that speed. Without shaped
links NAMESPACE is "-". Notes go to ``notes.jsonl`` in the working directory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeline_recipe
from shaped_links import enter

from shoal.peer import recipes
from shoal.peer.cli.main import main as shoal
from shoal.peer.pipeline import peer as pipeline_peer
from shoal.peer.pipeline.profile import ModelProfile, profile_model
from shoal.peer.pipeline.training import SpanTraining
from shoal.swarm.coordinator import service
from shoal.swarm.coordinator.placement import planner_of
from shoal.swarm.pipeline.planner.model import Infeasible
from shoal.swarm.protocol.run_file import RunFile


def wait_for_all(peers: int) -> None:
    def patient(run: RunFile) -> Callable[..., Any]:
        planner = planner_of(run)

        def plan(previous: Any, layers: Any, present: Any, *others: Any) -> Any:
            if previous is None and len(present) < peers:
                return Infeasible(f"{peers - len(present)} peers are still to come")
            return planner(previous, layers, present, *others)

        return plan

    service.planner_of = patient  # type: ignore[attr-defined]


class Notes:
    """Moments of this process, as JSON lines."""

    def __init__(self) -> None:
        self._file = Path("notes.jsonl").open("a")  # noqa: SIM115 - until the process ends

    def write(self, event: str, **about: Any) -> None:
        self._file.write(json.dumps({"event": event, "time": time.time(), **about}) + "\n")
        self._file.flush()


def tell_speed(notes: Notes) -> None:
    """Layers are measured, and told to take what they do on a machine with nothing else to do: while the others start
    on the same cores, some layers would seem slower than the rest, and the model would be cut accordingly."""
    tell = ModelProfile.capability

    def told(self: ModelProfile, *arguments: Any) -> Any:
        capability = tell(self, *arguments)
        costs = [[one.cost.parameters_bytes, one.cost.activation_bytes, one.cost.kept_bytes] for one in self.layers]
        notes.write("capability", layers=costs, **vars(capability))
        return capability

    ModelProfile.capability = told  # type: ignore[method-assign,assignment]

    def measured(run: RunFile, *about: Any) -> ModelProfile:
        model = profile_model(run, *about, cache=Path("measured.json"))  # type: ignore[misc]
        layer_s = run.recipe.settings["layer_ms"] / 1000 * pipeline_recipe.slowness
        return replace(model, layers=tuple(replace(one, seconds=layer_s) for one in model.layers))

    pipeline_peer.profile_model = measured  # type: ignore[assignment,attr-defined]


def note_computing(notes: Notes) -> None:
    """Every micro-batch, forward and back, and every end of a round."""

    def noted(name: str, kind: str) -> None:
        real = getattr(SpanTraining, name)

        def compute(self: SpanTraining, task: Any) -> Any:
            began_s, asked = time.time(), task.compute
            made = real(self, task)
            of, counted = asked.micro_batch, sorted(getattr(asked, "accumulate", ()))
            notes.write(kind, began_s=began_s, round=of.round, start=of.start, stages=counted)
            return made

        setattr(SpanTraining, name, compute)

    noted("_forward", "forward")
    noted("_backward", "backward")
    end = SpanTraining.close_round

    def ended(self: SpanTraining) -> bool:
        began_s = time.time()
        goes_on = end(self)
        notes.write("round_end", began_s=began_s, goes_on=goes_on)
        return goes_on

    SpanTraining.close_round = ended  # type: ignore[method-assign]


def main() -> None:
    _, task, given, namespace, *arguments = sys.argv
    if namespace != "-":
        enter(namespace)
    recipes._OWN[pipeline_recipe.NAME] = "pipeline_recipe:RestingRecipe"
    if task == "host":
        wait_for_all(int(given))
    else:
        pipeline_recipe.slowness = float(given)
        notes = Notes()
        tell_speed(notes)
        note_computing(notes)
    sys.argv = ["shoal", *arguments]
    shoal()


if __name__ == "__main__":
    main()
