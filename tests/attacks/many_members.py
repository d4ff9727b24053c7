"""Many members in as many processes, which share one copy of what they import: ``many_members.py COUNT join INVITE …``.

Each makes a step in ``REST_S``: one batch in a round, and so next to no work."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from shoal.peer.cli.main import main
from shoal.peer.training.inner_loop import InnerLoop

REST_S = 4.0
_PR_SET_PDEATHSIG = 1


def rest() -> None:
    real = InnerLoop.backward

    def backward(self: InnerLoop, batch: Any) -> Any:
        time.sleep(REST_S)
        return real(self, batch)

    InnerLoop.backward = backward  # type: ignore[method-assign]


def start(number: int, arguments: list[str]) -> int:
    """Start one member, with files of its own; return its process id."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for option in ("--identity", "--state", "--name", "--log-json"):
        arguments[arguments.index(option) + 1] += f"-{number}"
    sys.argv = ["shoal", *arguments]
    rest()
    main()
    os._exit(0)


if __name__ == "__main__":
    children = [start(number, sys.argv[2:]) for number in range(int(sys.argv[1]))]

    def stop(number: int, _: object) -> None:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, number)

    signal.signal(signal.SIGINT, stop)
    for child in children:
        os.waitpid(child, 0)
