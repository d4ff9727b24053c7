"""Entry point of the ``shoal`` command: a host under a supervisor, every other command in this process."""

from __future__ import annotations

import os
import sys

UNSUPERVISED = "--no-supervisor"

INVITE_VARIABLE = "SHOAL_INVITE"
"""Environment variable with the invite, for commands that take one: arguments are seen by all users of a machine."""


def main() -> None:
    """Run the command. Imports are late, so that a supervisor, which lives as long as its host, stays small."""
    arguments = sys.argv[1:]
    # Where a child gets no pipe (Windows), a host runs by itself: a service manager starts it again.
    if arguments[:1] == ["host"] and UNSUPERVISED not in arguments and hasattr(os, "fork"):
        from shoal.peer.cli.supervisor import Restarts, supervise

        sys.exit(supervise(arguments, Restarts()))
    from shoal.peer.cli.main import main as run_command

    run_command()
