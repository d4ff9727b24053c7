"""Operating systems: what Linux, macOS and Windows do not all have, each with a plain fallback.

``fcntl`` and ``resource`` are None where there are none. All else is decided when it is used.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

__all__ = [
    "allow_files",
    "call_on_signals",
    "fcntl",
    "flags",
    "is_private",
    "most_files",
    "read_at",
    "resource",
    "run_loop",
    "set_mode",
]

T = TypeVar("T")

_MANY_FILES = 2**20
"""Open files of a process where there is no limit, or none that can be read."""


# Loops and signals ------------------------------------------------------------------------------------------


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, on a loop that can watch sockets: Windows' usual one cannot."""
    import asyncio  # slow to import, and help and wrong arguments need none

    if sys.platform != "win32":
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(main)


def call_on_signals(stop: Callable[[], object]) -> None:
    """Call ``stop`` on the running loop when SIGINT or SIGTERM asks this process to end. For the main thread."""
    import asyncio

    loop = asyncio.get_running_loop()

    def ask(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # Windows
            signal.signal(number, ask)


# Files ------------------------------------------------------------------------------------------------------

_seeking = threading.Lock()


def flags(*names: str) -> int:
    """Return flags of ``os.open``, those that this system has; and that bytes are kept as they are, on Windows."""
    found = 0
    for name in (*names, "O_BINARY"):
        found |= getattr(os, name, 0)
    return found


def read_at(descriptor: int, size_bytes: int, offset_bytes: int) -> bytes:
    """Read at a place of a file, from any thread. Raises ``OSError``."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size_bytes, offset_bytes)
    with _seeking:
        os.lseek(descriptor, offset_bytes, os.SEEK_SET)
        return os.read(descriptor, size_bytes)


def set_mode(descriptor: int, mode: int) -> None:
    """Set who may read an open file, where files have modes. Raises ``OSError``."""
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


def is_private(mode: int) -> bool:
    """Whether only the owner may read a file of this mode. Where files have none, its folder decides that."""
    return not mode & 0o077 or not hasattr(os, "geteuid")


# Limits -----------------------------------------------------------------------------------------------------


def most_files() -> int:
    """Return how many files and sockets this process may have open."""
    if resource is None:
        return _MANY_FILES
    soft: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MANY_FILES if soft == resource.RLIM_INFINITY else soft


def allow_files(wanted: int) -> int:
    """Raise the soft limit of open files towards ``wanted``; returns the limit reached, ``wanted`` at most."""
    soft = most_files()
    if resource is None or soft >= wanted:
        return min(soft, wanted)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft
    return wanted
