"""Follows a journal's events from the outside, while its coordinator writes and compacts it."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.local_journal import JOURNAL, SNAPSHOT, events_of
from shoal.swarm.coordinator.record_log import RecordFile


class FollowedJournal:
    """Follows a journal through compactions: an open descriptor still reads a replaced file to its end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._file: RecordFile | None = None
        self._taken = self._transactions = 0

    def take(self) -> list[JournalEvent]:
        """All events that are new since the last call, without snapshots."""
        events: list[JournalEvent] = []
        while True:
            if self._file is None:
                self._file, self._taken = RecordFile(self._path, "journal", writable=False), 0
                assert self._file.head["first"] == self._transactions, "compacted twice since we looked"
            latest = self._path.stat().st_ino == os.fstat(self._file._descriptor).st_ino
            self._file._scan()  # what was appended since
            for number in range(self._taken, len(self._file.offsets)):
                if self._file.kinds[number] != SNAPSHOT:
                    events += events_of(self._file, number)
                    self._transactions += 1
            self._taken = len(self._file.offsets)
            if latest:
                return events
            self._file.close()
            self._file = None
