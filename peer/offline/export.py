"""``shoal export`` and ``shoal checkpoint``: a run's model for inference, or a pipeline's whole checkpoint.

Both are made from what members saved, or from the members of a live run. A model for inference is a safetensors file by
parameter name, with the recipe's config beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.peer.checkpoints.checkpoint import MAX_VERDICTS
from shoal.peer.checkpoints.checkpointer import CheckpointSubject
from shoal.peer.checkpoints.manifest import Manifest, StageAbout
from shoal.peer.checkpoints.tensors import file_header
from shoal.peer.history.history_sync import fetch_verdicts
from shoal.peer.offline.run_reader import LiveRun, observe_run
from shoal.peer.offline.whole_model import WholeCheckpoint, WholeModel, use_newest, write_whole
from shoal.peer.recipes import load_model
from shoal.peer.regular_file import check_memory, open_regular, read_regular
from shoal.peer.training.anchor import bytes_of
from shoal.peer.training.parameters import plain_name
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import RecipeError, StateFileError, StorageError, UserError, WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.rounds import RunView, Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.verdict_chain import are_all_stages

_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class ModelAbout:
    """``layout``: all parameters in their order; ``provenance``: the run and state that they come from, as texts."""

    layout: tuple[TensorSpec, ...]
    recipe: dict[str, Any] | None
    provenance: Mapping[str, str]
    dtype: torch.dtype = torch.float32


class ModelFile:
    """Writer of ``path``, and of the recipe's config beside it with suffix ``.json``; both appear when the context
    ends.

    Values are appended piece by piece, so that only one piece has to be in memory. Existing files stay if it fails.
    Methods block, and raise ``StorageError``."""

    def __init__(self, path: Path, about: ModelAbout) -> None:
        self._path = path
        self._about = about
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._temporary_config = path.with_name(f".{path.stem}.json.{os.getpid()}")
        self._elements = 0
        self._file: BinaryIO

    def append(self, vector: Tensor) -> None:
        """Write the next values, (k,), of the parameters one after the other."""
        self._elements += vector.numel()
        try:
            self._file.write(bytes_of(vector.to(self._about.dtype).contiguous()))
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
            named = [(spec.name, spec.shape) for spec in self._about.layout]
            self._file.write(file_header(named, self._about.dtype, self._about.provenance))
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            raise self._refusal(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            if error is None:
                assert self._elements == sum(spec.elements for spec in self._about.layout), "all parameters"
                text = json.dumps({"recipe": self._about.recipe, **self._about.provenance}, indent=2) + "\n"
                self._temporary_config.write_text(text)
                self._temporary_config.replace(self._path.with_suffix(".json"))
                self._temporary.replace(self._path)
        except OSError as refused:
            raise self._refusal(refused) from refused
        finally:
            self._temporary.unlink(missing_ok=True)
            self._temporary_config.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path}: the model cannot be written: {error}")


def read_model(path: Path) -> nn.Module:
    """Rebuild an exported model by its recipe. Raises ``StateFileError`` or ``RecipeError``."""
    config = path.with_suffix(".json")
    try:
        recipe = json.loads(read_regular(config, _MAX_CONFIG_BYTES))["recipe"]
        with open_regular(path) as file:
            check_memory(os.fstat(file.fileno()).st_size)
        tensors = load_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateFileError(f"{path}: not an exported model with its {config.name}: {error}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{config}: this model was trained by a loop without a recipe; load it in that loop")
    model = load_model(recipe)
    names = {plain_name(name): name for name in model.state_dict()}
    try:
        model.load_state_dict({names.get(name, name): one for name, one in tensors.items()})
    except RuntimeError as error:
        raise StateFileError(f"{path}: does not fit the model of {config}: {error}") from error
    return model


def export_model(source: Path, out: Path, identity: Identity | None = None) -> int:
    """Write the anchor of the newest checkpoint in ``source``, or of the newest round with all stages; return its
    version.

    ``identity`` opens sealed checkpoints. Raises ``StateFileError`` or ``StorageError``; an existing ``out`` stays
    then."""

    def export(model: WholeModel) -> int:
        about = model.stages[0].about
        layout = tuple(spec for stage in model.stages for spec in stage.about.layout)
        provenance = _provenance(model.version, about.run, about.run_hash)
        if not model.is_in_stages:
            provenance["state_digest"] = about.state_digest
        with ModelFile(out, ModelAbout(layout, about.recipe, provenance)) as file:
            for stage in model.stages:
                for piece in stage.anchor():
                    file.append(piece)
        return model.version

    return use_newest(source, identity, export)


async def export_from_run(invite: Invite, out: Path, *, rounded: bool = False) -> int:
    """Fetch the current anchor from the members of a live run and write it; return its version.

    ``rounded``: fetch and write it in bfloat16, half the bytes. Of a pipeline one stage is in memory at a time. Raises
    the errors of ``observe_run`` and ``LiveRun.at_one_version``; an existing ``out`` stays then."""
    async with observe_run(invite) as live:
        run, dtype = live.run_file, torch.bfloat16 if rounded else torch.float32

        async def export(views: Sequence[RunView]) -> int:
            version = views[0].anchor_version
            provenance = _provenance(version, run.run.name, run.hash.hex())
            if len(views) == 1 and views[0].state_digest is not None:
                provenance["state_digest"] = views[0].state_digest.hex()
            with ModelFile(out, ModelAbout(live.layout, live.recipe.config(), provenance, dtype)) as file:
                for share, view in zip(live.shares, views, strict=True):
                    await in_thread(file.append, await share.anchor(view, rounded=rounded))
            return version

        return await live.at_one_version(export)


def _provenance(version: int, run: str, run_hash: str) -> dict[str, str]:
    return {"run": run, "run_hash": run_hash, "anchor_version": str(version)}


def gather_checkpoint(source: Path, place: Path, identity: Identity) -> Manifest:
    """Join the stages below ``source`` at the newest version that all have, in ``place``, sealed if the run says so.

    Raises ``UserError`` where the newest there is a whole model already, ``StateFileError`` or ``StorageError``;
    nothing is left then."""

    def write(model: WholeModel) -> Manifest:
        if not model.is_in_stages:
            raise UserError(f"{model.places[0]}: is a checkpoint of a whole model already, the newest one there")
        about = model.stages[0].about
        run = parse_run_file(about.run_toml, f"{model.places[0]}: the run file")
        return write_whole(place, model.stages, identity, run.checkpoints.sealed_for)

    return use_newest(source, identity, write)


async def gather_from_run(invite: Invite, place: Path, identity: Identity) -> Manifest:
    """Fetch the current state of a live pipeline, one stage at a time, and write it as one checkpoint.

    Raises as ``export_from_run``, and ``UserError`` for a run without stages."""
    async with observe_run(invite) as live:
        run = live.run_file
        if run.pipeline is None:
            raise UserError("this run has no stages to join: its members' checkpoints are of the whole model")

        async def write(views: Sequence[RunView]) -> Manifest:
            chains = await _chains(live, views)
            abouts = []
            for number, (share, view, chain) in enumerate(zip(live.shares, views, chains, strict=True)):
                stage = StageAbout(number=number, stages=len(chains))
                key, recipe = live.client.coordinator_key, live.recipe.config()
                slots = share.vectors - 1
                subject = CheckpointSubject(run, live.client.run_toml, recipe, share.layout, slots, key, stage)
                assert view.state_digest is not None
                abouts.append(subject.about(view.anchor_version, view.state_digest, chain[-1]))
            with WholeCheckpoint(place, abouts, identity, run.checkpoints.sealed_for) as whole:
                for share, view, chain in zip(live.shares, views, chains, strict=True):
                    await in_thread(whole.append, await share.state(view), chain)
                return await in_thread(whole.finish)

        return await live.at_one_version(write)


async def _chains(live: LiveRun, views: Sequence[RunView]) -> list[tuple[Verdict, ...]]:
    """The newest verdicts of each stage, up to the round of the views."""
    chains = []
    for share, view in zip(live.shares, views, strict=True):
        is_start = live.run_file.start is not None and view.anchor_version == 0
        if view.verdict is None or is_start:  # the run's start is a checkpoint already
            raise StateFileError("no round of the run has been committed yet; try again later")
        last = view.verdict.round
        found = await fetch_verdicts(share.client, max(0, last + 1 - MAX_VERDICTS))
        chains.append(tuple(one for one in found if one.round <= last))
    if not are_all_stages([chain[-1] for chain in chains]):
        raise WireError("the coordinator's verdicts on the stages of one round do not go together")
    return chains
