"""The coordinator's journal: facts in SQLite (WAL), on the disk before anybody hears of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from shoal.swarm.coordinator.facts import Fact, LeaseGranted, LeasesHeld, VerdictGiven, pack_fact, unpack_fact
from shoal.swarm.errors import RunFileError, StorageError

_FORMAT = "1"
_LEASES = (LeaseGranted.__name__, LeasesHeld.__name__)


class Journal:
    """One run's journal. All methods raise ``StorageError`` when the disk refuses."""

    def __init__(self, path: Path, run_hash: bytes, run_toml: str) -> None:
        """Open or create. Raises ``RunFileError`` when the journal is of another run file."""
        self.path = path
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
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{path}: the journal cannot be opened: {error}") from error
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
        except sqlite3.Error as error:
            raise StorageError(f"{self.path}: the journal cannot be read: {error}") from error
        return [unpack_fact(data) for (data,) in rows]

    def write(self, facts: Sequence[Fact]) -> None:
        """Append in one transaction; grants from before a verdict are in its ``LeasesHeld`` and go."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for fact in facts:
                if isinstance(fact, LeasesHeld):
                    self._database.execute("DELETE FROM facts WHERE kind IN (?, ?)", _LEASES)
                self._database.execute(
                    "INSERT INTO facts (kind, data) VALUES (?, ?)", (type(fact).__name__, pack_fact(fact))
                )
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise StorageError(
                f"{self.path}: the journal cannot be written: {error}. "
                "Free some space and start again with the same command; nothing was announced that is not in it"
            ) from error

    def verdicts(self) -> list[VerdictGiven]:
        """Every verdict of the run, oldest first."""
        return [fact for fact in self.read() if isinstance(fact, VerdictGiven)]

    def close(self) -> None:
        self._database.close()
