"""The coordinator's two files, read: the journal since it was last compacted, and the verdicts from before that."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgpack

from shoal.swarm.coordinator.events import Fact, InScope, VerdictGiven, pack_fact, unpack_fact, verdicts_in
from shoal.swarm.coordinator.records import RESTORE, RecordFile
from shoal.swarm.errors import RunFileError, StorageError

JOURNAL, VERDICTS = "journal.records", "verdicts.records"
FACTS, VERDICT, SNAPSHOT = 1, 2, 3
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

    def read(self) -> list[Fact]:
        """All facts since the journal was compacted, oldest first; then the first one is a ``RunSnapshot``."""
        with self._lock:
            records = range(len(self.journal.offsets))
            return [fact for number in records for fact in facts_of(self.journal, number)]

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
        return _of_round(facts_of(self.archive, round_number), round_number, self.archive)

    def _fresh_verdicts(self, round_number: int) -> dict[int, VerdictGiven]:
        facts = facts_of(self.journal, self.fresh[round_number - self.archived])
        return _of_round(facts, round_number, self.journal)

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


def pack_facts(facts: Sequence[Fact]) -> tuple[int, bytes]:
    """Kind and payload of a transaction's record."""
    data: bytes = msgpack.packb([pack_fact(fact) for fact in facts])
    return VERDICT if verdicts_in(facts) else FACTS, data


def pack_verdicts(given: Mapping[int, VerdictGiven]) -> bytes:
    """Payload of a round's record in the verdicts' file."""
    return pack_facts([InScope(scope=scope, fact=fact) if scope else fact for scope, fact in given.items()])[1]


def facts_of(file: RecordFile, number: int) -> list[Fact]:
    """Of one record. Raises ``StorageError``."""
    try:
        packed = msgpack.unpackb(file.read(number))
        if not isinstance(packed, list) or not all(isinstance(one, bytes) for one in packed):
            raise ValueError("no list of facts")
        return [unpack_fact(one) for one in packed]
    except (ValueError, msgpack.UnpackException, StorageError) as error:
        if isinstance(error, StorageError) and str(file.path) in str(error):
            raise
        raise StorageError(f"{file.path}: record {number} cannot be read: {error}") from error


def _of_round(facts: Sequence[Fact], round_number: int, file: RecordFile) -> dict[int, VerdictGiven]:
    """Those among the facts of a record, by scope."""
    given = verdicts_in(facts)
    if {fact.verdict.round for fact in given.values()} != {round_number}:
        raise StorageError(f"{file.path}: the verdict of round {round_number} is not where it should be. {RESTORE}")
    return given


def _number(file: RecordFile, name: str) -> int:
    value = file.head.get(name)
    if not isinstance(value, int) or value < 0:
        raise StorageError(f"{file.path}: its head has no {name}. {RESTORE}")
    return value
