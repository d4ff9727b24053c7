"""``shoal``, but it kills itself around a journal entry: ``doomed_host.py WHEN FACT ROUND host RUN.toml …``.

``WHEN`` is ``before`` (decided, not in the journal yet) or ``after`` (in the journal, nobody has heard of it);
``FACT`` is the kind of fact and ``ROUND`` the first round in which it counts. The kind ``LeaseAhead`` is a
``LeaseGranted`` for the round after the one that is open.
"""

import os
import signal
import sys
from collections.abc import Sequence

from shoal.peer.cli.main import main
from shoal.swarm.coordinator.events import Fact, LeaseGranted, RoundClosing, RoundPlanned, VerdictGiven
from shoal.swarm.coordinator.journal import Journal


def number_of(fact: Fact) -> int | None:
    match fact:
        case RoundPlanned():
            return fact.plan.round
        case VerdictGiven():
            return fact.verdict.round
        case RoundClosing():
            return fact.round
        case LeaseGranted():
            return fact.round
    return None


def arm(when: str, kind: str, first_round: int) -> None:
    real = Journal.write
    open_round = 0

    def kind_of(fact: Fact) -> str:
        ahead = isinstance(fact, LeaseGranted) and fact.round > open_round
        return "LeaseAhead" if ahead else type(fact).__name__

    def write(self: Journal, facts: Sequence[Fact]) -> None:
        nonlocal open_round
        numbers = [number_of(fact) for fact in facts if kind_of(fact) == kind]
        open_round = max([open_round, *(one.verdict.round + 1 for one in facts if isinstance(one, VerdictGiven))])
        fatal = any(number is not None and number >= first_round for number in numbers)
        if fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, facts)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = write  # type: ignore[method-assign]


if __name__ == "__main__":
    _, when, kind, first_round, *arguments = sys.argv
    arm(when, kind, int(first_round))
    sys.argv = ["shoal", *arguments]
    main()
