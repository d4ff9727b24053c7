"""Lifeline of a child process: a pipe that only its parent holds open, so that the child ends when the parent does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def end_with_parent(lifeline: int, before: Callable[[], object] = lambda: None) -> None:
    """Kill this process as soon as nobody holds the other end of the pipe ``lifeline``, however the parent ended.

    ``before``: called first, in a thread of its own."""

    def wait_for_end() -> None:
        os.read(lifeline, 1)
        before()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()
