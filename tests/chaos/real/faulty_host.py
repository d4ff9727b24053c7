"""``shoal host`` with named steps at which it carries out an order of a test: ``faulty_host.py FOLDER host …``.

The order is one file, ``order``: a moment, a signal, and the process that gets it, 0 for the one that comes there. It
is moved to ``done`` by the process that comes to that moment first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.peer.cli.main import main
from shoal.swarm.coordinator.events import JournalEvent, RoundPlanned, verdicts_in
from shoal.swarm.coordinator.shared_journal import SharedJournal

_IN_THE_EXCHANGE_S = 0.05


class Steps:
    """``comes_to`` is called at each step, from any thread."""

    def __init__(self, folder: Path) -> None:
        self._order, self._done = folder / "order", folder / "done"

    def comes_to(self, moment: str) -> None:
        try:
            order = json.loads(self._order.read_text())
            if order["moment"] != moment:
                return
            self._order.rename(self._done)
        except FileNotFoundError:  # there is none, or another process was first
            return
        os.kill(order["pid"] or os.getpid(), getattr(signal, order["signal"]))


def arm(steps: Steps) -> None:
    append, renew, begin = SharedJournal.append, SharedJournal.renew, SharedJournal.begin

    def written(journal: SharedJournal, expected_index: int, events: Sequence[JournalEvent]) -> None:
        plans = any(isinstance(one, RoundPlanned) for one in events)
        what = "verdict" if verdicts_in(events) else "plan" if plans else "other decision"
        steps.comes_to(f"before a {what} is written")
        append(journal, expected_index, events)
        steps.comes_to(f"a {what} is written and nobody was told")
        if plans:
            threading.Timer(_IN_THE_EXCHANGE_S, steps.comes_to, ["while members average"]).start()

    def renewed(journal: SharedJournal) -> None:
        steps.comes_to("before a renewal")
        renew(journal)

    def begun(journal: SharedJournal, run: Any) -> int | None:
        epoch = begin(journal, run)
        if epoch is not None:
            steps.comes_to("a lease is taken")
        return epoch

    SharedJournal.append = written  # type: ignore[method-assign]
    SharedJournal.renew = renewed  # type: ignore[method-assign]
    SharedJournal.begin = begun  # type: ignore[method-assign]
    SharedJournal.compact_at_bytes = 2**30  # the test reads the whole log at the end


if __name__ == "__main__":
    _, folder, *arguments = sys.argv
    arm(Steps(Path(folder)))
    sys.argv = ["shoal", *arguments]
    main()
