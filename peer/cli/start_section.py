"""``[start]`` of a run file, made of a checkpoint: `shoal host --from`.

A host has this done by a process of its own, so that it never holds a model, or torch, itself."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.peer.checkpoints.manifest import MANIFEST, Manifest
from shoal.peer.checkpoints.source import CheckpointSource
from shoal.peer.checkpoints.tensor_reader import CheckpointTensors
from shoal.peer.options import StartFrom
from shoal.peer.recipes import Recipe, layered_recipe, load_recipe
from shoal.peer.recipes.model_memory import check_start_fits
from shoal.peer.state_transfer.pretrained import PretrainedModel
from shoal.peer.state_transfer.start import hash_of, whole_checkpoints
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm import durable
from shoal.swarm.errors import DeviceError, ModelMismatch, RecipeError, RunFileError, StateFileError, StorageError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file
from shoal.swarm.protocol.start_section import StartSection, StartTensor
from shoal.swarm.protocol.types import TensorSpec

log = logging.getLogger(__name__)


def write_started(run_path: Path, out: Path, start_from: StartFrom) -> None:
    """Write the run file with a new ``[start]`` to ``out``. Blocks.

    Raises ``StateFileError``, ``RunFileError``, ``StorageError``, and ``ModelMismatch`` for a checkpoint of another
    model."""
    text, run = load_run_file(run_path)
    pretrained = PretrainedModel.open(start_from.folder)
    if pretrained is not None:
        text, run = _with_config(text, run, pretrained, str(run_path))
        section = _pretrained_section(pretrained, run)
    else:
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
    found = _newest_first(Path(start_from.folder), reader)
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


def _pretrained_section(pretrained: PretrainedModel, run: RunFile) -> StartSection:
    """Make the section with which ``run`` starts from a model that transformers has saved.

    Raises ``StateFileError``, ``ModelMismatch`` for another model than the run's, and what its recipe raises."""
    tensors = dict[str, StartTensor]()
    digest = hashlib.sha256(b"shoal pretrained 1\0")
    for spec in _layout_of(run, load_recipe(run)):
        _, entry = pretrained.tensors.get(spec.name, ("", None))
        if entry is None or entry.shape != spec.shape:
            found = f"is {list(entry.shape)} there" if entry else "is not there"
            raise ModelMismatch(
                f"the run's model is not that of {pretrained.place}: {spec.name} {list(spec.shape)} {found}"
            )
        rows = pretrained.rows(spec.name, 1)
        if not bool(torch.isfinite(rows).all()):
            raise StateFileError(f"{pretrained.place}: tensor {spec.name!r} has values that are no finite numbers")
        tensors[spec.name] = StartTensor(shape=spec.shape, sha256=hash_of(spec.shape, rows))
        digest.update(f"{spec.name} {tensors[spec.name].sha256}\0".encode())
    name = pretrained.place.replace("\\", "/").rpartition("/")[2] or "model"
    return StartSection(run=name[:100], round=0, state=digest.hexdigest(), tensors=tensors)


def _with_config(text: str, run: RunFile, pretrained: PretrainedModel, where: str) -> tuple[str, RunFile]:
    """Add the model's configuration to a run of the recipe ``hf`` that has none. Raises ``RunFileError``."""
    if run.recipe.name != "hf" or "config" in run.recipe.settings:
        return text, run
    from shoal.peer.recipes.hf import run_config

    fields = run_config(pretrained.config())
    lines = ["", "# Written by `shoal host --from`.", "[recipe.settings.config]"]
    lines += [f"{json.dumps(name)} = {_toml_of(value)}" for name, value in fields.items()]
    whole = text.rstrip("\n") + "\n" + "\n".join(lines) + "\n"
    return whole, parse_run_file(whole, f"{where} with the model's config")


def _toml_of(value: Any) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(f"{json.dumps(name)} = {_toml_of(one)}" for name, one in value.items()) + " }"
        case list():
            return f"[{', '.join(map(_toml_of, value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


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
    difference = start.difference(_layout_of(run, recipe), whole=True)
    if difference:
        raise ModelMismatch(f"the run's model is not that of {start.source}: {difference}")


def _layout_of(run: RunFile, recipe: Recipe) -> Sequence[TensorSpec]:
    if run.pipeline is not None:
        return layered_recipe(recipe, run).layers(run.run.seed).layout
    return ParameterVector(recipe.build_model(run.run.seed)).layout


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
