"""A copy of the coordinator's folder in another place, made while it is written; it never stops the run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from shoal.swarm import durable
from shoal.swarm.coordinator.journal_files import JOURNAL, VERDICTS, JournalFiles
from shoal.swarm.coordinator.records import RecordFile, free_name
from shoal.swarm.errors import StorageError
from shoal.swarm.folder_lock import FolderLock

log = logging.getLogger(__name__)

_RETRY_S = 5.0
_PIECE_BYTES = 2**20


class Backup:
    """``begin`` with the journal that it is a backup of, then ``follow`` whenever that has grown.

    Whatever moment a machine dies at, its two files open like the journal's own: each is a prefix of the original, byte
    by byte. What cannot be written is a warning, and is caught up later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._others: dict[str, tuple[bytes, int]] = {}
        self._lock: FolderLock | None = None
        self._verdicts: _Copy | None = None
        self._journal: _Copy | None = None
        self._journal_of: RecordFile | None = None
        self._refused: StorageError | None = None
        self._behind = False
        self._retry_s = 0.0

    def keep(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """A small file that another machine needs beside the journal; written with the next record."""
        self._others[name] = data, mode

    def begin(self, files: JournalFiles) -> None:
        """Raises ``StorageError`` when the backup knows what the journal does not: then that is an outdated copy."""
        self._attempt(lambda: self._bring(files))
        if self._refused is not None:
            raise self._refused

    def follow(self, files: JournalFiles) -> None:
        """Bring it up to date. Never fails."""
        if self._refused is None and not (self._behind and time.monotonic() < self._retry_s):
            self._attempt(lambda: self._bring(files))

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._let_go()
            self._behind, self._retry_s = True, time.monotonic() + _RETRY_S
            log.warning(
                "THE BACKUP IN %s CANNOT BE WRITTEN and does not grow: %s. The run goes on without; the next try is in "
                "%.0f s or later. Until it succeeds, what happens is lost with this machine",
                self.folder,
                error,
                _RETRY_S,
            )
        except StorageError as error:
            self._let_go()
            self._refused = error
            log.error("no more backups are made: %s", error)
        else:
            if self._behind:
                log.warning("the backup in %s is complete again", self.folder)
            self._behind = False

    def _bring(self, files: JournalFiles) -> None:
        if self._lock is None:
            self._lock = FolderLock(self.folder)
            self._survey(files)
        while self._others:
            name, (data, mode) = next(iter(self._others.items()))
            durable.put(self.folder / name, data, mode)
            del self._others[name]
        if self._journal is not None and self._journal_of is files.journal:
            assert self._verdicts is not None
            self._verdicts.grow(files.archive)
            self._journal.grow(files.journal)
            return
        # A journal of its own, or one that was compacted: its verdicts have to be there first.
        journal, verdicts = self.folder / (JOURNAL + ".new"), self.folder / (VERDICTS + ".new")
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._journal = _Copy(journal, None)
        self._journal.grow(files.journal)
        if self._verdicts is None:
            self._verdicts = _Copy(verdicts, None)
            self._verdicts.grow(files.archive)
            durable.replace(verdicts, self.folder / VERDICTS)
        else:
            self._verdicts.grow(files.archive)
        durable.replace(journal, self.folder / JOURNAL)
        self._journal_of = files.journal

    # What is there already --------------------------------------------------------------------------------

    def _survey(self, files: JournalFiles) -> None:
        """How much of the journal is there. Raises ``StorageError`` when there is something else."""
        theirs = self._read()
        if theirs is None:
            return
        try:
            if theirs.run_hash != files.run_hash:
                raise StorageError(f"{self.folder} is the backup of another run: give --backup another folder")
            if not _continues(files, theirs):
                raise StorageError(
                    f"{self.folder}: this backup, in round {theirs.rounds}, knows what {files.folder}, in round "
                    f"{files.rounds}, does not: that is an outdated copy. To go on from the backup, give its folder as "
                    "--state; to go on from here all the same, give --backup another one"
                )
            if theirs.archive.check == files.archive.check_after(len(theirs.archive.offsets)):
                self._verdicts = _Copy(theirs.archive.path, theirs.archive.size_bytes)
            if theirs.journal.check_after(0) == files.journal.check_after(0):
                self._journal = _Copy(theirs.journal.path, theirs.journal.size_bytes)
                self._journal_of = files.journal
        finally:
            theirs.close()

    def _read(self) -> JournalFiles | None:
        paths = [self.folder / JOURNAL, self.folder / VERDICTS]
        try:
            return JournalFiles(self.folder) if paths[0].exists() else None
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from error
            log.warning("%s: this backup is damaged (%s): it is moved aside and made anew", self.folder, error)
            for path in paths:
                if path.exists():
                    durable.replace(path, free_name(path))
            return None

    def _let_go(self) -> None:
        for copy in (self._journal, self._verdicts):
            if copy is not None:
                copy.close()
        self._journal = self._verdicts = self._journal_of = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def close(self) -> None:
        self._let_go()


class _Copy:
    """A file that is a prefix of a record file. All methods raise ``OSError``."""

    def __init__(self, path: Path, size_bytes: int | None) -> None:
        """``size_bytes``: so many of what is there are right; None makes it anew."""
        if size_bytes is None:
            path.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size_bytes = size_bytes or 0
        if os.fstat(self._descriptor).st_size != self._size_bytes:
            durable.cut(self._descriptor, self._size_bytes)

    def grow(self, source: RecordFile) -> None:
        while self._size_bytes < source.size_bytes:
            stop = min(source.size_bytes, self._size_bytes + _PIECE_BYTES)
            durable.append(self._descriptor, source.bytes_between(self._size_bytes, stop))
            self._size_bytes = stop

    def close(self) -> None:
        os.close(self._descriptor)


def _continues(ours: JournalFiles, theirs: JournalFiles) -> bool:
    """Whether what they know is the beginning of what we know."""
    if theirs.transactions > ours.transactions or theirs.rounds > ours.rounds:
        return False
    here = ours.check_at(theirs.transactions)
    if here is not None:
        return here == theirs.check_at(theirs.transactions)
    last = theirs.rounds - 1  # so old that our journal has been compacted since: their newest verdict tells
    return last < 0 or theirs.verdicts(last, 1) == ours.verdicts(last, 1)
