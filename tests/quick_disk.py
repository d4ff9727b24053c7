"""Flushes to the disk that return at once, in every process that imports this before ``shoal``.

What a flush is for, a machine without power, no test can cause: processes that are killed lose nothing that they wrote.
It costs 4 ms on an idle disk and far more on a busy one, and a round of a test has dozens. A call for a descriptor that
is not open fails as before.
"""

from __future__ import annotations

import os
from typing import Any


def _flushed(descriptor: Any) -> None:
    os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())


os.fsync = _flushed
if hasattr(os, "fdatasync"):
    os.fdatasync = _flushed
