"""Durable file operations: each change is on the disk when its function returns. Also the lock of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.swarm.errors import FolderInUse
from shoal.swarm.system import flags, set_mode

if TYPE_CHECKING:
    from filelock import FileLock

_sync_data = getattr(os, "fdatasync", os.fsync)


def append(descriptor: int, data: bytes) -> None:
    """Append ``data`` to a file that was opened with ``O_APPEND``. Raises ``OSError``."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    _sync_data(descriptor)


def cut(descriptor: int, size_bytes: int) -> None:
    """Truncate a file to ``size_bytes``. Raises ``OSError``."""
    os.ftruncate(descriptor, size_bytes)
    os.fsync(descriptor)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a whole file, replacing whatever was there. After a crash it may hold only a part of ``data``: write to a
    temporary name and ``replace``. Raises ``OSError``."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | flags(), mode)
    try:
        set_mode(descriptor, mode)  # independent of the umask
        append(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(file: IO[Any]) -> None:
    """Flush an open file to the disk. Raises ``OSError``."""
    file.flush()
    os.fsync(file.fileno())


def replace(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path`` atomically: after a crash ``path`` is either the old file or the new one.

    Raises ``OSError``."""
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that created and renamed files are found after a crash. Raises ``OSError``."""
    if not flags("O_DIRECTORY"):  # Windows opens no folders, and its renames are on the disk when they return
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a small file atomically, through a temporary file beside it. Raises ``OSError``."""
    new = path.with_name(path.name + ".new")
    write_whole(new, data, mode)
    replace(new, path)


def lock_folder(folder: Path) -> FileLock:
    """Lock a journal's folder for this process, until ``release`` or the end of the process, even by a kill.

    Raises ``FolderInUse`` when another process holds the lock, and ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock, Timeout  # slow to import, and few commands lock anything

    lock = FileLock(folder / "lock", blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(f"{folder}: another coordinator is using this journal; stop one of the two") from None
    return lock
