"""``shoal export`` and ``shoal checkpoint``: a run's model for inference, and a pipeline's whole model as a checkpoint,
from what members saved or from the members of a running run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.peer.checkpoints.keeper import Subject
from shoal.peer.checkpoints.manifest import Manifest, StageAbout
from shoal.peer.checkpoints.writing import CheckpointWriter
from shoal.peer.history.sync import fetch_verdicts
from shoal.peer.offline.live_run import LiveRun, look_at
from shoal.peer.offline.model_file import ModelAbout, ModelFile
from shoal.peer.offline.model_file import read_model as read_model
from shoal.peer.offline.whole import WholeCheckpoint, write_whole
from shoal.peer.offline.whole_models import WholeModel, use_newest
from shoal.swarm.errors import StateFileError, UserError, WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import RunView, Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import are_all_stages
from shoal.swarm.transport.links import in_thread

_RECENT_VERDICTS = 64


# A model for inference ----------------------------------------------------------------------------------------


def export_model(source: Path, out: Path, identity: Identity | None = None) -> int:
    """Write the anchor of the newest checkpoint in ``source``, or of the newest of which all stages are there, sealed
    for ``identity`` or not; returns its version.

    Raises ``StateFileError`` or ``StorageError``; an existing ``out`` stays as it is then.
    """

    def export(model: WholeModel) -> int:
        about = model.stages[0].about
        layout = tuple(spec for stage in model.stages for spec in stage.about.layout)
        provenance = _provenance(model.version, about.run, about.run_hash)
        if not model.is_in_stages:
            provenance["state_digest"] = about.state_digest
        with ModelFile(out, ModelAbout(layout, about.recipe, provenance)) as file:
            for stage in model.stages:
                file.append(stage.load().anchor)
        return model.version

    return use_newest(source, identity, export)


async def export_from_run(invite: Invite, out: Path, *, rounded: bool = False) -> int:
    """Fetch the current anchor from the members of a running run and write it; returns its version. ``rounded``: fetch
    and write it in bfloat16, half the bytes. Of a pipeline one stage is in memory at a time.

    Raises ``RecipeError``, ``LinkError``, … as ``look_at`` and ``LiveRun.at_one_version``; an existing ``out`` stays as
    it is then."""
    async with look_at(invite) as live:
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


# A pipeline's whole model as a checkpoint -----------------------------------------------------------------------


def gather_checkpoint(source: Path, place: Path, identity: Identity) -> Manifest:
    """Put the newest version of which all stages are below ``source`` together in ``place``, sealed if the run says so.

    Raises ``UserError`` where that is a whole model already, ``StateFileError`` or ``StorageError``; nothing is left
    then."""

    def write(model: WholeModel) -> Manifest:
        if not model.is_in_stages:
            raise UserError(f"{model.places[0]}: is a checkpoint of a whole model already, the newest one there")
        about = model.stages[0].about
        run = parse_run_file(about.run_toml, f"{model.places[0]}: the run file")
        return write_whole(place, model.stages, CheckpointWriter(identity, run.checkpoints.sealed_for))

    return use_newest(source, identity, write)


async def gather_from_run(invite: Invite, place: Path, identity: Identity) -> Manifest:
    """The same of the present version of a running pipeline, fetched from its members, one stage at a time.

    Raises as ``export_from_run``, and ``UserError`` for a run without stages."""
    async with look_at(invite) as live:
        run = live.run_file
        if run.pipeline is None:
            raise UserError("this run has no stages to put together: its members' checkpoints are of the whole model")
        writer = CheckpointWriter(identity, run.checkpoints.sealed_for)

        async def write(views: Sequence[RunView]) -> Manifest:
            chains = await _chains(live, views)
            abouts = []
            for number, (share, view, chain) in enumerate(zip(live.shares, views, chains, strict=True)):
                stage = StageAbout(number=number, stages=len(chains))
                key, recipe = live.client.coordinator_key, live.recipe.config()
                slots = share.vectors - 1
                subject = Subject(run, live.client.run_toml, recipe, share.layout, slots, key, stage)
                assert view.state_digest is not None
                abouts.append(subject.about(view.anchor_version, view.state_digest, chain[-1]))
            with WholeCheckpoint(place, abouts, writer) as whole:
                for share, view, chain in zip(live.shares, views, chains, strict=True):
                    await in_thread(whole.append, await share.state(view), chain)
                return await in_thread(whole.finish)

        return await live.at_one_version(write)


async def _chains(live: LiveRun, views: Sequence[RunView]) -> list[tuple[Verdict, ...]]:
    """Of each stage, the newest part of its chain, up to the round that the views are of."""
    chains = []
    for share, view in zip(live.shares, views, strict=True):
        is_start = live.run_file.start is not None and view.anchor_version == 0
        if view.verdict is None or is_start:  # what a run starts from is a checkpoint already
            raise StateFileError("no round of the run has been committed yet; try again later")
        last = view.verdict.round
        found = await fetch_verdicts(share.client, max(0, last + 1 - _RECENT_VERDICTS))
        chains.append(tuple(one for one in found if one.round <= last))
    if not are_all_stages([chain[-1] for chain in chains]):
        raise WireError("the coordinator's verdicts on the stages of one round do not go together")
    return chains
