"""``shoal replay``: a peer's finished rounds computed again from what it kept, and compared with the run's.

Offline. A checkpoint's state and a round's committed bytes give the next state; the next round's plan, which the
coordinator has signed, says which digest that state had."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.peer.checkpoints.checkpoint import read_checkpoint, read_verdicts
from shoal.peer.checkpoints.encryption import open_source
from shoal.peer.checkpoints.manifest import VERDICTS_FILE, Manifest, read_manifest
from shoal.peer.checkpoints.source import CheckpointSource, FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoint_folders, round_of
from shoal.peer.folders import is_stage_folder
from shoal.peer.history.catch_up import RoundApplier, is_start_of, rounds_after, standing_rounds
from shoal.peer.history.round_records import RECORDS, RecordOwner, RoundRecords
from shoal.swarm.averaging.results import RoundMean
from shoal.swarm.errors import StateFileError, WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.verdict_chain import check_verdict

log = logging.getLogger(__name__)

_EQUAL = {True: Text("✓ equal", style="green"), False: Text("✗ differs", style="red"), None: Text("not known here")}


@dataclass(frozen=True)
class Replayed:
    """A round that was computed again.

    ``stage``: whose round it is, of a pipeline; ``expected``: the digest of the state after it in the run, None where
    it is not known here; ``vouched_by``: what names that digest."""

    stage: int | None
    round: int
    anchor_version: int
    digest: bytes
    expected: bytes | None
    vouched_by: str
    seconds: float

    @property
    def equal(self) -> bool | None:
        return None if self.expected is None else self.expected == self.digest

    def as_json(self) -> dict[str, Any]:
        return {
            **({} if self.stage is None else {"stage": self.stage}),
            "round": self.round,
            "anchor_version": self.anchor_version,
            "digest": self.digest.hex(),
            "expected": None if self.expected is None else self.expected.hex(),
            "vouched_by": self.vouched_by,
            "equal": self.equal,
            "seconds": round(self.seconds, 6),
        }


def replay(folder: Path, number: int | None = None, identity: Identity | None = None) -> Iterator[Replayed]:
    """Compute again every round from the oldest checkpoint on, or those from the newest checkpoint before round
    ``number`` to it.

    Of a pipeline's peer it does so for each stage that it has kept. ``identity`` opens sealed checkpoints.

    Raises ``StateFileError`` where something is missing or damaged, naming it, and, after yielding it, for a round that
    gives another state than the run had; of several stages only after all others."""
    refused: StateFileError | None = None
    for place in kept_folders(folder):
        try:
            yield from _replay(place, number, identity)
        except StateFileError as error:
            if refused is not None:
                log.warning("%s", error)
            refused = refused or error
    if refused is not None:
        raise refused


def _replay(place: Path, number: int | None, identity: Identity | None) -> Iterator[Replayed]:
    """The rounds whose records are in that folder."""
    sources = {one: open_source(FolderSource(one), identity) for one in checkpoint_folders(place / CHECKPOINTS)}
    checkpoints = _manifests(place / CHECKPOINTS, sources)
    about = next(iter(checkpoints.values()))
    owner = RecordOwner(bytes.fromhex(about.run_hash), bytes.fromhex(about.coordinator_key))
    records = RoundRecords(place / RECORDS, owner)
    verdicts = _verdicts(records, [(sources[one], its) for one, its in checkpoints.items()], owner)
    start, way = _way(checkpoints, verdicts, records, number)
    run = _run_file(about, start)
    applier = RoundApplier(run, about.layout)
    state = read_checkpoint(sources[start], owner.run_hash, with_own=False).state
    vouched = _vouched(verdicts, way, checkpoints.values())
    stage = about.stage.number if about.stage is not None else None
    for verdict in way:
        began_s = time.perf_counter()
        if not is_start_of(state, verdict):
            raise StateFileError(
                f"{records.path(verdict.round)}: was averaged on another state than the rounds before give"
            )
        if not records.path(verdict.round).exists():
            raise _missing(records, verdict.round)
        state = applier.apply(state, verdict, RoundMean(applier.recorded(records, verdict)))
        expected, by = vouched.get((verdict.round, state.version), (None, ""))
        took_s = time.perf_counter() - began_s
        done = Replayed(stage, verdict.round, state.version, state.digest, expected, by, took_s)
        yield done
        if done.equal is False:
            raise StateFileError(
                f"{place}: round {done.round}: its committed bytes give another state than the {by} says the run had; "
                "either this machine computes otherwise than the run's, or the checkpoint before it is not the run's"
            )
    later = [verdict.round for _, verdict in standing_rounds(verdicts.values()) if verdict.round > way[-1].round]
    if number is None and later:
        raise _missing(records, way[-1].round + 1, later[0])


def kept_folders(folder: Path) -> list[Path]:
    """Folders in which the one peer in or below ``folder`` keeps checkpoints and rounds: its own, or those of its
    stages.

    Raises ``StateFileError``."""
    found: list[Path] = []
    for above in ("", "*/", "*/*/", "*/*/*/"):  # no deeper than needed: a running peer may be writing there
        found = found or sorted(one.parent for one in folder.glob(above + CHECKPOINTS) if one.is_dir())
    peers = sorted({one.parent if is_stage_folder(one) else one for one in found})
    if len(peers) == 1:
        return found
    if peers:
        raise StateFileError(f"{folder}: holds what {len(peers)} peers kept; give one's folder, such as {peers[0]}")
    raise StateFileError(f"{folder}: no checkpoints here; give a run's folder, such as ~/.shoal/runs/RUN-HASH")


def table(rows: Sequence[Replayed]) -> Table:
    """The rounds as a table for people."""
    shown = Table(box=None, pad_edge=False)
    has_stages = any(row.stage is not None for row in rows)
    for name in (*(("stage",) if has_stages else ()), "round", "version", "state", "in the run", "by", "seconds"):
        shown.add_column(name, justify="right" if name in ("stage", "round", "version", "seconds") else "left")
    for row in rows:
        digest, equal = row.digest.hex()[:12], _EQUAL[row.equal]
        stage = (str(row.stage),) if has_stages else ()
        numbers = (*stage, str(row.round), str(row.anchor_version))
        shown.add_row(*numbers, digest, equal, row.vouched_by, f"{row.seconds:.3f}")
    return shown


def _manifests(folder: Path, sources: Mapping[Path, CheckpointSource]) -> dict[Path, Manifest]:
    """Manifests by folder, oldest round first: at least one, and all of one run."""
    found: dict[Path, Manifest] = {}
    for one, source in sources.items():
        run_hash = bytes.fromhex(next(iter(found.values())).run_hash) if found else None
        found[one] = read_manifest(source, run_hash)
    if not found:
        raise StateFileError(f"{folder}: no checkpoint here, and rounds can only be computed again from one")
    return found


def _way(
    checkpoints: dict[Path, Manifest], verdicts: dict[int, Verdict], records: RoundRecords, number: int | None
) -> tuple[Path, list[Verdict]]:
    """The checkpoint to begin with, and the rounds to replay from there, at least one. Raises ``StateFileError``."""
    ways = {
        one: rounds_after(verdicts.values(), about.anchor_version, bytes.fromhex(about.state_digest))
        for one, about in checkpoints.items()
        if number is None or about.round < number
    }
    if number is None:
        for one, way in ways.items():
            if way and records.path(way[0].round).exists():
                return one, way
        newest = max(about.round for about in checkpoints.values())
        raise StateFileError(
            f"{records.folder}: none of the rounds after those of the checkpoints (the newest is of "
            f"round {newest}) is kept here; they are while the run goes on"
        )
    for one, way in reversed(ways.items()):
        upto = [verdict for verdict in way if verdict.round <= number]
        if upto and upto[-1].round == number:
            return one, upto
    verdict = verdicts.get(number)
    if verdict is not None and not verdict.committed:
        raise StateFileError(f"round {number} was aborted ({verdict.reason}): there is nothing to compute again")
    if verdict is None or not ways:
        oldest = min(about.round for about in checkpoints.values())
        raise StateFileError(
            f"{records.path(number)}: round {number} cannot be computed again here: that needs its record and "
            f"a checkpoint from before it (the oldest is of round {oldest})"
        )
    if verdict.plan is None or verdict not in rounds_after(
        verdicts.values(), verdict.plan.anchor_version, verdict.plan.state_digest
    ):
        raise StateFileError(f"round {number} was undone: the run went back behind it")
    last = max((way[-1].round for way in ways.values() if way), default=max(map(round_of, ways)))
    raise _missing(records, last + 1, number)


def _run_file(about: Manifest, place: Path) -> RunFile:
    run = parse_run_file(about.run_toml, f"{place}: the run file")
    if run.hash.hex() != about.run_hash:
        raise StateFileError(
            f"{place}: field run_toml: has another hash in this release: install the one that wrote it"
        )
    return run


def _verdicts(
    records: RoundRecords, checkpoints: Iterable[tuple[CheckpointSource, Manifest]], owner: RecordOwner
) -> dict[int, Verdict]:
    """All verdicts that are here, by round, signatures checked."""
    found = {record.verdict.round: record.verdict for record in records.open_all()}
    for source, about in checkpoints:
        for verdict in read_verdicts(source, about):
            try:
                check_verdict(verdict, owner.coordinator_key)
            except WireError as error:
                raise StateFileError(f"{source.place(VERDICTS_FILE)}: {error}") from error
            found.setdefault(verdict.round, verdict)
    return found


def _missing(records: RoundRecords, first: int, stop: int | None = None) -> StateFileError:
    which = f"round {first}" if stop is None or stop == first + 1 else f"a round from {first} to {stop - 1}"
    return StateFileError(
        f"{records.path(first)}: the record of {which} is missing; copy it from the folder {RECORDS} of another member"
    )


def _vouched(
    verdicts: dict[int, Verdict], way: Sequence[Verdict], checkpoints: Iterable[Manifest]
) -> dict[tuple[int, int], tuple[bytes, str]]:
    """Digest of the state after a round, and what names it, by round and anchor version."""
    vouched = {
        (about.round, about.anchor_version): (bytes.fromhex(about.state_digest), f"checkpoint of {about.peer}")
        for about in checkpoints
    }
    for verdict in way:
        for later in sorted(one for one in verdicts if one > verdict.round):
            plan = verdicts[later].plan
            if plan is not None:  # the next plan names this state, even that of an aborted round
                if plan.anchor_version == verdict.anchor_version:
                    vouched[verdict.round, verdict.anchor_version] = (plan.state_digest, f"plan of round {later}")
                break
    return vouched
