"""Usage of the machine by a process and its descendants: CPU seconds, peak memory. Mostly from Linux' /proc."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_RESET_PEAK = "5"


def descendants(pid: int) -> Iterator[int]:
    """Children, their children and so on, of what is alive now; none where there is no /proc."""
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield int(child)
                    yield from descendants(int(child))


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of one process so far, in the kernel's ticks; 0 of one that is gone."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Of this process and its living descendants."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime + sum(cpu_s(pid) for pid in descendants(os.getpid()))


def available_bytes() -> float:
    """Return the bytes that processes may still take of the machine's memory; infinite where that cannot be known."""
    try:
        return status_bytes((_PROC / "meminfo").read_text(), "MemAvailable")
    except OSError:
        return float("inf")


def rss_bytes(pid: int) -> int:
    """Return the bytes that the process has in memory now."""
    return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Peak of this process's memory above what it has at the moment of ``begin``."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._first: int | None = None

    def begin(self) -> None:
        """Give back what is free, and forget earlier peaks where the kernel lets us."""
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            (_PROC / "self" / "clear_refs").write_text(_RESET_PEAK)
            self._before = status_bytes((_PROC / "self" / "status").read_text(), "VmRSS")
        except OSError:
            self._before = None
        if self._first is None:
            self._first = self._before

    def risen_bytes(self) -> int | None:
        """Since ``begin``; None where it cannot be known."""
        return self._above(self._before)

    def risen_in_all_bytes(self) -> int | None:
        """At the most since ``begin``, above what it had at the first one."""
        return self._above(self._first)

    @staticmethod
    def _above(level: int | None) -> int | None:
        if level is None:
            return None
        return max(0, status_bytes((_PROC / "self" / "status").read_text(), "VmHWM") - level)


def status_bytes(status: str, field: str) -> int:
    """A field of /proc/PID/status, or of others like it, in bytes. Raises ``ValueError`` where there is none."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc has no {field}")


def kill_tree(pid: int) -> None:
    """SIGKILL to the process and to whatever it has started, by their ids."""
    for one in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
