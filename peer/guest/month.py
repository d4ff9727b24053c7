"""Counter of a machine's traffic in a calendar month, for its owner's data plan; it outlives the process.

Each peer keeps its own file in its folder of a run, so that several need no lock; the sum over all files below the
state folder is the machine's.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.swarm import durable

log = logging.getLogger(__name__)

TRAFFIC_FILE = "traffic.json"
SAVE_EVERY_S = 5.0
"""A killed process forgets at most what moved since."""

_MAX_FILE_BYTES = 1024


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    month: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}$")
    moved_bytes: int = Field(ge=0)


class MonthlyTraffic:
    """Counter of one peer, in ``folder``; ``state``: the folder of all runs of the machine."""

    def __init__(self, folder: Path, state: Path) -> None:
        self._path = folder / TRAFFIC_FILE
        self._state = state
        kept = _read(self._path)
        self._month, self._before_bytes = (kept.month, kept.moved_bytes) if kept else ("", 0)
        self._offset_bytes = self._moved_bytes = 0
        self._saved: _Kept | None = kept
        self._saved_s: float | None = None
        self._others_bytes = 0

    def count(self, total_bytes: int, month: str, now_s: float) -> None:
        """Count what the process has moved since it began. ``month``: such as ``2026-11``."""
        if month != self._month:
            self._month, self._before_bytes, self._offset_bytes = month, 0, self._moved_bytes
        self._moved_bytes = total_bytes
        if self._saved_s is None or now_s >= self._saved_s + SAVE_EVERY_S:
            self._saved_s = now_s
            self.save()
            try:
                self._others_bytes = sum(self._of_other(path) for path in self._state.glob(f"*/*/{TRAFFIC_FILE}"))
            except OSError as error:
                log.warning("%s: the traffic of this machine's other peers cannot be read: %s", self._state, error)

    @property
    def of_run_bytes(self) -> int:
        """Bytes that this peer has moved in the month."""
        return self._before_bytes + self._moved_bytes - self._offset_bytes

    @property
    def of_machine_bytes(self) -> int:
        """The same of all peers of the machine."""
        return self.of_run_bytes + self._others_bytes

    def save(self) -> None:
        """Write the counter to the disk; a failure is logged, as training goes on."""
        now = _Kept(month=self._month, moved_bytes=self.of_run_bytes)
        if now == self._saved or not self._month:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.put(self._path, now.model_dump_json().encode(), 0o600)
        except OSError as error:
            log.warning("%s: this month's traffic cannot be kept: %s", self._path, error)
        self._saved = now

    def _of_other(self, path: Path) -> int:
        if path == self._path:
            return 0
        kept = _read(path)
        return kept.moved_bytes if kept is not None and kept.month == self._month else 0


def _read(path: Path) -> _Kept | None:
    try:
        with path.open("rb") as file:
            return _Kept.model_validate_json(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("%s: this month's traffic cannot be read: %s", path, error)
        return None
