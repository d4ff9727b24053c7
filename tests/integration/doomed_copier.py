"""``shoal``, but it kills itself at a named step of copying or restoring: ``doomed_copier.py STEP NAME join INVITE …``.

It sends itself a SIGKILL where it comes to the step with a file whose name begins with ``NAME``.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from slow_member import slow_down

from shoal.peer.checkpoints.remote.restore import CheckpointRestorer
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.cli.main import main


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sending(name: str) -> None:
    """Kill itself when half of the file is at the URL."""
    real = RemoteStore.put

    def put(self: Any, local: Path, path: str) -> None:
        if local.name.startswith(name):
            half = local.with_name(f".{local.name}.half")
            half.write_bytes(local.read_bytes()[: local.stat().st_size // 2])
            real(self, half, path)
            die()
        real(self, local, path)

    RemoteStore.put = put  # type: ignore[method-assign]


def sent(name: str) -> None:
    """Kill itself when the file is at the URL and not yet in the ledger."""
    real = RemoteStore.put

    def put(self: Any, local: Path, path: str) -> None:
        real(self, local, path)
        if local.name.startswith(name):
            die()

    RemoteStore.put = put  # type: ignore[method-assign]


def reading(name: str) -> None:
    """Kill itself when the file is about to be downloaded."""
    real = RemoteStore.read

    def read(self: Any, path: str, start: int, stop: int) -> bytes:
        if path.rpartition("/")[2].startswith(name):
            die()
        return real(self, path, start, stop)

    RemoteStore.read = read  # type: ignore[method-assign]


def installing(name: str) -> None:
    """Kill itself when all files are here and the folder does not have its name yet."""
    CheckpointRestorer._install = lambda self, incoming, place: die()  # type: ignore[method-assign]


STEPS = {step.__name__: step for step in (sending, sent, reading, installing)}

if __name__ == "__main__":
    _, step, name, *arguments = sys.argv
    slow_down(0.02)
    STEPS[step](name)
    sys.argv = ["shoal", *arguments]
    main()
