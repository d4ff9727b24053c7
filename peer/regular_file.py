"""Files that others may have put here, opened and read without being held up and within the memory that there is.

To open a FIFO waits for somebody to write, and a device may do anything; neither is ever a file of a checkpoint.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from shoal.peer.machine_memory import free_machine_bytes

_UNSEEN_BYTES = 64 * 2**20
"""So much is read without a look at how much memory there is."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


class NotRegular(OSError):
    """It is a FIFO, a device, a socket or a folder."""


def open_regular(path: Path, mode: Literal["rb", "r+b", "ab"] = "rb", buffering: int = -1) -> BinaryIO:
    """As ``path.open``, at once. Raises ``OSError``; ``NotRegular`` for what is no regular file."""

    def opened(name: str, flags: int) -> int:
        with suppress(FileNotFoundError):  # it is for the next line to make it, or to say so
            _check(os.stat(name))  # to open some devices does something already
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            _check(os.fstat(descriptor))  # it may be another one by now
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, buffering, opener=opened)


def read_regular(path: Path, limit_bytes: int | None = None) -> bytes:
    """All of it; only a byte more than ``limit_bytes`` where it is longer. Raises ``OSError``, also for what does not
    fit into memory."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        wanted = size_bytes if limit_bytes is None else min(size_bytes, limit_bytes)
        check_memory(wanted)
        return file.read(wanted + 1)


def check_memory(needed_bytes: int) -> None:
    """Raises ``OSError`` when so much is more than there is free now."""
    if needed_bytes > _UNSEEN_BYTES and needed_bytes > (free := free_machine_bytes()):
        raise OSError(f"expected what fits into memory, of which {free:,} bytes are free, not {needed_bytes:,} bytes")


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotRegular(f"expected a regular file, not {kind}")
