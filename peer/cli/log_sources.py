"""Where a run's history can be read: from a live run, a host's folder, a member's folder, or a checkpoint."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.peer.checkpoints.checkpoint import read_verdicts
from shoal.peer.checkpoints.manifest import MANIFEST, read_manifest
from shoal.peer.checkpoints.sealed_folder import ENVELOPE, opened
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.cli.hosting import ORIGIN_FILE
from shoal.peer.history.chain import Kept, Origin, unpack_history
from shoal.peer.history.file import HISTORY_FILE
from shoal.peer.member.memberships import scope_of
from shoal.peer.regular_file import read_regular
from shoal.peer.terminal.views import stopped_lines
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.client.observer import observe, observe_stages
from shoal.swarm.coordinator.journal import JOURNAL, JournalFiles
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
    Verdict,
)
from shoal.swarm.protocol.run_file import parse_run_file

_EXPECTED = (
    "give an invite, a host's folder (~/.shoal/host/RUN), a member's folder (~/.shoal/runs/RUN-HASH), a checkpoint, "
    f"or a {HISTORY_FILE}"
)


@dataclass(frozen=True)
class Log:
    """A run's verdicts as they were found, none of them checked. ``whole``: whether they must begin with the first
    round. ``damage``: why there are no more, empty at a proper end; ``note``: what else there is to say."""

    run: str
    run_hash: bytes
    coordinator_key: bytes
    verdicts: tuple[Verdict, ...]
    scope: int = 0
    whole: bool = True
    damage: str = ""
    note: str = ""


def open_log(source: str, identity: Identity | None = None) -> Log:
    """``identity`` opens sealed checkpoints.

    Raises ``StateFileError`` where there is no history, ``StorageError``, or the errors of a join."""
    if source.startswith("shoal://"):
        return asyncio.run(_from_run(Invite.parse(source)))
    path = Path(source)
    if path.is_file():
        return _of_file(path)
    if any((path / name).exists() for name in (MANIFEST, ENVELOPE)):
        return _of_checkpoint(path, identity)
    if (path / JOURNAL).exists():
        return _of_host(path)
    found = sorted(path.glob(f"**/{HISTORY_FILE}"))
    if not found:
        raise StateFileError(f"{path}: no history of a run here; {_EXPECTED}")
    # Of several members of one run, who knows most; of a pipeline's stages the last one.
    return max((_of_file(one) for one in found), key=lambda log: (len(log.verdicts), log.scope))


async def _from_run(invite: Invite) -> Log:
    """Of a pipeline the last stage's history: it has the loss, and rounds are the same in all. With those who could not
    go on: rounds do not say why there are no more."""
    async with observe(invite) as client:
        pipeline = client.view.pipeline
        async with observe_stages(client, len(pipeline.boundaries) - 1 if pipeline else 0) as stages:
            log = await _fetched([client, *stages][-1])
            status = await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
            return replace(log, note="\n".join(stopped_lines(status.members)))


async def _fetched(client: CoordinatorClient) -> Log:
    verdicts: list[Verdict] = []
    while True:
        page = await client.ask(PeerToCoordinatorGetVerdicts(first=len(verdicts)), CoordinatorToPeerVerdicts)
        verdicts += page.verdicts
        if not page.more or not page.verdicts:
            run = client.run_file
            return Log(run.run.name, run.hash, client.coordinator.identity_key, tuple(verdicts), client.scope)


def _of_file(path: Path) -> Log:
    kept = _unpack(path)
    damage = note = ""
    if kept.damage is not None and kept.damage.is_end:
        note = f"{path}: {kept.damage.reason}: it is being written, or was cut off"
    elif kept.damage is not None:
        damage = f"{path}: damaged at offset {kept.damage.offset}, after {len(kept.verdicts)} rounds"
    return _log(kept.origin, kept.verdicts, damage, note)


def _of_host(folder: Path) -> Log:
    origin = _unpack(folder / ORIGIN_FILE).origin
    scope = 0
    with closing(JournalFiles(folder, live=True)) as journal:
        if parse_run_file(origin.run_toml).pipeline is not None:
            while journal.verdicts(0, 1, scope + 1):
                scope += 1
        verdicts = tuple(fact.verdict for fact in journal.verdicts(scope=scope or None))
    return _log(origin.model_copy(update={"scope": scope}), verdicts)


def _of_checkpoint(folder: Path, identity: Identity | None) -> Log:
    source = opened(FolderSource(folder), identity)
    manifest = read_manifest(source)
    # Of a whole model that stages made, the last one's: it is the one that knows the loss.
    number = len(manifest.verdicts_files) - 1
    verdicts = read_verdicts(source, manifest, number)
    stage = manifest.stage.number if manifest.stage is not None else None if manifest.parts is None else number
    whole = bool(verdicts) and verdicts[0].round == 0
    note = "" if whole else f"{folder}: holds only the end of the chain; its beginning is in the members' histories"
    key, scope = bytes.fromhex(manifest.coordinator_key), 0 if stage is None else scope_of(stage)
    return Log(manifest.run, bytes.fromhex(manifest.run_hash), key, verdicts, scope, whole=whole, note=note)


def _log(origin: Origin, verdicts: tuple[Verdict, ...], damage: str = "", note: str = "") -> Log:
    key = origin.coordinator.identity_key
    return Log(origin.run, origin.run_hash, key, verdicts, origin.scope, damage=damage, note=note)


def _unpack(path: Path) -> Kept:
    try:
        data = read_regular(path)
    except OSError as error:
        raise StateFileError(f"{path}: cannot be read: {error}; {_EXPECTED}") from error
    return unpack_history(data, str(path))
