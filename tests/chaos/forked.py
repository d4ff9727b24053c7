"""Members forked from a process that has imported everything: what takes seconds of CPU otherwise takes none, so that
many can come and go on a small machine. Processes of their own in everything else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.integration.harness import Member, Spawned, Swarm

_CALM_S = 0.02
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.chaos.forked", "shoal.peer.cli", "shoal.peer.recipes.gpt", "torch._dynamo"])


class Forked:
    """The few things that are asked of a ``Popen``."""

    def __init__(self, arguments: Sequence[str], log: Path, cwd: Path) -> None:
        self._process = _SERVER.Process(target=_live, args=(list(arguments), log, cwd))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


class ForkedMember(Member):
    """``command`` begins with ``join``."""

    def _spawn(self) -> Spawned:
        return Forked(self.command, self.log, self._cwd)


def forked_members(swarm: Swarm, invite: str, labels: Sequence[str]) -> list[Member]:
    """Returns at once."""
    return [swarm.member(invite, label, launcher=(), kind=ForkedMember) for label in labels]


def _end_with_starter() -> None:
    """However that ends; the process that we were forked from goes on for as long as we do."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _live(arguments: list[str], log: Path, cwd: Path) -> None:
    from tests.integration.slow_member import slow_down

    from shoal.peer.cli import main

    threading.Thread(target=_end_with_starter, daemon=True).start()
    os.setpgid(0, 0)  # a Ctrl-C in the terminal is for whoever started us
    os.chdir(cwd)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    slow_down(_CALM_S)
    sys.argv = ["shoal", *arguments]
    main()
