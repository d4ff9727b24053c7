"""The host's process under ``supervisor.py``: ``shoal`` that ends when its supervisor does, however that was ended.

Otherwise a supervisor that was killed would leave a host behind that nobody expects, with the port and the journal."""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """``python -m shoal.peer.cli.supervised LIFELINE host …``: a pipe's descriptor that the supervisor holds open."""
    lifeline = int(sys.argv.pop(1))
    threading.Thread(target=_end_with_supervisor, args=(lifeline,), daemon=True).start()
    # Only now: a supervisor may end while that takes its seconds.
    from shoal.peer.cli.cli import main as shoal

    shoal()


def _end_with_supervisor(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
