"""Journal in a folder of this machine: three files of checked records, and a copy of all in another folder."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgpack
from filelock import FileLock

from shoal.swarm import durable
from shoal.swarm.coordinator.events import (
    AccessRecorded,
    CoordinatorStarted,
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
from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP
from shoal.swarm.errors import DamagedRecords, RunFileError, StateFileError, StorageError
from shoal.swarm.protocol.access_records import AccessRecord
from shoal.swarm.system import flags

log = logging.getLogger(__name__)


# Reading ----------------------------------------------------------------------------------------------------

JOURNAL, VERDICTS, ACCESS = "journal.records", "verdicts.records", "access.records"
SHARED_JOURNAL = "journal.txt"
"""File of a folder without a journal: where the one is that the run's hosts share, without credentials."""

EVENTS, VERDICT, SNAPSHOT = 1, 2, 3
"""Kinds of records: a transaction without verdicts, one with a round's verdicts, and the snapshot at the beginning of a
compacted journal."""

_PAGE = 256


def evidence_path(folder: Path, name: str) -> Path:
    """Return the file in which a run's folder keeps the evidence with this id, in hexadecimal."""
    return folder / f"{name}.evidence"


def shared_place(folder: Path) -> str:
    """Return where a run's journal is that several hosts share, without passwords; empty if it is in the folder."""
    try:
        return (folder / SHARED_JOURNAL).read_text().strip()
    except OSError:
        return ""


def check_not_shared(folder: Path) -> None:
    """Check that a run's journal is not elsewhere: another one, begun here, would tell another history under the same
    keys. Raises ``StateFileError``."""
    place = shared_place(folder)
    if not place:
        return
    raise StateFileError(
        f"{folder}: the journal of this run is {place}, which its hosts share: start the host with --journal; for "
        "members, invites and amendments give the command on the machine that leads, while it does; for the log give "
        "an invite"
    )


class JournalFiles:
    """The files of a run's folder, open. May be read from any thread; all methods raise ``StorageError``.

    Fields of the journal's head: ``run_hash``, ``run_toml``; ``first``, the number of transactions that were compacted
    away, and ``previous``, the check of the last of them; ``archived``, the number of rounds whose verdicts are in the
    verdicts' file when this journal begins, and ``archive_check``, the check of the last of these. The head of the
    verdicts' file has ``run_hash``; its record i holds the verdicts of round i. ``access``: the file of access records,
    one a record, None until there is one; ``recorded`` in the journal's head: how many it had at the last compaction.
    A transaction's access records are in the journal before they are in that file."""

    def __init__(self, folder: Path, *, writable: bool = False, live: bool = False) -> None:
        """``live``: a coordinator may be writing to the files; what it adds meanwhile is left out."""
        check_not_shared(folder)
        self.folder = folder
        self.lock = threading.RLock()
        # The journal is opened first: during a compaction the verdicts' file is never behind it.
        self.journal = RecordFile(folder / JOURNAL, "journal", writable=writable)
        try:
            self.archived = _number(self.journal, "archived")
            self.archive = RecordFile(folder / VERDICTS, "verdicts", writable=writable, least=self.archived)
        except StorageError:
            self.journal.close()
            raise
        self.access: RecordFile | None = None
        try:
            recorded = _number(self.journal, "recorded")
            if recorded or (folder / ACCESS).exists():
                self.access = RecordFile(folder / ACCESS, "access", writable=writable, least=recorded)
            self._check_together(live)
        except StorageError:
            self.close()
            raise

    def _check_together(self, live: bool) -> None:
        head, archive = self.journal.head, self.archive
        same = head.get("run_hash") == archive.head.get("run_hash")
        if not same or head.get("archive_check") != archive.check_after(self.archived):
            raise DamagedRecords(f"{archive.path} does not belong to {self.journal.path}. {RESTORE}")
        if self.compacted and self.journal.kinds[:1] != bytes([SNAPSHOT]):
            raise DamagedRecords(f"{self.journal.path}: does not begin with a snapshot. {RESTORE}")
        self.fresh = [number for number, kind in enumerate(self.journal.kinds) if kind == VERDICT]
        """The journal's records that have verdicts, for the rounds from ``archived`` on."""
        # A crash during a compaction leaves verdicts in both files.
        for round_number in range(self.archived, len(archive.offsets)):
            if round_number - self.archived >= len(self.fresh):
                if live:
                    return
                raise DamagedRecords(
                    f"{archive.path}: has {len(archive.offsets)} verdicts, of which {self.journal.path} knows "
                    f"{self.archived + len(self.fresh)}: the journal is an outdated copy, or its end is lost. {RESTORE}"
                )
            if self._archived_verdicts(round_number) != self.fresh_verdicts(round_number):
                raise DamagedRecords(f"{archive.path}: tells another history than {self.journal.path}. {RESTORE}")

    @property
    def run_hash(self) -> bytes:
        return bytes(self.journal.head["run_hash"])

    @property
    def compacted(self) -> int:
        """Number of transactions that were compacted away; a snapshot stands for them if there are any."""
        return _number(self.journal, "first")

    @property
    def next_index(self) -> int:
        """Number of transactions that were ever written to this journal."""
        return self.compacted + len(self.journal.offsets) - bool(self.compacted)

    @property
    def rounds(self) -> int:
        """Number of rounds that have their verdicts."""
        return self.archived + len(self.fresh)

    def read(self, from_index: int = 0) -> list[JournalEvent]:
        """As ``Journal.read``."""
        with self.lock:
            compacted = self.compacted
            first = 0 if from_index < compacted else from_index - compacted + bool(compacted)
            records = range(first, len(self.journal.offsets))
            return [event for number in records for event in events_of(self.journal, number)]

    def verdicts(self, first: int = 0, limit: int | None = None, scope: int | None = None) -> list[VerdictGiven]:
        """As ``VerdictSource.verdicts``; all of them for ``limit`` None."""
        found: list[VerdictGiven] = []
        with self.lock:
            stop = self.rounds if limit is None else min(self.rounds, first + limit)
        for page in range(first, stop, _PAGE):
            with self.lock:  # released between pages, as whoever appends to the journal waits for it
                given = [self._verdicts_of(number) for number in range(page, min(stop, page + _PAGE))]
            wanted = [(by_scope, min(by_scope) if scope is None else scope) for by_scope in given]
            found += [by_scope[at] for by_scope, at in wanted if at in by_scope]
        return found

    def _verdicts_of(self, round_number: int) -> dict[int, VerdictGiven]:
        """By scope."""
        if round_number < len(self.archive.offsets):
            return self._archived_verdicts(round_number)
        return self.fresh_verdicts(round_number)

    def _archived_verdicts(self, round_number: int) -> dict[int, VerdictGiven]:
        return _of_round(events_of(self.archive, round_number), round_number, self.archive)

    def fresh_verdicts(self, round_number: int) -> dict[int, VerdictGiven]:
        """Read the verdicts of a round that has them in the journal, by scope."""
        events = events_of(self.journal, self.fresh[round_number - self.archived])
        return _of_round(events, round_number, self.journal)

    def check_at(self, transactions: int) -> bytes | None:
        """Return the check that identifies the first ``transactions`` transactions; None if there are fewer, or if
        their end has been compacted away."""
        if not self.compacted <= transactions <= self.next_index:
            return None
        if transactions == self.compacted:
            return bytes(self.journal.head["previous"])
        return self.journal.check_after(transactions - self.compacted + bool(self.compacted))

    @property
    def access_count(self) -> int:
        """Number of access records."""
        return len(self.access.offsets) if self.access is not None else 0

    def access_records(self, first: int = 0, limit: int | None = None) -> list[AccessRecord]:
        """As ``Journal.access_records``; all of them for ``limit`` None."""
        with self.lock:
            stop = self.access_count if limit is None else min(self.access_count, first + limit)
            return [self._access_record(number) for number in range(first, stop)]

    def _access_record(self, number: int) -> AccessRecord:
        assert self.access is not None
        try:
            return AccessRecord.model_validate(msgpack.unpackb(self.access.read(number), use_list=False))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DamagedRecords(f"{self.access.path}: record {number} cannot be read: {error}. {RESTORE}") from error

    def keep_access(self, events: Iterable[JournalEvent]) -> None:
        """Append the access records among events of the journal that their file lacks. Raises ``OSError``."""
        records = [one.record for one in events if isinstance(one, AccessRecorded)]
        records = [one for one in records if one.number >= self.access_count]
        if not records:
            return
        path = self.folder / ACCESS
        if self.access is None:
            durable.put(path, pack_file("access", {"run_hash": self.run_hash}, []))
            self.access = RecordFile(path, "access", writable=True)
        if [one.number for one in records] != list(range(self.access_count, self.access_count + len(records))):
            raise DamagedRecords(f"{path}: ends after {self.access_count} records, and lacks others. {RESTORE}")
        self.access.append([(EVENTS, msgpack.packb(one.model_dump())) for one in records])

    def close(self) -> None:
        self.journal.close()
        self.archive.close()
        if self.access is not None:
            self.access.close()


def check_run(files: JournalFiles, run_hash: bytes) -> None:
    """Raise ``RunFileError`` for the journal of another run file."""
    if files.run_hash != run_hash:
        raise RunFileError(
            f"{files.journal.path} is the journal of the same run with other settings. A run's settings never change: "
            "restore its run file, or give the new one another run.name or --state"
        )


def pack_events(events: Sequence[JournalEvent]) -> tuple[int, bytes]:
    """Return the kind and the payload of a transaction's record."""
    data: bytes = msgpack.packb([pack_event(event) for event in events])
    return VERDICT if verdicts_in(events) else EVENTS, data


def pack_verdicts(given: Mapping[int, VerdictGiven]) -> bytes:
    """Return the payload of a round's record in the verdicts' file."""
    return pack_events([InScope(scope=scope, event=event) if scope else event for scope, event in given.items()])[1]


def events_of(file: RecordFile, number: int) -> list[JournalEvent]:
    """Read the events of one record. Raises ``StorageError``."""
    try:
        packed = msgpack.unpackb(file.read(number))
        if not isinstance(packed, list) or not all(isinstance(one, bytes) for one in packed):
            raise ValueError("it holds no list of events")
        return [unpack_event(one) for one in packed]
    except (ValueError, msgpack.UnpackException, StorageError) as error:
        if isinstance(error, StorageError) and str(file.path) in str(error):
            raise
        raise DamagedRecords(f"{file.path}: record {number} cannot be read: {error}") from error


def _of_round(events: Sequence[JournalEvent], round_number: int, file: RecordFile) -> dict[int, VerdictGiven]:
    """Return the verdicts among the events of a record, by scope; they must be of this round."""
    given = verdicts_in(events)
    if {event.verdict.round for event in given.values()} != {round_number}:
        raise DamagedRecords(f"{file.path}: the verdict of round {round_number} is not where it should be. {RESTORE}")
    return given


def _number(file: RecordFile, name: str) -> int:
    value = file.head.get(name)
    if not isinstance(value, int) or value < 0:
        raise DamagedRecords(f"{file.path}: its head has no {name}. {RESTORE}")
    return value


# Writing ----------------------------------------------------------------------------------------------------

_COMPACT_AT_BYTES = 2**20
"""A journal grows by so much before it is compacted, and by at least as much as its snapshot has."""


class LocalJournal:
    """A run's journal in a folder of this machine (``journal.Journal``). Its lease is a lock on the folder.

    A ``backup`` has all records, too, when ``append`` and ``compact`` return, unless it cannot be written."""

    compact_at_bytes = _COMPACT_AT_BYTES

    def __init__(self, folder: Path, run_hash: bytes, run_toml: str, backup: Backup | None = None) -> None:
        self.location = str(folder)
        self._folder, self._run_hash, self._run_toml, self._backup = folder, run_hash, run_toml, backup
        self._files: JournalFiles | None = None
        self._folder_lock: FileLock | None = None
        self._failure: StorageError | None = None
        self._compacted_bytes = 0

    @property
    def files(self) -> JournalFiles:
        assert self._files is not None, "take the lease first"
        return self._files

    def lease(self) -> int:
        """Lock the folder, create the files of a new run, and repair the end that a crash has left behind."""
        try:
            with ExitStack() as undo:
                lock = durable.lock_folder(self._folder)
                undo.callback(lock.release)
                check_not_shared(self._folder)
                _create(self._folder, self._run_hash, self._run_toml)
                files = JournalFiles(self._folder, writable=True)
                undo.callback(files.close)
                check_run(files, self._run_hash)
                epoch = max(time.time_ns(), _last_epoch(files) + EPOCH_STEP)
                if self._backup is not None:
                    undo.callback(self._backup.close)
                    self._backup.attach(files)
                files.journal.repair()
                files.archive.repair()
                if files.access is not None:
                    files.access.repair()
                files.keep_access(files.read())
                undo.pop_all()
        except OSError as error:
            raise StorageError(f"{self._folder}: the journal cannot be opened: {error}") from error
        begins_compacted = files.journal.kinds[:1] == bytes([SNAPSHOT])
        later = files.journal.offsets[begins_compacted:]
        self._compacted_bytes = later[0] if later else files.journal.size_bytes
        self._folder_lock, self._files = lock, files
        return epoch

    @property
    def next_index(self) -> int:
        return self.files.next_index

    @property
    def rounds(self) -> int:
        return self.files.rounds

    def read(self, from_index: int = 0) -> list[JournalEvent]:
        return self.files.read(from_index)

    def verdicts(self, first: int = 0, limit: int | None = None, scope: int | None = None) -> list[VerdictGiven]:
        return self.files.verdicts(first, limit, scope)

    @property
    def access_count(self) -> int:
        return self.files.access_count

    def access_records(self, first: int, limit: int) -> list[AccessRecord]:
        return self.files.access_records(first, limit)

    def keep_evidence(self, name: str, data: bytes) -> None:
        """Keep evidence in a file of its own, in the backup, too."""
        with self.files.lock:
            try:
                durable.put(evidence_path(self._folder, name), data)
            except OSError as error:
                raise StorageError(f"{self._folder}: evidence cannot be written: {error}") from error
            if self._backup is not None:
                self._backup.keep(evidence_path(Path(), name).name, data)

    def append(self, expected_index: int, events: Sequence[JournalEvent]) -> None:
        files = self.files
        with files.lock:
            if self._failure is not None:
                raise self._failure
            kind, payload = pack_events(events)
            given = {event.verdict.round for event in verdicts_in(events).values()}
            assert given in (set(), {files.rounds}), "one verdict a round, in their order"
            try:
                if expected_index != files.next_index:
                    raise OSError(f"it has {files.next_index} transactions, and {expected_index} were expected")
                files.journal.append([(kind, payload)])
                files.keep_access(events)
            except (OSError, StorageError) as error:
                raise self._fail(error) from error
            if kind == VERDICT:
                files.fresh.append(len(files.journal.offsets) - 1)
            if self._backup is not None:
                self._backup.update(files)

    def _fail(self, error: OSError | StorageError) -> StorageError:
        self._failure = StorageError(
            f"{self.files.journal.path}: the journal cannot be written: {error}. If the disk is full, free some space; "
            "then start again with the same command: nothing was announced that is not in the journal"
        )
        return self._failure

    # Compaction -------------------------------------------------------------------------------------------

    @property
    def wants_snapshot(self) -> bool:
        grown_bytes = self.files.journal.size_bytes - self._compacted_bytes
        return grown_bytes >= max(self.compact_at_bytes, self._compacted_bytes)

    def compact(self, snapshot: RunSnapshot | PipelineSnapshot) -> None:
        """Write a journal that begins with the snapshot, and the verdicts so far into the verdicts' file.

        A crash leaves the journal as it was, or compacted. When the disk refuses, the journal stays as it was until it
        has grown as much again, or, if it is not known what is on the disk, the next ``append`` fails."""
        files = self.files
        with files.lock:
            if self._failure is not None:
                return
            assert snapshot.round == files.rounds, "a snapshot of what was written"
            path = files.journal.path
            new = path.with_name(JOURNAL + ".new")
            try:
                missing = range(len(files.archive.offsets), files.rounds)
                files.archive.append([(VERDICT, pack_verdicts(files.fresh_verdicts(number))) for number in missing])
                head = files.journal.head | {
                    "first": files.next_index,
                    "previous": files.journal.check,
                    "archived": files.rounds,
                    "archive_check": files.archive.check,
                    "recorded": files.access_count,
                }
                durable.write_whole(new, pack_file("journal", head, [(SNAPSHOT, pack_events([snapshot])[1])]))
            except (OSError, StorageError) as error:
                self._compacted_bytes = files.journal.size_bytes
                log.warning("%s: stays as long as it is, as it cannot be compacted: %s", path, error)
                return
            try:
                durable.replace(new, path)
                compacted = RecordFile(path, "journal", writable=True, least=1)
            except (OSError, StorageError) as error:  # after a crash, either of the two files may be there
                self._fail(error)
                return
            files.journal.close()
            files.journal, files.archived, files.fresh = compacted, files.rounds, []
            self._compacted_bytes = compacted.size_bytes
            if self._backup is not None:
                self._backup.update(files)

    @property
    def backup_behind_s(self) -> float | None:
        return self._backup.behind_s(time.monotonic()) if self._backup is not None else None

    trouble = ""
    is_shared = False

    def check_lease(self) -> None:
        """Nothing to check: the system keeps the folder's lock for as long as this process lives."""

    def close(self) -> None:
        """Give up the lease; close the backup, too."""
        if self._files is None or self._folder_lock is None:
            return
        with self._files.lock:
            self._files.close()
            if self._backup is not None:
                self._backup.close()
            self._folder_lock.release()


def _create(folder: Path, run_hash: bytes, run_toml: str) -> None:
    """Create the files of a run that begins. Raises ``OSError``."""
    journal, verdicts = folder / JOURNAL, folder / VERDICTS
    if journal.exists():
        return
    if not verdicts.exists():
        durable.put(verdicts, pack_file("verdicts", {"run_hash": run_hash}, []))
    archive = RecordFile(verdicts, "verdicts", writable=False)
    archive.close()
    if archive.offsets:
        raise DamagedRecords(f"{journal}: is missing, but {verdicts} is there. {RESTORE}")
    head = {
        "run_hash": run_hash,
        "run_toml": run_toml,
        "first": 0,
        "previous": NO_CHECK,
        "archived": 0,
        "archive_check": archive.check,
        "recorded": 0,
    }
    durable.put(journal, pack_file("journal", head, []))


def _last_epoch(files: JournalFiles) -> int:
    """Return the epoch of the last coordinator that wrote to the journal; 0 for a new one."""
    starts = CoordinatorStarted | RunSnapshot | PipelineSnapshot
    return max((event.epoch for event in files.read() if isinstance(event, starts)), default=0)


# Backup -----------------------------------------------------------------------------------------------------

_RETRY_S = 5.0
_PIECE_BYTES = 2**20


class Backup:
    """Copy of a journal's files in another folder, kept up to date while the journal grows.

    At whatever moment a machine dies, the two copies open like the journal's own files: each is a prefix of its
    original, byte by byte. When the backup cannot be written, a warning is logged, and the rest is copied later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._others: dict[str, tuple[bytes, int]] = {}
        self._lock: FileLock | None = None
        self._verdicts: _Copy | None = None
        self._journal: _Copy | None = None
        self._access: _Copy | None = None
        self._access_bytes: int | None = None
        """Length of the beginning of the access records that an earlier backup has; None for nothing of use."""
        self._journal_of: RecordFile | None = None
        self._refused: StorageError | None = None
        self._behind_since_s: float | None = None
        self._retry_s = 0.0

    def behind_s(self, now_s: float) -> float:
        """Return for how many seconds the journal has had something that is not here; 0 while all of it is."""
        since_s = self._behind_since_s
        return 0.0 if since_s is None else max(0.0, now_s - since_s)

    def keep(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Keep a small file that another machine needs beside the journal. It is written with the next record."""
        self._others[name] = data, mode

    def attach(self, files: JournalFiles) -> None:
        """Bring the backup up to date for the first time.

        Raises ``StorageError`` if it is the backup of another run, or has records that the journal lacks: then the
        journal is an outdated copy."""
        self._copy(files)
        if self._refused is not None:
            raise self._refused

    def update(self, files: JournalFiles) -> None:
        """Copy what the journal has more than the backup. Never raises."""
        if self._refused is None and not (self._is_behind and time.monotonic() < self._retry_s):
            self._copy(files)

    def _copy(self, files: JournalFiles) -> None:
        try:
            self._try_to_copy(files)
        except OSError as error:
            self._let_go()
            self._fall_behind()
            self._retry_s = time.monotonic() + _RETRY_S
            log.warning(
                "THE BACKUP IN %s CANNOT BE WRITTEN and does not grow: %s. The run goes on without it, and this "
                "machine tries again in %.0f s or later. Until then, everything new is lost if this machine is lost",
                self.folder,
                error,
                _RETRY_S,
            )
        except StorageError as error:
            self._let_go()
            self._fall_behind()
            self._refused = error
            log.error("the run goes on without a backup: %s", error)
        else:
            if self._is_behind:
                log.warning("the backup in %s is complete again", self.folder)
            self._behind_since_s = None

    @property
    def _is_behind(self) -> bool:
        return self._behind_since_s is not None

    def _fall_behind(self) -> None:
        if self._behind_since_s is None:
            self._behind_since_s = time.monotonic()

    def _try_to_copy(self, files: JournalFiles) -> None:
        if self._lock is None:
            self._lock = durable.lock_folder(self.folder)
            self._survey(files)
        while self._others:
            name, (data, mode) = next(iter(self._others.items()))
            durable.put(self.folder / name, data, mode)
            del self._others[name]
        if files.access is not None:  # before the journal, whose compaction drops what is in there
            if self._access is None:
                self._access = _Copy(self.folder / ACCESS, self._access_bytes)
            self._access.grow(files.access)
        if self._journal is not None and self._journal_of is files.journal:
            assert self._verdicts is not None
            self._verdicts.grow(files.archive)
            self._journal.grow(files.journal)
            return
        # The journal is new here, or was compacted. Its verdicts have to be there before it is.
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

    # Files of an earlier backup --------------------------------------------------------------------------------

    def _survey(self, files: JournalFiles) -> None:
        """Find how much of the journal is there. Raises ``StorageError`` for anything but a part of it."""
        theirs = self._read()
        if theirs is None:
            return
        try:
            if theirs.run_hash != files.run_hash:
                raise DamagedRecords(f"{self.folder} is the backup of another run: give --backup another folder")
            if not _continues(files, theirs):
                raise DamagedRecords(
                    f"{self.folder}: this backup, in round {theirs.rounds}, has records that {files.folder}, in round "
                    f"{files.rounds}, lacks: the latter is an outdated copy. To go on from the backup, give its folder "
                    "as --state; to go on from the outdated copy all the same, give --backup another folder"
                )
            self._access_bytes = _common_bytes(files.access, theirs.access)
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
            log.warning("%s: this backup is damaged (%s); it is moved aside, and a new one is made", self.folder, error)
            for path in paths:
                if path.exists():
                    durable.replace(path, free_name(path))
            return None

    def _let_go(self) -> None:
        for copy in (self._journal, self._verdicts, self._access):
            if copy is not None:
                copy.close()
        self._journal = self._verdicts = self._access = self._journal_of = self._access_bytes = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def close(self) -> None:
        self._let_go()


def _common_bytes(ours: RecordFile | None, theirs: RecordFile | None) -> int | None:
    """Return the length of their file if it is the beginning of ours, else None."""
    if ours is None or theirs is None or len(theirs.offsets) > len(ours.offsets):
        return None
    return theirs.size_bytes if theirs.check == ours.check_after(len(theirs.offsets)) else None


class _Copy:
    """Copy of the beginning of a record file. All methods raise ``OSError``."""

    def __init__(self, path: Path, size_bytes: int | None) -> None:
        """``size_bytes``: length of the part of the existing file that is right; None starts a new file."""
        if size_bytes is None:
            path.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags(), 0o644)
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
    """Return whether their records are the beginning of ours."""
    if theirs.next_index > ours.next_index or theirs.rounds > ours.rounds:
        return False
    here = ours.check_at(theirs.next_index)
    if here is not None:
        return here == theirs.check_at(theirs.next_index)
    last = theirs.rounds - 1  # our journal was compacted since then: compare their newest verdict
    return last < 0 or theirs.verdicts(last, 1) == ours.verdicts(last, 1)
