"""``shoal``, but every entry in the journal takes half a second; it says so: ``slow_disk_host.py host RUN.toml …``."""

import time
from collections.abc import Sequence

from shoal.peer.cli.main import main
from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.local_journal import LocalJournal


def slow_down() -> None:
    real = LocalJournal.append

    def write(self: LocalJournal, expected_index: int, events: Sequence[JournalEvent]) -> None:
        kinds = " ".join(type(event).__name__ for event in events)
        print("writing", kinds, flush=True)
        time.sleep(0.5)
        real(self, expected_index, events)
        print("written", kinds, flush=True)

    LocalJournal.append = write  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    main()
