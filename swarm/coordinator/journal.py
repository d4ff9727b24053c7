"""The coordinator's journal: events on disk before anybody hears of them, in two files of checked records."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgpack
from filelock import FileLock

from shoal.swarm import durable
from shoal.swarm.coordinator.events import (
    InScope,
    JournalEvent,
    PipelineSnapshot,
    RunSnapshot,
    VerdictGiven,
    pack_event,
    unpack_event,
    verdicts_in,
)
from shoal.swarm.coordinator.record_log import NO_CHECK, RESTORE, RecordFile, free_name, pack_file
from shoal.swarm.errors import RunFileError, StorageError
from shoal.swarm.protocol.messages import CoordinatorToPeerVerdicts
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import MAX_VERDICTS
from shoal.swarm.protocol.verdict_chain import pack_verdict

log = logging.getLogger(__name__)


# Reading ----------------------------------------------------------------------------------------------------

JOURNAL, VERDICTS = "journal.records", "verdicts.records"
EVENTS, VERDICT, SNAPSHOT = 1, 2, 3
"""Kinds of records: a transaction, one with a round's verdicts, and the snapshot that a compacted one begins with."""

_PAGE = 256


class JournalFiles:
    """Both files of a run's folder, open. Reading is for any thread; raises ``StorageError``.

    The journal's head: ``run_hash``, ``run_toml``, ``first`` (transactions that were compacted away) and ``previous``
    (the check of the last of them), ``archived`` and ``archive_check`` (records of the verdicts' file that it goes on
    from, and the last one's check). That of the verdicts: ``run_hash``; record i is round i's."""

    def __init__(self, folder: Path, *, writable: bool = False, live: bool = False) -> None:
        """``live``: a coordinator may be writing to them; what it adds meanwhile is left out."""
        self.folder = folder
        self._lock = threading.RLock()
        # First the journal: while somebody compacts, the verdicts' file is never behind it.
        self.journal = RecordFile(folder / JOURNAL, "journal", writable=writable)
        try:
            self.archived = _number(self.journal, "archived")
            self.archive = RecordFile(folder / VERDICTS, "verdicts", writable=writable, least=self.archived)
        except StorageError:
            self.journal.close()
            raise
        try:
            self._check_together(live)
        except StorageError:
            self.close()
            raise

    def _check_together(self, live: bool) -> None:
        head, archive = self.journal.head, self.archive
        same = head.get("run_hash") == archive.head.get("run_hash")
        if not same or head.get("archive_check") != archive.check_after(self.archived):
            raise StorageError(f"{archive.path} does not belong to {self.journal.path}. {RESTORE}")
        if _number(self.journal, "first") and self.journal.kinds[:1] != bytes([SNAPSHOT]):
            raise StorageError(f"{self.journal.path}: does not begin with a snapshot. {RESTORE}")
        self.fresh = [number for number, kind in enumerate(self.journal.kinds) if kind == VERDICT]
        """The journal's records that have verdicts, for the rounds from ``archived`` on."""
        # A crash in a compaction leaves verdicts in both.
        for round_number in range(self.archived, len(archive.offsets)):
            if round_number - self.archived >= len(self.fresh):
                if live:
                    return
                raise StorageError(
                    f"{archive.path}: has {len(archive.offsets)} verdicts, of which {self.journal.path} knows "
                    f"{self.archived + len(self.fresh)}: the journal is an outdated copy, or its end is lost. {RESTORE}"
                )
            if self._archived_verdicts(round_number) != self._fresh_verdicts(round_number):
                raise StorageError(f"{archive.path}: tells another history than {self.journal.path}. {RESTORE}")

    @property
    def run_hash(self) -> bytes:
        return bytes(self.journal.head["run_hash"])

    @property
    def transactions(self) -> int:
        """How many have been written to this journal ever."""
        compacted = _number(self.journal, "first")
        return compacted + len(self.journal.offsets) - bool(compacted)

    @property
    def rounds(self) -> int:
        """How many have their verdict."""
        return self.archived + len(self.fresh)

    def read(self) -> list[JournalEvent]:
        """All events since the journal was compacted, oldest first; then the first one is a ``RunSnapshot``."""
        with self._lock:
            records = range(len(self.journal.offsets))
            return [event for number in records for event in events_of(self.journal, number)]

    def verdicts(self, first: int = 0, limit: int | None = None, scope: int | None = None) -> list[VerdictGiven]:
        """The run's verdicts from round ``first`` on, oldest first, at most ``limit``: those of a scope, or of each
        round the first one, as all stages' rounds end alike."""
        found: list[VerdictGiven] = []
        with self._lock:
            stop = self.rounds if limit is None else min(self.rounds, first + limit)
        for page in range(first, stop, _PAGE):
            with self._lock:  # not for all of them: the journal is written under it
                given = [self._verdicts_of(number) for number in range(page, min(stop, page + _PAGE))]
            wanted = [(by_scope, min(by_scope) if scope is None else scope) for by_scope in given]
            found += [by_scope[at] for by_scope, at in wanted if at in by_scope]
        return found

    def _verdicts_of(self, round_number: int) -> dict[int, VerdictGiven]:
        """By scope."""
        if round_number < len(self.archive.offsets):
            return self._archived_verdicts(round_number)
        return self._fresh_verdicts(round_number)

    def _archived_verdicts(self, round_number: int) -> dict[int, VerdictGiven]:
        return _of_round(events_of(self.archive, round_number), round_number, self.archive)

    def _fresh_verdicts(self, round_number: int) -> dict[int, VerdictGiven]:
        events = events_of(self.journal, self.fresh[round_number - self.archived])
        return _of_round(events, round_number, self.journal)

    def check_at(self, transactions: int) -> bytes | None:
        """What tells the first so many transactions from all others; None for more than there are, or too few to be in
        this file still."""
        compacted = _number(self.journal, "first")
        if not compacted <= transactions <= self.transactions:
            return None
        if transactions == compacted:
            return bytes(self.journal.head["previous"])
        return self.journal.check_after(transactions - compacted + bool(compacted))

    def close(self) -> None:
        self.journal.close()
        self.archive.close()


def check_run(files: JournalFiles, run_hash: bytes) -> None:
    """Raises ``RunFileError`` when it is the journal of another run file."""
    if files.run_hash != run_hash:
        raise RunFileError(
            f"{files.journal.path} is the journal of the same run with other settings. A run's settings never change: "
            "restore its run file, or give the new one another run.name or --state"
        )


def pack_events(events: Sequence[JournalEvent]) -> tuple[int, bytes]:
    """Kind and payload of a transaction's record."""
    data: bytes = msgpack.packb([pack_event(event) for event in events])
    return VERDICT if verdicts_in(events) else EVENTS, data


def pack_verdicts(given: Mapping[int, VerdictGiven]) -> bytes:
    """Payload of a round's record in the verdicts' file."""
    return pack_events([InScope(scope=scope, event=event) if scope else event for scope, event in given.items()])[1]


def events_of(file: RecordFile, number: int) -> list[JournalEvent]:
    """Of one record. Raises ``StorageError``."""
    try:
        packed = msgpack.unpackb(file.read(number))
        if not isinstance(packed, list) or not all(isinstance(one, bytes) for one in packed):
            raise ValueError("no list of events")
        return [unpack_event(one) for one in packed]
    except (ValueError, msgpack.UnpackException, StorageError) as error:
        if isinstance(error, StorageError) and str(file.path) in str(error):
            raise
        raise StorageError(f"{file.path}: record {number} cannot be read: {error}") from error


def _of_round(events: Sequence[JournalEvent], round_number: int, file: RecordFile) -> dict[int, VerdictGiven]:
    """Those among the events of a record, by scope."""
    given = verdicts_in(events)
    if {event.verdict.round for event in given.values()} != {round_number}:
        raise StorageError(f"{file.path}: the verdict of round {round_number} is not where it should be. {RESTORE}")
    return given


def _number(file: RecordFile, name: str) -> int:
    value = file.head.get(name)
    if not isinstance(value, int) or value < 0:
        raise StorageError(f"{file.path}: its head has no {name}. {RESTORE}")
    return value


# Writing ----------------------------------------------------------------------------------------------------

_COMPACT_AT_BYTES = 2**20
"""So much a journal grows before it is compacted, and at least as much as its snapshot has."""


class Journal(JournalFiles):
    """One run's journal, this process's alone. All methods raise ``StorageError`` when the disk refuses.

    A ``backup`` has all records, too, when ``write`` and ``compact`` return, unless it cannot be written."""

    compact_at_bytes = _COMPACT_AT_BYTES

    def __init__(self, folder: Path, run_hash: bytes, run_toml: str, backup: Backup | None = None) -> None:
        """Open or create. Raises ``RunFileError`` when the journal is of another run file."""
        self._failure: StorageError | None = None
        self._backup = backup
        try:
            self._folder_lock = durable.lock_folder(folder)
            try:
                _create(folder, run_hash, run_toml)
                super().__init__(folder, writable=True)
                self._adopt(run_hash)
            except BaseException:
                self._folder_lock.release()
                raise
        except OSError as error:
            raise StorageError(f"{folder}: the journal cannot be opened: {error}") from error

    def _adopt(self, run_hash: bytes) -> None:
        try:
            check_run(self, run_hash)
            if self._backup is not None:
                self._backup.begin(self)
            self.journal.repair()
            self.archive.repair()
        except BaseException:
            super().close()
            raise
        begins_compacted = self.journal.kinds[:1] == bytes([SNAPSHOT])
        later = self.journal.offsets[begins_compacted:]
        self._compacted_bytes = later[0] if later else self.journal.size_bytes

    def write(self, events: Sequence[JournalEvent]) -> None:
        """Append as one transaction: after a crash all of them are there, or none.

        After a failure every later write fails too: a journal with a gap would be another history."""
        with self._lock:
            self._refuse_after_failure()
            if not events:
                return
            kind, payload = pack_events(events)
            given = {event.verdict.round for event in verdicts_in(events).values()}
            assert given in (set(), {self.rounds}), "one verdict a round, in their order"
            try:
                self.journal.append([(kind, payload)])
            except OSError as error:
                raise self._fail(error) from error
            if kind == VERDICT:
                self.fresh.append(len(self.journal.offsets) - 1)
            if self._backup is not None:
                self._backup.follow(self)

    def is_outdated(self, shown_round: int) -> StorageError:
        """That a member knows what this journal does not; nothing is written from now on."""
        with self._lock:
            self._failure = StorageError(
                f"{self.folder}: this is an outdated copy: a member has the verdict of round {shown_round}, signed by "
                f"this host, and the journal ends before round {self.rounds}. Start again from the newest copy: the "
                "folder of the machine that hosted the run last, or its backup (shoal host RUN.toml --state BACKUP). "
                "Members wait for it"
            )
            return self._failure

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: OSError | StorageError) -> StorageError:
        self._failure = StorageError(
            f"{self.journal.path}: the journal cannot be written: {error}. If the disk is full, free some space; then "
            "start again with the same command: nothing was announced that is not in the journal"
        )
        return self._failure

    # Compaction -------------------------------------------------------------------------------------------

    @property
    def has_grown(self) -> bool:
        """Whether it is time to ``compact``."""
        grown_bytes = self.journal.size_bytes - self._compacted_bytes
        return grown_bytes >= max(self.compact_at_bytes, self._compacted_bytes)

    def compact(self, snapshot: RunSnapshot | PipelineSnapshot) -> None:
        """Let the snapshot stand for all events so far; the verdicts among them go to the verdicts' file, for ever.

        A crash leaves the journal as it was, or compacted. Never fails: when the disk refuses, the journal stays as it
        was until it has grown as much again, or, if it is not known what is on the disk, the next ``write`` fails."""
        with self._lock:
            if self._failure is not None:
                return
            assert snapshot.round == self.rounds, "a snapshot of what was written"
            new = self.journal.path.with_name(JOURNAL + ".new")
            try:
                missing = range(len(self.archive.offsets), self.rounds)
                self.archive.append([(VERDICT, pack_verdicts(self._fresh_verdicts(number))) for number in missing])
                head = self.journal.head | {
                    "first": self.transactions,
                    "previous": self.journal.check,
                    "archived": self.rounds,
                    "archive_check": self.archive.check,
                }
                durable.write_whole(new, pack_file("journal", head, [(SNAPSHOT, pack_events([snapshot])[1])]))
            except (OSError, StorageError) as error:
                self._compacted_bytes = self.journal.size_bytes
                log.warning("%s: stays as long as it is, as it cannot be compacted: %s", self.journal.path, error)
                return
            try:
                durable.replace(new, self.journal.path)
                compacted = RecordFile(self.journal.path, "journal", writable=True, least=1)
            except (OSError, StorageError) as error:  # which of the two is there after a crash is not known
                self._fail(error)
                return
            self.journal.close()
            self.journal, self.archived, self.fresh = compacted, self.rounds, []
            self._compacted_bytes = compacted.size_bytes
            if self._backup is not None:
                self._backup.follow(self)

    def close(self) -> None:
        """The backup, too."""
        with self._lock:
            super().close()
            if self._backup is not None:
                self._backup.close()
            self._folder_lock.release()


def _create(folder: Path, run_hash: bytes, run_toml: str) -> None:
    """The files of a run that begins. Raises ``OSError``."""
    journal, verdicts = folder / JOURNAL, folder / VERDICTS
    if journal.exists():
        return
    if not verdicts.exists():
        durable.put(verdicts, pack_file("verdicts", {"run_hash": run_hash}, []))
    archive = RecordFile(verdicts, "verdicts", writable=False)
    archive.close()
    if archive.offsets:
        raise StorageError(f"{journal}: is missing, but {verdicts} is there. {RESTORE}")
    head = {
        "run_hash": run_hash,
        "run_toml": run_toml,
        "first": 0,
        "previous": NO_CHECK,
        "archived": 0,
        "archive_check": archive.check,
    }
    durable.put(journal, pack_file("journal", head, []))


# Backup -----------------------------------------------------------------------------------------------------

_RETRY_S = 5.0
_PIECE_BYTES = 2**20


class Backup:
    """``begin`` with the journal that it is a backup of, then ``follow`` whenever that has grown.

    Whatever moment a machine dies at, its two files open like the journal's own: each is a prefix of the original, byte
    by byte. What cannot be written is a warning, and is caught up later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._others: dict[str, tuple[bytes, int]] = {}
        self._lock: FileLock | None = None
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
            self._lock = durable.lock_folder(self.folder)
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


# Pages of verdicts, for messages ----------------------------------------------------------------------------

PAGE_BYTES = 2**19
"""A page ends with the verdict that reaches it: packing more would hold up the event loop. One verdict alone always
fits a message, as the views that told it had to."""

_READ_AT_ONCE = 16
"""Of a thousand members, a few verdicts are a page."""


class Verdicts(Protocol):
    """What is needed of a journal."""

    def verdicts(self, first: int, limit: int, scope: int | None) -> list[VerdictGiven]: ...


def read_page(journal: Verdicts, first: int, scope: int | None = None) -> CoordinatorToPeerVerdicts:
    """The verdicts from round ``first`` on: a scope's, or of each round the first one. Raises ``StorageError``."""
    page: list[Verdict] = []
    size = 0
    while True:
        read = [event.verdict for event in journal.verdicts(first + len(page), _READ_AT_ONCE, scope)]
        for verdict in read:
            if len(page) == MAX_VERDICTS or size >= PAGE_BYTES:
                return CoordinatorToPeerVerdicts(verdicts=tuple(page), more=True)
            page.append(verdict)
            size += len(pack_verdict(verdict))
        if len(read) < _READ_AT_ONCE:
            return CoordinatorToPeerVerdicts(verdicts=tuple(page), more=False)
