"""``shoal``, but it kills itself around a journal entry: ``doomed_host.py WHEN EVENT ROUND host RUN.toml …``.

``WHEN`` is ``before`` (decided, not in the journal yet) or ``after`` (in the journal, nobody has heard of it);
``EVENT`` is the kind of event and ``ROUND`` the first round in which it counts. The kind ``LeaseAhead`` is a
``LeaseGranted`` for the round after the one that is open. ``WHEN`` may be ``at``, and ``EVENT`` a stage of a secure
round, that it is about to begin.
"""

import os
import signal
import sys
from collections.abc import Sequence

from shoal.peer.cli.main import main
from shoal.swarm.coordinator.events import JournalEvent, LeaseGranted, RoundClosing, RoundPlanned, VerdictGiven
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.protocol.secure import SecureStage
from shoal.swarm.secure.board import SecureBoard


def number_of(event: JournalEvent) -> int | None:
    match event:
        case RoundPlanned():
            return event.plan.round
        case VerdictGiven():
            return event.verdict.round
        case RoundClosing():
            return event.round
        case LeaseGranted():
            return event.round
    return None


def arm(when: str, kind: str, first_round: int) -> None:
    real = LocalJournal.append
    open_round = 0

    def kind_of(event: JournalEvent) -> str:
        ahead = isinstance(event, LeaseGranted) and event.round > open_round
        return "LeaseAhead" if ahead else type(event).__name__

    def write(self: LocalJournal, expected_index: int, events: Sequence[JournalEvent]) -> None:
        nonlocal open_round
        numbers = [number_of(event) for event in events if kind_of(event) == kind]
        open_round = max([open_round, *(one.verdict.round + 1 for one in events if isinstance(one, VerdictGiven))])
        fatal = any(number is not None and number >= first_round for number in numbers)
        if fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, expected_index, events)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    LocalJournal.append = write  # type: ignore[method-assign]


def arm_stage(fatal: SecureStage, first_round: int) -> None:
    real = SecureBoard._begin

    def begin(self: SecureBoard, stage: SecureStage, now_s: float) -> None:
        if stage == fatal and self._plan.round >= first_round:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, stage, now_s)

    SecureBoard._begin = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    _, when, kind, first_round, *arguments = sys.argv
    if when == "at":
        arm_stage(SecureStage[kind], int(first_round))
    else:
        arm(when, kind, int(first_round))
    sys.argv = ["shoal", *arguments]
    main()
