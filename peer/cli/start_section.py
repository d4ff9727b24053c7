"""``[start]`` of a run file, made of a checkpoint: `shoal host --from`.

A host has this done by a process of its own, so that it never holds a model, or torch, itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from shoal.peer.checkpoints.manifest import MANIFEST, Manifest
from shoal.peer.checkpoints.source import CheckpointSource
from shoal.peer.checkpoints.tensor_reader import CheckpointTensors
from shoal.peer.options import StartFrom
from shoal.peer.recipes import layered_recipe, load_recipe
from shoal.peer.recipes.model_memory import check_start_fits
from shoal.peer.state_transfer.start import hash_of, whole_checkpoints
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm import durable
from shoal.swarm.errors import DeviceError, ModelMismatch, RecipeError, RunFileError, StateFileError, StorageError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file
from shoal.swarm.protocol.start_section import StartSection, StartTensor

log = logging.getLogger(__name__)


def write_started(run_path: Path, out: Path, start_from: StartFrom) -> None:
    """Write the run file with a new ``[start]`` to ``out``. Blocks.

    Raises ``StateFileError``, ``RunFileError``, ``StorageError``, and ``ModelMismatch`` for a checkpoint of another
    model."""
    text, run = load_run_file(run_path)
    section = start_section(start_from, run)
    _check_model(run, section)
    started, _ = with_section(text, section, str(run_path))
    try:
        durable.put(out, started.encode())
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error}") from error


def start_section(start_from: StartFrom, run: RunFile) -> StartSection:
    """Make the section with which ``run`` starts from the newest complete checkpoint.

    All of the checkpoint is read, a few files at a time. The outer optimizer's vectors are kept where the run has the
    same outer optimizer.

    Raises ``StateFileError``."""
    reader = Identity.load_or_create(start_from.identity) if start_from.identity is not None else None
    found = _newest_first(start_from.folder, reader)
    for source, manifest in found:
        try:
            section, spoilt = _section_of(source, manifest, start_from, run)
        except StateFileError as error:
            if manifest is found[-1][1]:
                raise
            log.warning("a checkpoint cannot be used, an older one may do: %s", error)
            continue
        if spoilt:
            raise StateFileError(
                f"{source.place(MANIFEST)}: tensor {spoilt[0]!r} has values that are infinite or not a number: the run "
                "had diverged; give the checkpoint of an earlier round"
            )
        return section
    raise AssertionError("there is one, and the last one returns or raises")


def _section_of(
    source: CheckpointSource, manifest: Manifest, start_from: StartFrom, run: RunFile
) -> tuple[StartSection, list[str]]:
    """Make the section for this checkpoint, and list tensors with values that are not finite."""
    before = parse_run_file(manifest.run_toml, f"{source.place(MANIFEST)}: run_toml")
    tokens, steps = manifest.tokens, manifest.anchor_version
    if before.start is not None:
        tokens += before.start.tokens
        steps += before.start.outer_steps
    goes_on = before.outer.optimizer == run.outer.optimizer and manifest.outer_vectors == run.outer.slots
    if start_from.only_parameters:
        tokens, goes_on = 0, False
    read, tensors, spoilt = CheckpointTensors(source, manifest), dict[str, StartTensor](), list[str]()
    for spec in manifest.layout:
        rows = read.rows(spec.name, 1 + (manifest.outer_vectors if goes_on else 0))
        if not bool(torch.isfinite(rows).all()):
            spoilt.append(spec.name)
        tensors[spec.name] = StartTensor(shape=spec.shape, sha256=hash_of(spec.shape, rows))
    section = StartSection(
        run=manifest.run_folder,
        round=manifest.round,
        state=manifest.state_digest,
        tokens=tokens,
        outer_steps=steps if goes_on else 0,
        tensors=tensors,
    )
    return section, spoilt


def with_section(text: str, start: StartSection, where: str) -> tuple[str, RunFile]:
    """Add the section to a run file's text and validate it. Raises ``RunFileError``, also if there is one already."""
    if parse_run_file(text, where).start is not None:
        raise RunFileError(f"{where}: has a [start] already: leave out --from, or that section")
    lines = ["", "# Written by `shoal host --from`.", "[start]", f"run = {json.dumps(start.run)}"]
    lines += [f"round = {start.round}", f'state = "{start.state}"']
    lines += [f"tokens = {start.tokens}", f"outer_steps = {start.outer_steps}", "", "[start.tensors]"]
    lines += [
        f'{json.dumps(name)} = {{ shape = {list(one.shape)}, sha256 = "{one.sha256}" }}'
        for name, one in start.tensors.items()
    ]
    whole = text.rstrip("\n") + "\n" + "\n".join(lines) + "\n"
    return whole, parse_run_file(whole, f"{where} with the [start] of a model of {len(start.tensors)} tensors")


def _check_model(run: RunFile, start: StartSection) -> None:
    """Compare the checkpoint with the run's model, if its recipe is installed here; otherwise the peers will."""
    if run.recipe.name == "own":
        return
    try:
        recipe = load_recipe(run)
        if run.pipeline is None:
            check_start_fits(run, recipe)
    except (RecipeError, DeviceError) as error:
        log.warning("whether the checkpoint fits the model, the first peer will say: %s", error)
        return
    if run.pipeline is not None:
        layout = layered_recipe(recipe, run).layers(run.run.seed).layout
    else:
        layout = ParameterVector(recipe.build_model(run.run.seed)).layout
    difference = start.difference(layout, whole=True)
    if difference:
        raise ModelMismatch(f"the run's model is not that of {start.source}: {difference}")


def _newest_first(folder: Path, identity: Identity | None) -> list[tuple[CheckpointSource, Manifest]]:
    """List the checkpoints of one run, newest first; at least one."""
    refused: list[str] = []
    found = sorted(whole_checkpoints(folder, identity, refused), key=lambda one: -one[1].round)
    if not found:
        raise StateFileError(
            f"{folder}: no checkpoint of a whole model here{f'; {refused[0]}' if refused else ''}; give a run's folder "
            "(~/.shoal/runs/RUN-HASH) or a checkpoint's"
        )
    if len({manifest.run_hash for _, manifest in found}) > 1:
        raise StateFileError(f"{folder}: checkpoints of several runs are here; give the folder of one")
    return found
