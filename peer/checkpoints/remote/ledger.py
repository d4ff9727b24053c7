"""What has been copied where, noted on this machine: a file counts as copied only once it is noted here."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from pydantic import TypeAdapter

from shoal.peer.checkpoints.manifest import FileEntry
from shoal.peer.regular_file import read_regular

log = logging.getLogger(__name__)

_NOTES = TypeAdapter(dict[str, dict[str, dict[str, FileEntry]]])


class Ledger:
    """Of one peer and one place. A damaged or lost one costs sending again, nothing else."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self._place = place
        self._notes: dict[str, dict[str, dict[str, FileEntry]]] = {}
        try:
            self._notes = _NOTES.validate_json(read_regular(path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s: cannot be read, so copies are sent again: %s", path, type(error).__name__)

    def folders(self) -> frozenset[str]:
        """The checkpoints of which something may be there."""
        return frozenset(self._notes.get(self._place, {}))

    def entry(self, folder: str, name: str) -> FileEntry | None:
        """Bytes and SHA-256 of the file as it was copied there; None for one that was not."""
        return self._notes.get(self._place, {}).get(folder, {}).get(name)

    def begin(self, folder: str) -> None:
        """Something of it may be there from now on."""
        if folder not in self.folders():
            self._notes.setdefault(self._place, {})[folder] = {}
            self._write()

    def note(self, folder: str, name: str, entry: FileEntry) -> None:
        """It has been copied."""
        self._notes.setdefault(self._place, {}).setdefault(folder, {})[name] = entry
        self._write()

    def forget(self, folder: str) -> None:
        """It is not there any more."""
        if self._notes.get(self._place, {}).pop(folder, None) is not None:
            self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w") as file:
                json.dump(self._notes, file, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            log.debug("%s: cannot be written: %s", self._path, error)
