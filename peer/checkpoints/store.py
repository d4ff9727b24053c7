"""Folder of a peer's checkpoints: atomic writes, retention, and search.

A checkpoint is written into a hidden folder, file by file, each flushed to the disk, the signed manifest last; then the
folder gets its name in one step. So each checkpoint is complete or not there. Hidden folders that exist when a process
starts were left by one that was killed."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.checkpoints.checkpoint import Checkpoint, CheckpointContents, read_checkpoint
from shoal.peer.checkpoints.encryption import ENVELOPE, open_source
from shoal.peer.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.writer import CheckpointWriter
from shoal.swarm.durable import sync_folder
from shoal.swarm.errors import StateFileError, StorageError
from shoal.swarm.protocol.identity import Identity

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
WRITING = ".new-"
"""Prefix of the names of folders that are not complete yet."""

_NAME = re.compile(r"round-([0-9]{8,19})")
_GOING = ".old-"
ASIDE = "other-"
"""Prefix of the name of a checkpoint that belongs to another history of the run."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint, as its manifest describes it; ``digest``: of its state."""

    round: int
    anchor_version: int
    digest: bytes
    chain: bytes
    folder: Path


class CheckpointStore:
    """Checkpoints of one run and one peer; opening the store removes what killed writers left.

    Methods block: call them in worker threads. They may run at the same time, but for ``write``, which is for one
    thread."""

    def __init__(
        self,
        folder: Path,
        run_hash: bytes,
        identity: Identity,
        retention: Retention,
        sealed_for: Iterable[bytes] | None = None,
    ) -> None:
        """``folder`` is made with the first checkpoint. ``sealed_for``: checkpoints are written sealed, for the
        identity and these raw Ed25519 public keys; both kinds are read."""
        self.folder = folder
        self._identity = identity
        self._sealed_for = sealed_for
        self._run_hash = run_hash
        self._retention = retention
        self._lock = threading.Lock()
        self._held: Counter[Path] = Counter()
        self._kept: dict[int, StoredCheckpoint] = {}
        self._tidy()
        for place in checkpoint_folders(folder):
            try:
                self._note(read_manifest(open_source(FolderSource(place), identity), run_hash), place)
            except StateFileError as error:
                log.warning("a checkpoint cannot be used, and is left as it is: %s", error)

    # Finding ------------------------------------------------------------------------------------------------

    def kept(self) -> tuple[StoredCheckpoint, ...]:
        """The checkpoints here, newest round first, without reading the disk."""
        with self._lock:
            return tuple(sorted(self._kept.values(), key=lambda one: -one.round))

    def oldest_of_newest(self) -> int | None:
        """The round of the oldest checkpoint that is kept as one of the newest; None where there is none."""
        kept = self.kept()[: self._retention.newest]
        return kept[-1].round if kept else None

    def load(self, kept: StoredCheckpoint) -> Checkpoint:
        """Read and check a checkpoint.

        Raises ``StateFileError`` for a damaged one, which is left as it is and not counted from now on."""
        try:
            with self.holding(kept):
                return read_checkpoint(open_source(FolderSource(kept.folder), self._identity), self._run_hash)
        except StateFileError:
            with self._lock:
                self._kept.pop(kept.round, None)
            raise

    def load_newest(self, version: int | None = None, digest: bytes | None = None) -> Checkpoint | None:
        """The newest undamaged checkpoint, of that anchor version and state digest if they are given; None without one.

        Damaged ones that are passed over are logged."""
        for kept in self.kept():
            if version in (None, kept.anchor_version) and digest in (None, kept.digest):
                try:
                    return self.load(kept)
                except StateFileError as error:
                    log.warning("a checkpoint cannot be used, an older one may do: %s", error)
        return None

    @contextmanager
    def holding(self, kept: StoredCheckpoint) -> Iterator[Path]:
        """The checkpoint's folder, which is not removed meanwhile. Raises ``StateFileError`` when it is gone
        already."""
        with self._lock:
            if kept.round not in self._kept:
                raise StateFileError(f"{kept.folder}: has been removed")
            self._held[kept.folder] += 1
        try:
            yield kept.folder
        finally:
            with self._lock:
                self._held[kept.folder] -= 1

    # Writing ------------------------------------------------------------------------------------------------

    def write(self, contents: CheckpointContents) -> StoredCheckpoint:
        """Write a checkpoint, then remove superfluous ones.

        Raises ``StorageError`` when the disk refuses: nothing of the new one is left then, and older ones are as they
        were."""
        about = contents.about
        place = self.folder / folder_name(about.round)
        same = self._kept.get(about.round)
        if same is not None and (same.chain.hex(), same.digest.hex()) == (about.chain, about.state_digest):
            return same
        hidden = self.folder / f"{WRITING}{about.round:08}-{secrets.token_hex(4)}"
        try:
            self._set_other_history_aside(about.round)
            hidden.mkdir(parents=True)
            writer = CheckpointWriter(hidden, self._identity, self._sealed_for)
            writer.add(contents.files())
            manifest = writer.finish(about)
            self._publish(hidden, place)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise StorageError(
                f"{place}: the checkpoint cannot be written: {error}; older ones are as they were. Free some space, "
                "keep fewer with --keep-checkpoints, or give another folder with --state"
            ) from error
        kept = self._note(manifest, place)
        self._retire()
        return kept

    def _publish(self, hidden: Path, place: Path) -> None:
        hidden.rename(place)
        sync_folder(self.folder)

    def _note(self, manifest: Manifest, place: Path) -> StoredCheckpoint:
        digests = bytes.fromhex(manifest.state_digest), bytes.fromhex(manifest.chain)
        kept = StoredCheckpoint(manifest.round, manifest.anchor_version, *digests, place)
        with self._lock:
            self._kept[kept.round] = kept
        return kept

    # Removing -----------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Remove superfluous checkpoints; one that is being read is left for the next time."""
        with self._lock:
            may_go = [self._kept[number] for number in self._retention.superfluous(self._kept)]
            going = [kept for kept in may_go if not self._held[kept.folder]]
            for kept in going:
                del self._kept[kept.round]
        for kept in going:
            try:
                self._remove(kept.folder)
            except OSError as error:
                log.warning("%s: an old checkpoint cannot be removed: %s", kept.folder, error)

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint, hidden first: half of a checkpoint must not have its name."""
        hidden = self.folder / f"{_GOING}{folder.name}-{secrets.token_hex(4)}"
        folder.rename(hidden)
        shutil.rmtree(hidden)

    def _set_other_history_aside(self, number: int) -> None:
        """Rename checkpoints of this round or later ones: a round ends once, so they are of another history of the
        run."""
        for place in checkpoint_folders(self.folder):
            if round_of(place) >= number:
                aside = self.folder / f"{ASIDE}{place.name}-{secrets.token_hex(4)}"
                place.rename(aside)
                with self._lock:
                    self._kept.pop(round_of(place), None)
                log.warning("%s: belongs to another history of this run, it seems; it is kept as %s", place, aside.name)

    def _tidy(self) -> None:
        for start in (WRITING, _GOING):
            for left in self.folder.glob(f"{start}*"):
                log.info("%s: left by a process that was killed; removed", left)
                with suppress(OSError):
                    shutil.rmtree(left)


def checkpoint_folders(folder: Path) -> list[Path]:
    """The folders in ``folder`` that are named as checkpoints, oldest round first."""
    return sorted((one for one in folder.glob("round-*") if round_in(one.name) is not None), key=round_of)


def folder_name(number: int) -> str:
    """Name of the folder of a checkpoint of that round."""
    return f"round-{number:08}"


def round_in(name: str) -> int | None:
    """The round in the name of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def round_of(place: Path) -> int:
    """The round of a checkpoint by its folder."""
    number = round_in(place.name)
    assert number is not None, "named by checkpoint_folders"
    return number


def checkpoints_in(folder: Path) -> list[Path]:
    """The folder itself, or all complete checkpoints below it, whatever they are called."""
    if any((folder / name).exists() for name in (MANIFEST, ENVELOPE)):
        return [folder]
    found = {path.parent for name in (MANIFEST, ENVELOPE) for path in folder.glob(f"**/{name}")}
    return sorted(place for place in found if not _is_hidden(place.relative_to(folder)))


def _is_hidden(place: Path) -> bool:
    """Whether it or a folder around it is being written or removed."""
    return any(part.startswith(".") for part in place.parts)


def is_aside(place: Path) -> bool:
    """Whether the checkpoint was set aside, as it belongs to another history than the others there."""
    return place.name.startswith(ASIDE)


def say_nothing_found(folder: Path) -> str:
    """Advice for a folder without any checkpoint."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder; peers keep their checkpoints in ~/.shoal/runs/RUN-HASH"
    return (
        f"{folder}: no checkpoint here; give a checkpoint's folder, a peer's, a run's (~/.shoal/runs/RUN-HASH), or one "
        "with folders of several peers in it"
    )
