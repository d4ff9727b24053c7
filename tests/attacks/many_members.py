"""Many members in as many processes, which share one copy of what they import: ``many_members.py COUNT join INVITE …``.

Each asks for one batch in a round, and no more."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

from shoal.peer.cli.main import main
from shoal.peer.member.member import LocalMember
from shoal.swarm.protocol.types import SampleRange
from shoal.swarm.sample_ranges import Ranges

_PR_SET_PDEATHSIG = 1


def do_little() -> None:
    real = LocalMember.lease

    async def lease(self: LocalMember, samples: int, undone: Ranges) -> tuple[SampleRange, ...]:
        return () if self.progress.tokens_done else await real(self, 1, undone)

    LocalMember.lease = lease  # type: ignore[method-assign]


def start(number: int, arguments: list[str]) -> int:
    """Start one member, with files of its own; return its process id."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for option in ("--identity", "--state", "--name", "--log-json"):
        arguments[arguments.index(option) + 1] += f"-{number}"
    sys.argv = ["shoal", *arguments]
    do_little()
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
