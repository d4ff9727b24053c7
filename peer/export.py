"""A run's anchor as a model for inference: safetensors by parameter name, with the recipe's config beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.peer.parameters import ParameterVector, split_by_layout
from shoal.peer.partial_state import PartialState, Wanted
from shoal.peer.recipes import load_model, load_recipe
from shoal.peer.replica import outer_of
from shoal.peer.state import load_state
from shoal.peer.state_fetch import StateFetch
from shoal.swarm.errors import RecipeError, StateFileError, StorageError
from shoal.swarm.invite import Invite
from shoal.swarm.messages import TensorSpec
from shoal.swarm.observer import observe

_LAYOUT = TypeAdapter(tuple[TensorSpec, ...])
_FETCH_S = 10.0


def newest_state(source: Path) -> Path:
    """The state file itself, or the one of the highest version in a run's folder. Raises ``StateFileError``."""
    if source.is_file():
        return source
    found = sorted(source.glob("**/state.safetensors"))
    if not found:
        raise StateFileError(
            f"{source}: no saved state here; give a run's folder (~/.shoal/runs/RUN-HASH), or its invite "
            "while it is running"
        )
    return max(found, key=lambda path: load_state(path)[0].version)


def export_model(source: Path, out: Path) -> int:
    """Write the anchor saved in ``source`` (a state file or a folder of them); returns its version.

    Raises ``StateFileError`` or ``StorageError``; an existing ``out`` stays as it is then.
    """
    path = newest_state(source)
    state, about = load_state(path)
    try:
        layout = _LAYOUT.validate_python([_tupled(spec) for spec in about["layout"]])
    except (KeyError, TypeError, ValidationError) as error:
        raise StateFileError(f"{path}: field layout: {error}") from error
    if sum(spec.elements for spec in layout) != state.anchor.numel():
        raise StateFileError(f"{path}: field layout: does not fit the anchor's {state.anchor.numel()} elements")
    write_model(
        out, split_by_layout(state.anchor, layout), about.get("recipe"), _provenance(state.version, state.digest, about)
    )
    return state.version


async def export_from_run(invite: Invite, out: Path) -> int:
    """Fetch the current anchor from a member of a running run and write it; returns its version.

    Only for runs with an installed recipe: it gives names and shapes. Raises ``RecipeError``, ``LinkError``, …
    """
    async with observe(invite) as client:
        run = client.run_file
        if run.recipe.name == "own":
            raise RecipeError("this run has no recipe to name its parameters: export a member's saved state instead")
        recipe = load_recipe(run)
        vector = ParameterVector(recipe.build_model(run.run.seed))
        slots = outer_of(run.outer).slots
        view = client.view
        if view.state_digest is None:
            raise StateFileError("no member of the run holds its state at the moment; try again later")
        shape = (1 + slots, vector.elements)
        wanted = Wanted(view.anchor_version, view.state_digest, shape)
        partial = PartialState(wanted, only_anchor=True)
        await StateFetch(client.node, partial, client.node.trainers, _FETCH_S).run()
        about = {"run": run.run.name, "run_hash": run.hash.hex()}
        provenance = _provenance(wanted.version, wanted.digest, about)
        write_model(out, vector.named(partial.values[0]), recipe.config(), provenance)
        return wanted.version


def write_model(
    out: Path, tensors: dict[str, Tensor], recipe: dict[str, Any] | None, provenance: dict[str, str]
) -> None:
    """``out`` and, beside it, ``out`` with suffix ``.json``: the recipe's config. Raises ``StorageError``."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, provenance)
        out.with_suffix(".json").write_text(json.dumps({"recipe": recipe, **provenance}, indent=2) + "\n")
        temporary.replace(out)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{out}: the model cannot be written: {error}") from error


def read_model(path: Path) -> nn.Module:
    """An exported model, rebuilt by its recipe. Raises ``StateFileError`` or ``RecipeError``."""
    config = path.with_suffix(".json")
    try:
        recipe = json.loads(config.read_text())["recipe"]
        tensors = load_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateFileError(f"{path}: not an exported model with its {config.name}: {error}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{config}: this model was made by an own training loop; load it there")
    model = load_model(recipe)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise StateFileError(f"{path}: does not fit the model of {config}: {error}") from error
    return model


def _tupled(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "shape": tuple(spec["shape"])}


def _provenance(version: int, digest: bytes, about: dict[str, Any]) -> dict[str, str]:
    return {
        "run": str(about.get("run", "")),
        "run_hash": str(about.get("run_hash", "")),
        "anchor_version": str(version),
        "state_digest": digest.hex(),
    }
