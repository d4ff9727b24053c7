"""``shoal export`` and ``shoal checkpoint``: a run's model for others to load, or a pipeline's whole checkpoint.

Both are made from what members saved, or from the members of a live run. How a model is written: ``peer/exports/``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal.peer.checkpoints.checkpoint import MAX_VERDICTS
from shoal.peer.checkpoints.checkpointer import CheckpointSubject
from shoal.peer.checkpoints.manifest import Manifest, StageAbout
from shoal.peer.exports.about import Contributors, ExportOptions, ModelAbout, ModelFormat, ModelOrigin, ModelWriter
from shoal.peer.exports.gguf_file import GgufFile
from shoal.peer.exports.model_file import ModelFile
from shoal.peer.exports.model_folder import ModelFolder
from shoal.peer.history.history_sync import fetch_verdicts
from shoal.peer.offline.run_reader import LiveRun, observe_run
from shoal.peer.offline.whole_model import WholeCheckpoint, WholeModel, use_newest, write_whole
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import StateFileError, UserError, WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus, PeerToCoordinatorGetStatus
from shoal.swarm.protocol.rounds import RunView, Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import are_all_stages


def export_model(
    source: Path, out: Path, identity: Identity | None = None, options: ExportOptions | None = None
) -> ModelOrigin:
    """Write the anchor of the newest checkpoint in ``source``, or of the newest round with all stages; return its
    origin.

    ``identity`` opens sealed checkpoints. Raises ``StateFileError`` or ``StorageError``, and ``RecipeError`` or
    ``UserError`` for what the options ask in vain; an existing ``out`` stays then."""
    options = options or ExportOptions()

    def export(model: WholeModel) -> ModelOrigin:
        about = _about(model, options)
        with _writer(out, about, options) as file:
            for stage in model.stages:
                for piece in stage.anchor():
                    file.append(piece)
        return about.origin

    return use_newest(source, identity, export)


def _about(model: WholeModel, options: ExportOptions) -> ModelAbout:
    first = model.stages[0]
    run = parse_run_file(first.about.run_toml, f"{model.places[0]}: the run file")
    chain, tokens = bytes.fromhex(first.about.chain), first.about.tokens
    if model.is_in_stages:
        last = first.verdicts[-1]
        assert last.together is not None, "a stage's verdict"
        chain, tokens = last.together, last.tokens_total
    origin = ModelOrigin(
        run,
        model.version,
        model.round + 1,
        tokens,
        chain,
        None if model.is_in_stages else first.about.state_digest,
        Contributors.of(chain for stage in model.stages for chain in stage.history()) if options.contributors else None,
    )
    buffers = {name: one for stage in model.stages for name, one in stage.buffers().items()}
    owners = sorted({stage.kept_in[1].peer for stage in model.stages if stage.kept_in is not None})
    layout = tuple(spec for stage in model.stages for spec in stage.about.layout)
    return ModelAbout(layout, first.about.recipe, origin, buffers, f"peer {', '.join(owners)}")


def _writer(out: Path, about: ModelAbout, options: ExportOptions) -> ModelWriter:
    match options.format:
        case ModelFormat.safetensors:
            return ModelFile(out, about, options)
        case ModelFormat.hf:
            return ModelFolder(out, about, options)
        case ModelFormat.gguf:
            return GgufFile(out, about, options)


async def export_from_run(invite: Invite, out: Path, options: ExportOptions | None = None) -> ModelOrigin:
    """Fetch the current anchor from the members of a live run and write it; return its origin.

    In bfloat16 it is fetched so, too, in half the bytes. Of a pipeline one stage is in memory at a time. Raises the
    errors of ``observe_run``, ``LiveRun.at_one_version`` and ``export_model``; an existing ``out`` stays then."""
    options = options or ExportOptions()
    rounded = options.dtype is torch.bfloat16
    async with observe_run(invite) as live:

        async def export(views: Sequence[RunView]) -> ModelOrigin:
            about = await _live_about(live, views, options)
            with await in_thread(_writer, out, about, options) as file:
                for share, view in zip(live.shares, views, strict=True):
                    await in_thread(file.append, await share.anchor(view, rounded=rounded))
            return about.origin

        return await live.at_one_version(export)


async def _live_about(live: LiveRun, views: Sequence[RunView], options: ExportOptions) -> ModelAbout:
    view, digest = views[0], None
    if len(views) == 1 and view.state_digest is not None:
        digest = view.state_digest.hex()
    verdict = view.verdict
    status = await live.client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
    figures = [one for one in status.evaluation.figures if one.version <= view.anchor_version and one.loss is not None]
    held_out = figures[-1] if figures else None
    origin = ModelOrigin(live.run_file, view.anchor_version, state_digest=digest, held_out=held_out)
    if verdict is not None:
        found = [await fetch_verdicts(share.client, 0) for share in live.shares] if options.contributors else []
        chains = [[one for one in chain if one.round <= verdict.round] for chain in found]
        origin = replace(
            origin,
            rounds=verdict.round + 1,
            tokens=verdict.tokens_total,
            chain=verdict.together or verdict.chain,
            contributors=Contributors.of(chains) if options.contributors else None,
        )
    buffers = "this run's beginning: a member's checkpoint has trained ones"
    return ModelAbout(live.layout, live.recipe.config(), origin, live.buffers, buffers)


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
