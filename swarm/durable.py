"""The few things that may be done to a file that has to survive a crash; each is on the disk when it returns."""

from __future__ import annotations

import os
from pathlib import Path

_sync_data = getattr(os, "fdatasync", os.fsync)


def append(descriptor: int, data: bytes) -> None:
    """Write ``data`` at the end of a file that was opened with ``O_APPEND``. Raises ``OSError``."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    _sync_data(descriptor)


def cut(descriptor: int, size_bytes: int) -> None:
    """Forget what comes after ``size_bytes``. Raises ``OSError``."""
    os.ftruncate(descriptor, size_bytes)
    os.fsync(descriptor)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """All of a file's bytes, whatever was there. A crash may leave a part of them: follow it with ``replace``.

    Raises ``OSError``."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, mode)
    try:
        os.fchmod(descriptor, mode)  # whatever the umask says
        append(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(new: Path, path: Path) -> None:
    """``path`` is ``new`` from now on, or, when this machine dies, what it was. Raises ``OSError``."""
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in it, too, are on the disk. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a small file as a whole. Raises ``OSError``."""
    new = path.with_name(path.name + ".new")
    write_whole(new, data, mode)
    replace(new, path)
