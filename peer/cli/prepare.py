"""``[pins]`` of a run file: digests of model, data and first state that every member must have.

`shoal prepare` computes them by building the model and reading the data. `shoal host` runs it as a process, so that the
host itself holds no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import layered_recipe, load_recipe, package_of
from shoal.peer.recipes.model_memory import check_start_fits
from shoal.peer.recipes.packages import InstalledPackage
from shoal.peer.training.anchor import GrowingDigest
from shoal.peer.training.parameters import ParameterVector, frozen_parameters
from shoal.swarm import durable
from shoal.swarm.errors import RecipeError, RunFileError, StorageError
from shoal.swarm.protocol.pins import PinnedLayer, PinsSection, layout_digest
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file

_PIECE_ELEMENTS = 2**18
"""Values that are hashed at once."""

Say = Callable[[str], object]


# The pins -----------------------------------------------------------------------------------------------------


def pins_of(run: RunFile, say: Say, places: DataPlaces = NOWHERE) -> PinsSection:
    """Build the model and read the data, from ``places`` only, as a member would. ``say`` gets progress messages.

    Raises ``RecipeError``, ``CorpusError``, ``ModelMismatch``, and ``DeviceError`` for a model that does not fit."""
    if run.recipe.name == "own":
        raise RecipeError(
            "recipe.name: the members of this run bring their own training loop, and nothing can be prepared for them"
        )
    say("Preparing: opening the data …")
    recipe, package = load_recipe(run, places), package_of(run)
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
            **_package_fields(package),
        )
    check_start_fits(run, recipe)
    say("Preparing: building the model …")
    model = recipe.build_model(run.run.seed)
    vector = ParameterVector(model)
    say(f"Preparing: hashing {vector.elements:,} parameters …")
    frozen = frozen_parameters(model)
    state = None if run.start is not None else _first_state(vector, run.outer.slots).hex()
    return PinsSection(
        layout=layout_digest(vector.layout),
        elements=vector.elements,
        tokens_per_sample=tokens,
        samples=samples,
        corpus=corpus,
        frozen_elements=frozen.elements if frozen else None,
        frozen=frozen.digest.hex() if frozen else None,
        state=state,
        **_package_fields(package),
    )


def _package_fields(package: InstalledPackage | None) -> dict[str, Any]:
    if package is None:
        return {}
    return {
        "package": package.requirement,
        "package_digest": package.digest,
        "package_wheel": package.wheel,
    }


def _first_state(vector: ParameterVector, slots: int) -> bytes:
    """Digest of version 0: the model as built, and an outer optimizer that has taken no step. Copies no values."""
    digest = GrowingDigest(0, (1 + slots, vector.elements))
    for parameter in vector.parameters:
        values = parameter.detach().reshape(-1)
        for start in range(0, values.numel(), _PIECE_ELEMENTS):
            piece = values[start : start + _PIECE_ELEMENTS].float()
            digest.take(torch.cat([piece.unsqueeze(0), torch.zeros(slots, piece.numel())]))
    return digest.digest()


def with_pins(text: str, pins: PinsSection, where: str) -> tuple[str, RunFile]:
    """Add the section to a run file's text and validate it. Raises ``RunFileError``, also if there is one already."""
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


def prepare(run_path: Path, out: Path, say: Say, places: DataPlaces = NOWHERE) -> RunFile:
    """Write the run file with its ``[pins]`` to ``out``; ``places``: where its data may be. Blocks.

    Raises as ``pins_of`` and ``with_pins``, and ``StorageError``."""
    text, run = load_run_file(run_path)
    if run.pins is not None:
        raise RunFileError(f"{run_path}: has [pins] already: leave that section out to have it made anew")
    prepared, run = with_pins(text, pins_of(run, say, places), str(run_path))
    try:
        durable.put(out, prepared.encode())
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error}") from error
    return run
