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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.peer.checkpoints.checkpoint import Checkpoint, CheckpointContents, pack_verdicts, read_checkpoint
from shoal.peer.checkpoints.encryption import ENVELOPE, open_source
from shoal.peer.checkpoints.manifest import MANIFEST, VERDICTS_FILE, CheckpointAbout, Manifest, read_manifest
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.state_files import StateFiles
from shoal.peer.checkpoints.writer import CheckpointWriter, Files
from shoal.swarm.durable import sync_folder
from shoal.swarm.errors import StateFileError, StorageError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import TensorSpec

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

    Methods block: call them in worker threads. They may run at the same time, but for what writes, which is for one
    thread at a time."""

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
        self.identity = identity
        self.sealed_for = sealed_for
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

    def load(self, kept: StoredCheckpoint, *, with_own: bool = True) -> Checkpoint:
        """Read and check a checkpoint, ``with_own`` the files of the peer's own state, too.

        Raises ``StateFileError`` for a damaged one, which is left as it is and not counted from now on."""
        try:
            with self.holding(kept):
                source = open_source(FolderSource(kept.folder), self.identity)
                return read_checkpoint(source, self._run_hash, with_own=with_own)
        except StateFileError:
            with self._lock:
                self._kept.pop(kept.round, None)
            raise

    def load_newest(
        self, version: int | None = None, digest: bytes | None = None, *, with_own: bool = True
    ) -> Checkpoint | None:
        """The newest undamaged checkpoint, of that anchor version and state digest if they are given; None without one.

        ``with_own``: as in ``load``. Damaged ones that are passed over are logged."""
        for kept in self.kept():
            if version in (None, kept.anchor_version) and digest in (None, kept.digest):
                try:
                    return self.load(kept, with_own=with_own)
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
        """Write a checkpoint, then remove superfluous ones. Raises ``StorageError`` as ``UnfinishedCheckpoint``."""
        about = contents.about
        same = self.stored_as(about)
        if same is not None:
            return same
        unfinished = self.begin(about.round)
        if contents.own is not None:
            unfinished.add(contents.own.files())
        unfinished.add_state(unfinished.state_files(contents.state.values, about.layout))
        return unfinished.finish(about, contents.verdicts)

    def begin(self, number: int) -> UnfinishedCheckpoint:
        """Begin a checkpoint of that round. Raises ``StorageError``."""
        return UnfinishedCheckpoint(self, number)

    def stored_as(self, about: CheckpointAbout) -> StoredCheckpoint | None:
        """The checkpoint that is here already of the same round and state; None where there is none."""
        with self._lock:
            kept = self._kept.get(about.round)
        is_same = kept is not None and (kept.chain.hex(), kept.digest.hex()) == (about.chain, about.state_digest)
        return kept if is_same else None

    def take(self, manifest: Manifest, hidden: Path, place: Path) -> StoredCheckpoint:
        """Give a complete checkpoint its name, and remove superfluous ones. Raises ``OSError``."""
        self._publish(hidden, place)
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

    def set_other_history_aside(self, number: int) -> None:
        """Rename checkpoints of this round or later ones: a round ends once, so they are of another history of the run.
        Raises ``OSError``."""
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


class UnfinishedCheckpoint:
    """A checkpoint that is being written, file by file, into a hidden folder of the store.

    It is a checkpoint once ``finish`` has returned. Methods block, and raise ``StorageError`` when the disk refuses, or
    when it was stopped: nothing of it is left then, and older ones are as they were."""

    def __init__(self, store: CheckpointStore, number: int) -> None:
        self._store = store
        self._place = store.folder / folder_name(number)
        self._hidden = store.folder / f"{WRITING}{number:08}-{secrets.token_hex(4)}"
        self.is_stopped = False
        with self._or_none():
            self._hidden.mkdir(parents=True)
            self._writer = CheckpointWriter(self._hidden, store.identity, store.sealed_for)

    def add(self, files: Files) -> None:
        """Write these files."""
        with self._or_none():
            self._writer.add((name, self._until_stopped(pieces)) for name, pieces in files)

    def state_files(self, values: Tensor, layout: Sequence[TensorSpec]) -> StateFiles:
        """The files of the state, (1 + slots, n) float32, for ``add_state``; a guard of it until they are written."""
        return self._writer.state_files(values, layout)

    def add_state(self, files: StateFiles) -> None:
        """Write the files of the state."""
        with self._or_none():
            self._writer.add_state(files)

    def finish(self, about: CheckpointAbout, verdicts: tuple[Verdict, ...]) -> StoredCheckpoint:
        """Complete the checkpoint, once everything was added, and remove superfluous ones."""
        with self._or_none():
            same = self._store.stored_as(about)
            if same is not None:
                self.discard()
                return same
            self._writer.add([(VERDICTS_FILE, [pack_verdicts(verdicts)])])
            self._store.set_other_history_aside(about.round)
            return self._store.take(self._writer.finish(about), self._hidden, self._place)

    def stop(self) -> None:
        """Have a call in another thread raise soon; for any thread."""
        self.is_stopped = True

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._hidden, ignore_errors=True)

    def _until_stopped(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in pieces:
            if self.is_stopped:
                raise StorageError(f"{self._place}: the checkpoint was stopped")
            yield piece

    @contextmanager
    def _or_none(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            self.discard()
            raise
        except OSError as error:
            self.discard()
            raise StorageError(
                f"{self._place}: the checkpoint cannot be written: {error}; older ones are as they were. Free some "
                "space, keep fewer with --keep-checkpoints, or give another folder with --state"
            ) from error


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
