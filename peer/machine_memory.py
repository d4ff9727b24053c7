"""This machine's main memory: how much there is, how much is free, and sizes as people write them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
from rich import filesize

from shoal.swarm.errors import DeviceError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_CGROUP = Path("/sys/fs/cgroup")


def parse_memory(text: str, option: str = "--max-memory") -> int:
    """Convert an option's size, such as ``8G``, ``500M`` or ``1.5 GiB``, to bytes. Raises ``DeviceError``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise DeviceError(f"{option} {text}: expected a size such as 8G or 500M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_text(size_bytes: int) -> str:
    """``1.5 GiB``: powers of 1024, as ``parse_memory`` reads them."""
    unit, name = filesize.pick_unit_and_suffix(size_bytes, ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{size_bytes / unit:.1f} {name}"


def machine_bytes() -> int:
    """Return the size of the machine's memory."""
    return int(psutil.virtual_memory().total)


def free_machine_bytes() -> int:
    """Return the bytes that programs can use without swapping, within the limit of this container, if any."""
    free, limit = int(psutil.virtual_memory().available), _free_in_cgroup()
    return free if limit is None else min(free, limit)


def return_freed_memory() -> None:
    """Return memory that this process has freed to the system, where its allocator keeps it: glibc's.

    A round and the local work take blocks of other sizes, so what one leaves behind does not fit the other and would
    add up to several times the model. For a worker thread: it takes some milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None


def _free_in_cgroup() -> int | None:
    """Return the limit of a container (cgroup v2), which psutil ignores, less its use; None without a limit."""
    most, current = _read_cgroup("memory.max"), _read_cgroup("memory.current")
    if not (most.isdecimal() and current.isdecimal()):
        return None
    return max(0, int(most) - int(current))


def _read_cgroup(name: str) -> str:
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
