"""Sources of a checkpoint's files, and the error by which all of their readers refuse a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from shoal.peer.regular_file import open_regular, read_regular
from shoal.swarm.errors import StateFileError

_BLOCK_BYTES = 512
"""Unit of ``st_blocks``."""

_FEW_BYTES, _MOST_HOLLOW = 2**26, 64
"""A file that is larger than this, and so many times as large as what the disk holds of it, is refused: it costs who
made it nothing, and would be read for hours."""


class FileContent(Protocol):
    """Content of an open file of a checkpoint, for one thread; reading in order is cheapest."""

    @property
    def size_bytes(self) -> int:
        """Size of the content."""

    def read_into(self, at: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``at`` on. Raises ``StateFileError``, also where the content ends before."""


class CheckpointSource(Protocol):
    """The files of one checkpoint, by name. Nothing that is read is trusted."""

    def place(self, name: str) -> str:
        """The file's name in messages."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """The whole file, or one byte more than ``limit_bytes`` of a longer one. Raises ``StateFileError``."""

    def open(self, name: str) -> AbstractContextManager[FileContent]:
        """Open a file, to be read piece by piece. Raises ``StateFileError``."""

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

    @contextmanager
    def open(self, name: str) -> Iterator[FileContent]:
        path = self.folder / name
        try:
            file = open_regular(path, buffering=0)
        except OSError as error:
            raise StateFileError(f"{path}: cannot be read: {error}") from error
        with file:
            yield _OpenFile(file, str(path), os.fstat(file.fileno()).st_size)

    def size_bytes(self, name: str) -> int:
        path = self.folder / name
        try:
            with open_regular(path) as file:
                about = os.fstat(file.fileno())
        except OSError as error:
            raise StateFileError(f"{path}: cannot be read: {error}") from error
        stored_bytes = _BLOCK_BYTES * getattr(about, "st_blocks", about.st_size)
        if about.st_size > _FEW_BYTES + _MOST_HOLLOW * stored_bytes:
            raise refusal(str(path), "content", f"{about.st_size} bytes", f"{stored_bytes} and holes")
        return about.st_size

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


@dataclass
class _OpenFile:
    """An unbuffered file of this machine (a ``FileContent``)."""

    file: BinaryIO
    place: str
    size_bytes: int

    def read_into(self, at: int, out: memoryview) -> None:
        try:
            self.file.seek(at)
            while out.nbytes:
                count = self.file.readinto(out)  # type: ignore[attr-defined]
                if not count:
                    raise refusal(self.place, "size", f"{self.size_bytes} bytes", "less")
                out = out[count:]
        except OSError as error:
            raise StateFileError(f"{self.place}: cannot be read: {error}") from error


def refusal(place: str, field: str, expected: str, found: str) -> StateFileError:
    """The error for a file whose ``field`` is not as expected."""
    return StateFileError(f"{place}: {field}: expected {expected}, not {found}")
