"""The coordinator's journal: facts in SQLite (WAL), on the disk before anybody hears of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from shoal.swarm.coordinator.facts import Fact, LeaseGranted, LeasesHeld, VerdictGiven, pack_fact, unpack_fact
from shoal.swarm.errors import RunFileError, StorageError

_FORMAT = "1"
_ALL = 2**62
_TAKEN = "another coordinator writes to this journal: end one of the two"
_LEASES = (LeaseGranted.__name__, LeasesHeld.__name__)


class Journal:
    """One run's journal. All methods raise ``StorageError`` when the disk refuses."""

    def __init__(self, path: Path, run_hash: bytes, run_toml: str) -> None:
        """Open or create. Raises ``RunFileError`` when the journal is of another run file."""
        self.path = path
        self._failure: StorageError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT)")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS facts (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL)"
            )
            self._database.execute("CREATE INDEX IF NOT EXISTS facts_by_kind ON facts (kind)")
            for key, value in (("format", _FORMAT), ("run_hash", run_hash.hex()), ("run_toml", run_toml)):
                self._database.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
            meta = dict(self._database.execute("SELECT key, value FROM meta"))
            self._newest = self._newest_id()
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{path}: the journal cannot be opened: {error}") from error
        try:
            self._check(meta, run_hash)
        except (StorageError, RunFileError):
            self.close()
            raise

    def _check(self, meta: dict[str, str], run_hash: bytes) -> None:
        path = self.path
        if meta["format"] != _FORMAT:
            raise StorageError(f"{path}: journal format {meta['format']}, this release reads {_FORMAT}")
        if meta["run_hash"] != run_hash.hex():
            raise RunFileError(
                f"{path} is the journal of the same run with other settings. A run's settings never change: "
                "restore its run file, or give the new one another run.name or --state"
            )

    def read(self) -> list[Fact]:
        """All facts, oldest first."""
        try:
            rows = self._database.execute("SELECT data FROM facts ORDER BY id").fetchall()
            return [unpack_fact(data) for (data,) in rows]
        except (sqlite3.Error, StorageError) as error:
            raise StorageError(f"{self.path}: the journal cannot be read: {error}") from error

    def write(self, facts: Sequence[Fact]) -> None:
        """Append in one transaction; grants from before a verdict are in its ``LeasesHeld`` and go.

        After a failure every later write fails too: a journal with a gap would be another history."""
        if self._failure is not None:
            raise self._failure
        try:
            self._database.execute("BEGIN IMMEDIATE")
            if self._newest_id() != self._newest:
                raise sqlite3.OperationalError(_TAKEN)
            for fact in facts:
                if isinstance(fact, LeasesHeld):
                    self._database.execute("DELETE FROM facts WHERE kind IN (?, ?)", _LEASES)
                self._database.execute(
                    "INSERT INTO facts (kind, data) VALUES (?, ?)", (type(fact).__name__, pack_fact(fact))
                )
            newest = self._newest_id()
            self._database.execute("COMMIT")
            self._newest = newest
        except sqlite3.Error as error:
            self._failure = StorageError(
                f"{self.path}: the journal cannot be written: {error}. If the disk is full, free some space; then "
                "start again with the same command: nothing was announced that is not in the journal"
            )
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise self._failure from error

    def _newest_id(self) -> int:
        (newest,) = self._database.execute("SELECT coalesce(max(id), 0) FROM facts").fetchone()
        return int(newest)

    def verdicts(self, first: int = 0, limit: int = _ALL) -> list[VerdictGiven]:
        """At most ``limit`` verdicts from round ``first`` on, oldest first; from any thread, beside writes."""
        return read_verdicts(self.path, first, limit)

    def close(self) -> None:
        self._database.close()


def read_verdicts(path: Path, first: int = 0, limit: int = _ALL) -> list[VerdictGiven]:
    """What a journal has, also while a coordinator writes to it. Raises ``StorageError``."""
    try:
        # A connection of its own: on the writer's, what is not on the disk yet would be seen.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute(
                "SELECT data FROM facts WHERE kind = ? ORDER BY id LIMIT ? OFFSET ?",
                (VerdictGiven.__name__, limit, first),
            ).fetchall()
        facts = [unpack_fact(data) for (data,) in rows]
    except (sqlite3.Error, StorageError) as error:
        raise StorageError(f"{path}: the journal cannot be read: {error}") from error
    return [fact for fact in facts if isinstance(fact, VerdictGiven)]
