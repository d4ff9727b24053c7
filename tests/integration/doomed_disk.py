"""``shoal host``, but it kills itself at a step of what it does to its disk:
``doomed_disk.py WHEN STEP FILE ROUND host RUN.toml …``.

``STEP`` is a function of ``swarm/durable.py`` and ``FILE`` the end of the path that it is done to; ``WHEN`` is
``before``, ``amid`` (half of it is written) or ``after``; ``ROUND``: so many rounds have to have ended. The journal is
compacted at every verdict."""

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.peer.cli.main import main
from shoal.swarm import durable
from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.local_journal import LocalJournal

Step = Callable[..., None]


def path_of(arguments: Sequence[Any]) -> str:
    """Path of the file that a step is about: its last argument, or that of its open descriptor."""
    if isinstance(arguments[-1], Path):
        return str(arguments[-1])
    if sys.platform == "darwin":
        return fcntl.fcntl(arguments[0], fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return os.readlink(f"/proc/self/fd/{arguments[0]}")


def arm(when: str, step: str, file: str, first_round: int) -> None:
    write, done = LocalJournal.append, getattr(durable, step)
    rounds = 0

    def written(self: LocalJournal, expected_index: int, events: Sequence[JournalEvent]) -> None:
        nonlocal rounds
        rounds = max(rounds, self.rounds)
        write(self, expected_index, events)
        rounds = self.rounds

    def fatal(*arguments: Any) -> None:
        if rounds < first_round or not path_of(arguments).endswith(file):
            done(*arguments)
            return
        if when == "amid":
            done(arguments[0], arguments[1][: len(arguments[1]) // 2])
        if when == "after":
            done(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    LocalJournal.append = written  # type: ignore[method-assign]
    setattr(durable, step, fatal)


if __name__ == "__main__":
    LocalJournal.wants_snapshot = property(lambda self: True)  # type: ignore[assignment, method-assign]
    if sys.argv[1] != "host":
        _, when, step, file, first_round, *arguments = sys.argv
        arm(when, step, file, int(first_round))
        sys.argv = ["shoal", *arguments]
    main()
