"""A run's anchor as a model for inference: safetensors by parameter name, with the recipe's config beside it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.peer.checkpoints.checkpoint import Checkpoint, read_checkpoint
from shoal.peer.checkpoints.manifest import MANIFEST
from shoal.peer.checkpoints.sealed_folder import ENVELOPE, opened
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.outer_optimizer import outer_of
from shoal.peer.parameters import ParameterVector, split_by_layout
from shoal.peer.partial_state import PartialState, Wanted
from shoal.peer.recipes import load_model, load_recipe
from shoal.peer.rounded_anchor import fetch_rounded_anchor
from shoal.peer.state_fetch import StateFetch
from shoal.peer.state_forms import form_named
from shoal.swarm.errors import RecipeError, SealedForOthers, StateFileError, StorageError
from shoal.swarm.identity import Identity
from shoal.swarm.invite import Invite
from shoal.swarm.observer import observe

log = logging.getLogger(__name__)

_FETCH_S = 10.0


def newest_checkpoint(source: Path, identity: Identity | None = None) -> Checkpoint:
    """The checkpoint in this folder, or the newest whole one anywhere below it; ``identity`` opens sealed ones.

    Raises ``StateFileError``."""
    if any((source / name).exists() for name in (MANIFEST, ENVELOPE)):
        return read_checkpoint(opened(FolderSource(source), identity))
    refused: StateFileError | None = None
    found = [path.parent for name in (MANIFEST, ENVELOPE) for path in source.glob(f"**/round-*/{name}")]
    for place in sorted(found, key=lambda folder: folder.name, reverse=True):
        try:
            return read_checkpoint(opened(FolderSource(place), identity))
        except StateFileError as error:
            log.warning("a checkpoint cannot be used, an older one may do: %s", error)
            refused = error
    if isinstance(refused, SealedForOthers):
        raise refused
    damaged = f" that is whole; {refused}" if refused else ""
    raise StateFileError(
        f"{source}: no checkpoint here{damaged}; give a run's folder (~/.shoal/runs/RUN-HASH), a checkpoint's, or the "
        "run's invite while it is running"
    )


def export_model(source: Path, out: Path, identity: Identity | None = None) -> int:
    """Write the anchor of the newest checkpoint in ``source``, be it sealed for ``identity``; returns its version.

    Raises ``StateFileError`` or ``StorageError``; an existing ``out`` stays as it is then.
    """
    checkpoint = newest_checkpoint(source, identity)
    manifest, state = checkpoint.manifest, checkpoint.state
    tensors = split_by_layout(state.anchor, manifest.layout)
    provenance = _provenance(state.version, state.digest, manifest.run, manifest.run_hash)
    write_model(out, tensors, manifest.recipe, provenance)
    return state.version


async def export_from_run(invite: Invite, out: Path, *, rounded: bool = False) -> int:
    """Fetch the current anchor from the members of a running run and write it; returns its version. ``rounded``: fetch
    and write it in bfloat16, half the bytes.

    Only for runs with an installed recipe: it gives names and shapes. Raises ``RecipeError``, ``LinkError``, …
    """
    async with observe(invite) as client:
        run = client.run_file
        if run.recipe.name == "own":
            raise RecipeError("this run has no recipe to name its parameters: export a member's checkpoint instead")
        recipe = load_recipe(run)
        vector = ParameterVector(recipe.build_model(run.run.seed))
        slots = outer_of(run.outer).slots
        view = client.view
        if view.state_digest is None:
            raise StateFileError("no member of the run holds its state at the moment; try again later")
        shape = (1 + slots, vector.elements)
        wanted = Wanted(view.anchor_version, view.state_digest, shape)
        node = client.node
        if rounded:
            anchor = await fetch_rounded_anchor(node, node.trainers(), wanted.version, vector.elements, _FETCH_S)
            tensors = {name: tensor.bfloat16() for name, tensor in vector.named(anchor).items()}
        else:
            partial = PartialState(wanted, only_anchor=True)
            form = form_named(run.checkpoints.transfer)
            await StateFetch(node, partial, node.trainers, _FETCH_S, form=form).run()
            tensors = vector.named(partial.values[0])
        provenance = _provenance(wanted.version, wanted.digest, run.run.name, run.hash.hex())
        write_model(out, tensors, recipe.config(), provenance)
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


def _provenance(version: int, digest: bytes, run: str, run_hash: str) -> dict[str, str]:
    return {
        "run": run,
        "run_hash": run_hash,
        "anchor_version": str(version),
        "state_digest": digest.hex(),
    }
