"""Working out ``[pins]``: what a run's members have to bring, before the first of them comes.

`shoal prepare` does it for a run file; `shoal host` has it done by a process of its own, which builds the model and
ends: the host itself holds no model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shoal.peer.cli.start_section import RUN_FILE
from shoal.peer.recipes import layered_recipe, load_recipe
from shoal.peer.recipes.model_memory import check_start_fits
from shoal.peer.training.anchor import GrowingDigest
from shoal.peer.training.outer_optimizer import outer_of
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm import durable
from shoal.swarm.coordinator.journal import JOURNAL
from shoal.swarm.errors import (
    CorpusError,
    DeviceError,
    ModelMismatch,
    RecipeError,
    RunFileError,
    ShoalError,
    StateFileError,
    StorageError,
)
from shoal.swarm.protocol.pins import PinnedLayer, PinsSection, layout_digest
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file

_CANNOT = (
    "{}\nThis machine cannot pin what the run's members have to bring. Put that right; or run `shoal prepare RUN.toml "
    "--out PREPARED.toml` on a machine that can, and host that file; or give --no-pins: then the first member to join "
    "defines the run's model, data and first state."
)
_ERRORS: tuple[type[ShoalError], ...] = (
    *(RunFileError, RecipeError, CorpusError, ModelMismatch, DeviceError, StateFileError, StorageError),
)
"""Errors that the process that prepares a run may end with."""

_PIECE_ELEMENTS = 2**22
"""So many values are hashed at once."""

Say = Callable[[str], object]


# The pins -----------------------------------------------------------------------------------------------------


def pins_of(run: RunFile, say: Say, folders: Sequence[Path] = ()) -> PinsSection:
    """Build the model and read the data, below ``folders`` only, as a member would. ``say``: told what is done.

    Raises ``RecipeError``, ``CorpusError``, ``ModelMismatch``, and ``DeviceError`` for a model that does not fit."""
    if run.recipe.name == "own":
        raise RecipeError(
            "recipe.name: the members of this run bring their own training loop, and nothing can be prepared for them"
        )
    say("Preparing: opening the data …")
    recipe = load_recipe(run, folders)
    samples = len(recipe.training_data())
    tokens, corpus = recipe.tokens_per_sample, recipe.corpus_digest.hex()
    if run.pipeline is not None:
        layered = layered_recipe(recipe, run).layers(run.run.seed)
        layers = tuple(
            PinnedLayer(tensors=len(one), elements=sum(spec.elements for spec in one), layout=layout_digest(one))
            for one in layered.layouts
        )
        elements = sum(layer.elements for layer in layers)
        return PinsSection(
            layout=layout_digest(layered.layout),
            elements=elements,
            tokens_per_sample=tokens,
            samples=samples,
            corpus=corpus,
            layers=layers,
        )
    check_start_fits(run, recipe)
    say("Preparing: building the model …")
    vector = ParameterVector(recipe.build_model(run.run.seed))
    say(f"Preparing: hashing {vector.elements:,} parameters …")
    state = None if run.start is not None else _first_state(vector, outer_of(run.outer).slots).hex()
    return PinsSection(
        layout=layout_digest(vector.layout),
        elements=vector.elements,
        tokens_per_sample=tokens,
        samples=samples,
        corpus=corpus,
        state=state,
    )


def _first_state(vector: ParameterVector, slots: int) -> bytes:
    """The digest of version 0: the model as it was built, and an outer optimizer that has done nothing. Without a copy
    of all values."""
    digest = GrowingDigest(0, (1 + slots, vector.elements))
    at = 0
    for parameter in vector.parameters:
        values = parameter.detach().reshape(-1)
        for start in range(0, values.numel(), _PIECE_ELEMENTS):
            piece = values[start : start + _PIECE_ELEMENTS]
            digest.take(0, at, piece.float().contiguous())
            at += piece.numel()
    for row in range(1, 1 + slots):
        for at in range(0, vector.elements, _PIECE_ELEMENTS):
            digest.take(row, at, torch.zeros(min(_PIECE_ELEMENTS, vector.elements - at)))
    return digest.digest()


def with_pins(text: str, pins: PinsSection, where: str) -> tuple[str, RunFile]:
    """A run file's text with that section, validated. Raises ``RunFileError``, as for a file that has one already."""
    if parse_run_file(text, where).pins is not None:
        raise RunFileError(f"{where}: has [pins] already: leave that section out to have it made anew")
    fields = pins.model_dump(mode="json", exclude={"layers"}, exclude_none=True)
    lines = ["", "# What members have to bring: written by `shoal prepare` or `shoal host`.", "[pins]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    if pins.layers is not None:
        rows = [
            f'    {{ tensors = {one.tensors}, elements = {one.elements}, layout = "{one.layout}" }},'
            for one in pins.layers
        ]
        lines += ["layers = [", *rows, "]"]
    whole = text.rstrip("\n") + "\n" + "\n".join(lines) + "\n"
    return whole, parse_run_file(whole, f"{where} with its [pins]")


def prepare(run_path: Path, out: Path, say: Say, folders: Sequence[Path] = ()) -> RunFile:
    """Write the run file with its ``[pins]`` to ``out``; ``folders``: where its data may be. Blocks.

    Raises as ``pins_of`` and ``with_pins``, and ``StorageError``."""
    text, run = load_run_file(run_path)
    if run.pins is not None:
        raise RunFileError(f"{run_path}: has [pins] already: leave that section out to have it made anew")
    prepared, run = with_pins(text, pins_of(run, say, folders), str(run_path))
    try:
        durable.put(out, prepared.encode())
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error}") from error
    return run


def say_pins(pins: PinsSection | None) -> str:
    """For people."""
    if pins is None:
        return "none: the first member to join defines the run's model, data and first state"
    first = f"first state {pins.state[:16]}" if pins.state else "first state not pinned here"
    corpus = f"data {pins.corpus[:16]}" if pins.corpus else "data of the members' own"
    return f"{pins.elements:,} parameters {pins.layout[:16]}, {corpus}, {first}"


# Of a host ----------------------------------------------------------------------------------------------------


async def pinned_run_file(
    text: str, run: RunFile, kept: Path, *, pin: bool, folders: Sequence[Path] = ()
) -> tuple[str, RunFile]:
    """The run file that a host publishes: with pins, unless its members bring loops of their own or these are not
    wanted (``pin``). ``folders``: where its data may be. Where the run is being hosted already, in the folder ``kept``,
    it stays what it is.

    Raises what went wrong in the process that builds the model, with what else can be done."""
    if run.pins is not None:
        return text, run
    if (kept / JOURNAL).exists() and (kept / RUN_FILE).exists():
        before_text, before = load_run_file(kept / RUN_FILE)
        if before.model_copy(update={"pins": None}) == run:
            return before_text, before
    if not pin or run.recipe.name == "own":
        return text, run
    with tempfile.TemporaryDirectory(prefix="shoal-prepare-") as folder:
        given, out = Path(folder) / RUN_FILE, Path(folder) / "prepared.toml"
        given.write_text(text)
        await _prepare_apart(given, out, folders)
        return load_run_file(out)


async def _prepare_apart(given: Path, out: Path, folders: Sequence[Path]) -> None:
    """`shoal prepare` as a process of its own, which tells how far it is; its error is ours."""
    arguments = ["-m", "shoal.peer", "prepare", str(given), "--out", str(out)]
    arguments += [word for folder in folders for word in ("--data", str(folder))]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
    try:
        _, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = told.decode(errors="replace").replace(str(given), RUN_FILE).strip().splitlines()
        name, _, words = (lines[-1] if lines else "").partition(": ")
        kind = next((one for one in _ERRORS if one.__name__ == name), ShoalError)
        raise kind(_CANNOT.format(words or f"`shoal prepare` ended with {process.returncode} {name}".rstrip()))
