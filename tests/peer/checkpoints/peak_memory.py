"""Peak of this process's memory, as the kernel counts it: torch's memory is not Python's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
T = TypeVar("T")


def _read(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def peak_bytes(work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of ``work``, and by how much memory grew at most while it ran."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        pytest.skip("the kernel does not count the peak anew")
    before = _read("VmRSS")
    result = work()
    return result, _read("VmHWM") - before
