"""The ``shoal`` command: a host under a supervisor, everything else at once."""

from __future__ import annotations

import sys

UNSUPERVISED = "--no-supervisor"


def main() -> None:
    """Imports only what it needs: a supervisor is there for as long as its host, and needs no torch."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["host"] and UNSUPERVISED not in arguments:
        from shoal.peer.cli.supervisor import Restarts, supervise

        sys.exit(supervise(arguments, Restarts()))
    from shoal.peer.cli.cli import main as shoal

    shoal()
