"""The coordinator's journal: facts on the disk before anybody hears of them, in two files of checked records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from shoal.swarm import durable
from shoal.swarm.coordinator.backup import Backup
from shoal.swarm.coordinator.events import Fact, PipelineSnapshot, RunSnapshot, verdicts_in
from shoal.swarm.coordinator.journal_files import (
    JOURNAL,
    SNAPSHOT,
    VERDICT,
    VERDICTS,
    JournalFiles,
    check_run,
    pack_facts,
    pack_verdicts,
)
from shoal.swarm.coordinator.records import NO_CHECK, RESTORE, RecordFile, pack_file
from shoal.swarm.errors import StorageError
from shoal.swarm.folder_lock import FolderLock

log = logging.getLogger(__name__)

_SQLITE = "journal.sqlite"
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
            self._folder_lock = FolderLock(folder)
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

    def write(self, facts: Sequence[Fact]) -> None:
        """Append as one transaction: after a crash all of them are there, or none.

        After a failure every later write fails too: a journal with a gap would be another history."""
        with self._lock:
            self._refuse_after_failure()
            if not facts:
                return
            kind, payload = pack_facts(facts)
            given = {fact.verdict.round for fact in verdicts_in(facts).values()}
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
        """Let the snapshot stand for all facts so far; the verdicts among them go to the verdicts' file, for ever.

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
                durable.write_whole(new, pack_file("journal", head, [(SNAPSHOT, pack_facts([snapshot])[1])]))
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
    if (folder / _SQLITE).exists():
        raise StorageError(
            f"{folder / _SQLITE}: this run was hosted by an earlier release, whose journal this one cannot read: end "
            "the run with that release, or give --state another folder and begin the run anew"
        )
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
