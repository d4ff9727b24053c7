"""Where the files of a checkpoint are read from, and the one form in which they are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.swarm.errors import StateFileError


class Source(Protocol):
    """The files of one checkpoint, by name. Nothing that is read is trusted."""

    def place(self, name: str) -> str:
        """What messages call the file."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """All of it; only a byte more than ``limit_bytes`` where it is longer. Raises ``StateFileError``."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""


@dataclass(frozen=True)
class FolderSource:
    """A folder of this machine."""

    folder: Path

    def place(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                return file.read(min(os.fstat(file.fileno()).st_size, limit_bytes) + 1)
        except OSError as error:
            raise StateFileError(f"{path}: cannot be read: {error}") from error

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


def refuse(place: str, field: str, expected: str, found: str) -> StateFileError:
    """The refusal of a file: which, what of it, what was expected."""
    return StateFileError(f"{place}: {field}: expected {expected}, not {found}")
