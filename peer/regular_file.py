"""Regular files of unknown origin, opened without blocking and read only if they fit into the free memory.

Opening a FIFO blocks until another process writes to it, and opening a device may do anything; both are refused.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from shoal.peer.machine_memory import free_machine_bytes
from shoal.swarm import system

_UNSEEN_BYTES = 64 * 2**20
"""Bytes that may be read without a check of the free memory."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


class NotRegular(OSError):
    """The path names a FIFO, a device, a socket or a folder."""


def open_regular(path: Path, mode: Literal["rb", "r+b", "ab"] = "rb", buffering: int = -1) -> BinaryIO:
    """Open as ``path.open`` does, without blocking. Raises ``OSError``, ``NotRegular`` for what is no regular file."""

    def opened(name: str, flags: int) -> int:
        with suppress(FileNotFoundError):  # os.open creates a missing file or raises
            _check(os.stat(name))  # before opening, which has effects on some devices
        descriptor = os.open(name, flags | system.flags("O_NONBLOCK", "O_CLOEXEC"), 0o666)
        try:
            _check(os.fstat(descriptor))  # the file may have been replaced since
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, buffering, opener=opened)


def read_regular(path: Path, limit_bytes: int | None = None) -> bytes:
    """Read a file; if it is longer than ``limit_bytes``, one byte more than those. Raises ``OSError``, also for lack of
    memory."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        wanted = size_bytes if limit_bytes is None else min(size_bytes, limit_bytes)
        check_memory(wanted)
        return file.read(wanted + 1)


def check_memory(needed_bytes: int) -> None:
    """Raise ``OSError`` if so many bytes are more than the free memory."""
    if needed_bytes > _UNSEEN_BYTES and needed_bytes > (free := free_machine_bytes()):
        raise OSError(f"{needed_bytes:,} bytes do not fit into memory, of which {free:,} bytes are free")


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotRegular(f"expected a regular file, not {kind}")
