"""``shoal``, but it kills itself around a journal entry: ``doomed_host.py WHEN FACT ROUND host RUN.toml …``.

``WHEN`` is ``before`` (decided, not in the journal yet) or ``after`` (in the journal, nobody has heard of it);
``FACT`` is the kind of fact and ``ROUND`` the first round in which it counts.
"""

import os
import signal
import sys
from collections.abc import Sequence

from shoal.peer.cli import main
from shoal.swarm.coordinator.facts import Fact, LeaseGranted, RoundClosing, RoundPlanned, VerdictGiven
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
            return 0
    return None


def arm(when: str, kind: str, first_round: int) -> None:
    real = Journal.write

    def write(self: Journal, facts: Sequence[Fact]) -> None:
        numbers = [number_of(fact) for fact in facts if type(fact).__name__ == kind]
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
