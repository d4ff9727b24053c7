"""``shoal``, but every entry in the journal takes half a second; it says so: ``slow_disk_host.py host RUN.toml …``."""

import time
from collections.abc import Sequence

from shoal.peer.cli.main import main
from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.journal import Journal


def slow_down() -> None:
    real = Journal.write

    def write(self: Journal, events: Sequence[JournalEvent]) -> None:
        kinds = " ".join(type(event).__name__ for event in events)
        print("writing", kinds, flush=True)
        time.sleep(0.5)
        real(self, events)
        print("written", kinds, flush=True)

    Journal.write = write  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    main()
