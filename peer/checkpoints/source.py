"""Sources of a checkpoint's files, and the error by which all of their readers refuse a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.peer.regular_file import open_regular, read_regular
from shoal.swarm.errors import StateFileError


class CheckpointSource(Protocol):
    """The files of one checkpoint, by name. Nothing that is read is trusted."""

    def place(self, name: str) -> str:
        """The file's name in messages."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """The whole file, or one byte more than ``limit_bytes`` of a longer one. Raises ``StateFileError``."""

    def size_bytes(self, name: str) -> int:
        """Size of the file's content, without reading it. Raises ``StateFileError``."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""


@dataclass(frozen=True)
class FolderSource:
    """Files in a folder of this machine."""

    folder: Path

    def place(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        path = self.folder / name
        try:
            return read_regular(path, limit_bytes)
        except OSError as error:
            raise StateFileError(f"{path}: cannot be read: {error}") from error

    def size_bytes(self, name: str) -> int:
        path = self.folder / name
        try:
            with open_regular(path) as file:
                return os.fstat(file.fileno()).st_size
        except OSError as error:
            raise StateFileError(f"{path}: cannot be read: {error}") from error

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


def refusal(place: str, field: str, expected: str, found: str) -> StateFileError:
    """The error for a file whose ``field`` is not as expected."""
    return StateFileError(f"{place}: {field}: expected {expected}, not {found}")
