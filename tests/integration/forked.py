"""Processes forked from one that has imported everything: the imports' two seconds of CPU are spent once,
so that many can come and go on a small machine. Processes of their own in everything else."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_IMPORTED = ["tests.quick_disk", "pytest", "shoal.peer.cli.main", "shoal.peer.recipes.gpt", "torch._dynamo", "numba"]
_SERVER.set_forkserver_preload(_IMPORTED)


def import_once(*modules: str) -> None:
    """Have further modules imported, in the process that later ones are forked from. Call it before anything runs."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    _SERVER.set_forkserver_preload([*_IMPORTED, *modules])


def can_fork(command: Sequence[str]) -> bool:
    """Whether the command is a script or module for this Python, on a system where forking after imports is safe."""
    return (
        sys.platform == "linux"
        and command[0] == sys.executable
        and (command[1] == "-m" or not command[1].startswith("-"))
    )


class Forked:
    """The part of ``Popen`` that tests use. ``command``: one for which ``can_fork`` holds."""

    def __init__(self, command: Sequence[str], log: Path, cwd: Path) -> None:
        log.touch()
        self._process = _SERVER.Process(target=_live, args=(list(command), log, cwd), daemon=True)
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


def _end_with_starter() -> None:
    """End with the process that started us, however it ends; the fork server outlives it."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _live(command: list[str], log: Path, cwd: Path) -> None:
    threading.Thread(target=_end_with_starter, daemon=True).start()
    os.setpgid(0, 0)  # a Ctrl-C in the terminal is for whoever started us
    os.chdir(cwd)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    _, first, *rest = command
    if first == "-m":
        module, *arguments = rest
        sys.path.insert(0, str(cwd))
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
