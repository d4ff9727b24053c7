"""Upload of a peer's checkpoints to a URL in the background: files first, the one that lists them last.

A ledger on this machine notes what has been uploaded where; a file counts as uploaded only once it is noted there. So
an interrupted upload resumes with the next file."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from shoal.peer.checkpoints.manifest import FileEntry
from shoal.peer.checkpoints.remote.copies import LAST_FILES, CopyListing, entry_of, read_listing
from shoal.peer.checkpoints.remote.store import DaemonThreads, RemoteStore
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CheckpointStore, StoredCheckpoint, round_in
from shoal.peer.regular_file import read_regular
from shoal.swarm import durable
from shoal.swarm.errors import RemoteStorageError, StateFileError

log = logging.getLogger(__name__)

_NOTES = TypeAdapter(dict[str, dict[str, dict[str, FileEntry]]])

LEDGER = "copies.json"

FINISH_S = 60.0
"""Seconds that an upload has at a graceful end."""

_LOOK_S = 2.0
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 600.0
T = TypeVar("T")


class UploadLedger:
    """Ledger of one peer's uploads to one place. If it is damaged or lost, files are sent again."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self._notes: dict[str, dict[str, dict[str, FileEntry]]] = {}
        try:
            self._notes = _NOTES.validate_json(read_regular(path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s: cannot be read, so files are uploaded again: %s", path, type(error).__name__)
        self._here = self._notes.setdefault(place, {})

    def folders(self) -> frozenset[str]:
        """Checkpoints that may have files there."""
        return frozenset(self._here)

    def entry(self, folder: str, name: str) -> FileEntry | None:
        """Bytes and SHA-256 of the file as it was uploaded; None for a file that was not."""
        return self._here.get(folder, {}).get(name)

    def open_folder(self, folder: str) -> None:
        """Note that the checkpoint may have files there from now on."""
        if folder not in self._here:
            self._here[folder] = {}
            self._write()

    def note(self, folder: str, name: str, entry: FileEntry) -> None:
        """Note that a file has been uploaded."""
        self._here.setdefault(folder, {})[name] = entry
        self._write()

    def forget(self, folder: str) -> None:
        """Note that the checkpoint has been removed there."""
        if self._here.pop(folder, None) is not None:
            self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_whole(temporary, json.dumps(self._notes, sort_keys=True).encode())
            durable.replace(temporary, self._path)
        except OSError as error:
            log.debug("%s: cannot be written: %s", self._path, error)


@dataclass(frozen=True)
class CopyDestination:
    """Destination of copies of checkpoints; a new one is made once ``every`` rounds have ended since the last.

    ``retention``: of the copies there."""

    remote: RemoteStore
    every: int = 1
    retention: Retention = field(default_factory=Retention)


def next_copy(
    here: Collection[int], begun: Collection[int], done: Collection[int], every: int, *, in_step: bool = False
) -> int | None:
    """The round whose checkpoint is copied next; None for none.

    ``here``: rounds with a checkpoint here; ``begun``: rounds of which files have been copied; ``done``: rounds that
    have been copied completely. Unfinished copies are finished first, oldest first; after that only the newest
    checkpoint counts.

    ``in_step``: peers of other stages have to copy the same rounds, at unknown speeds. Then multiples of ``every`` are
    due, and of the new checkpoints the one whose round is a multiple of the largest power of two."""
    half = [number for number in here if number in begun and number not in done]
    if half:
        return min(half)
    newest, last = max(here, default=None), max(done, default=None)
    if newest is None or newest in done:
        return None
    if last is not None:
        due = (last // every + 1) * every if in_step else last + every
        if last <= newest < due:
            return None
    fresh = [number for number in here if last is None or number > last] or [newest]
    return max(fresh, key=lambda number: (number % every == 0, number & -number, number)) if in_step else newest


def superfluous_in_step(rounds: Collection[int], retention: Retention, every: int) -> list[int]:
    """Rounds of a stage's copies that may be removed, oldest first.

    Multiples of ``every``, which other stages have, too, are not displaced by the copies that a peer makes whenever it
    leaves its stage."""
    shared = set(retention.superfluous([number for number in rounds if number % every == 0]))
    return [number for number in retention.superfluous(rounds) if number % every or number in shared]


class CheckpointUploader:
    """Copies a store's checkpoints to a URL: ``run`` it on the event loop until ``finish``; the driver has threads of
    its own."""

    def __init__(self, store: CheckpointStore, to: CopyDestination, base: str, *, in_step: bool = False) -> None:
        """``base``: the folder of this run and peer, and stage, at the URL; ``in_step``: as for ``next_copy``. The
        ledger is beside the checkpoints."""
        self._store = store
        self._in_step = in_step
        self._remote = to.remote
        self._every = self._apart = to.every
        self._retention = to.retention
        self._base = base
        self._ledger = UploadLedger(store.folder.parent / LEDGER, to.remote.shown(base))
        self._unusable: set[str] = set()
        self._threads = DaemonThreads()
        self._stop = asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        self._failures = 0
        self._is_pace_told = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CheckpointUploader]:
        """Run in the background of the context, and finish at its end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run())
            try:
                yield self
            finally:
                self.finish()

    async def run(self) -> None:
        """Copy the checkpoints that are here and that come; errors are logged once and retried after growing pauses.

        Returns after ``finish``: when everything is copied, or after ``FINISH_S``."""
        try:
            async with asyncio.timeout(None) as self._limit:
                while not (await self._step() and self._stop.is_set()):
                    await self._pause(self._pause_s())
        except TimeoutError:
            log.warning("the last copy to %s is unfinished; it resumes when this peer joins again", self._remote.url)
        finally:
            self._limit = None

    def finish(self) -> None:
        """Copy the newest checkpoint, too, then end; on the event loop of ``run``."""
        self._stop.set()
        self._every = 1
        self._failures = min(self._failures, 1)
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + FINISH_S)

    async def _step(self) -> bool:
        """Copy one checkpoint if one is due; return whether nothing was due."""
        kept = self._due()
        if kept is None:
            return True
        newest = self._newest()
        try:
            await self._copy(kept)
            self._tell_pace(self._newest() - newest)
            await self._tidy()
        except (StateFileError, OSError) as error:  # removed meanwhile, or damaged
            log.warning("the checkpoint of round %d is not copied: %s", kept.round, error)
            self._unusable.add(kept.folder.name)
        except RemoteStorageError as error:
            level = logging.DEBUG if self._failures else logging.WARNING
            log.log(level, "copying failed, and is tried again later: %s", error)
            self._failures += 1
        else:
            if self._failures:
                log.warning("copies to %s succeed again", self._remote.url)
            self._failures = 0
            log.info("checkpoint of round %d copied to %s", kept.round, self._remote.shown(self._base))
        return False

    def _newest(self) -> int:
        return max((kept.round for kept in self._store.kept()), default=0)

    def _tell_pace(self, rounds: int) -> None:
        """Warn when a copy has taken more rounds than there are between copies: other stages copy other rounds then."""
        if self._in_step and rounds > self._every and not (self._stop.is_set() or self._is_pace_told):
            self._is_pace_told = True
            log.warning(
                "a copy to %s takes %d rounds: stages may have no copies of one round, and could not be restored "
                "together; all peers should copy every %d rounds or less often (--copy-every)",
                self._remote.url,
                rounds,
                rounds,
            )

    def _pause_s(self) -> float:
        if self._failures:
            return min(_FIRST_PAUSE_S * 2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
        return 0.0 if self._due() else _LOOK_S

    async def _pause(self, seconds: float) -> None:
        """Sleep; ends early when it is time to finish."""
        if self._stop.is_set():
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _due(self) -> StoredCheckpoint | None:
        here = {kept.round: kept for kept in self._store.kept() if kept.folder.name not in self._unusable}
        begun = {number: name for name in self._ledger.folders() if (number := round_in(name)) is not None}
        done = [number for number, name in begun.items() if any(self._ledger.entry(name, last) for last in LAST_FILES)]
        number = next_copy(here, begun, done, self._every, in_step=self._in_step)
        return None if number is None else here[number]

    async def _copy(self, kept: StoredCheckpoint) -> None:
        """Raises ``RemoteStorageError``, and ``StateFileError`` where the checkpoint cannot be read (any more)."""
        with self._store.holding(kept) as folder:
            listing = await self._in_thread(read_listing, FolderSource(folder))
            there = await self._in_thread(self._remote.sizes, f"{self._base}/{folder.name}")
            await self._in_thread(self._ledger.open_folder, folder.name)
            for name in listing.to_copy():
                size_bytes, _ = entry = listing.files[name]
                if there.get(name) != size_bytes or self._ledger.entry(folder.name, name) != entry:
                    await self._in_thread(self._send, kept, listing, name)

    def _send(self, kept: StoredCheckpoint, listing: CopyListing, name: str) -> None:
        """Check and upload one file; in a worker thread."""
        path, entry = kept.folder / name, listing.files[name]
        if entry_of(path) != entry:
            raise StateFileError(f"{path}: SHA-256: expected {entry[1]}: it is damaged")
        self._remote.put(path, f"{self._base}/{kept.folder.name}/{name}")
        self._ledger.note(kept.folder.name, name, entry)

    async def _tidy(self) -> None:
        """Remove superfluous copies, and unfinished ones of checkpoints that are not on this machine any more."""
        names = await self._in_thread(self._remote.folders, self._base)
        here = {kept.folder.name for kept in self._store.kept()}
        whole: dict[int, tuple[str, str]] = {}
        for name in names:
            number = round_in(name)
            if number is None:
                continue
            last = await self._in_thread(self._last_file, name)
            if last is not None:
                whole[number] = name, last
            elif name not in here:
                await self._remove(name)
        for number in superfluous_in_step(whole, self._retention, self._apart if self._in_step else 1):
            name, last = whole[number]
            # The last file first: a copy that is being removed must not look complete.
            await self._in_thread(self._remote.remove, f"{self._base}/{name}/{last}")
            await self._remove(name)

    def _last_file(self, folder: str) -> str | None:
        there = self._remote.sizes(f"{self._base}/{folder}")
        return next((name for name in LAST_FILES if name in there), None)

    async def _remove(self, folder: str) -> None:
        await self._in_thread(self._remote.remove, f"{self._base}/{folder}")
        await self._in_thread(self._ledger.forget, folder)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
