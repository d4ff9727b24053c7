"""The processes of ``recovery.py``: a host and members on loopback, started, heard by their events, killed by id."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from shoal.peer.demo.processes import EventFile

PATIENCE_S = 6.0
STEPS_A_ROUND = 40
_PEER = Path(__file__).parent / "recovery_peer.py"
_LOOK_S = 0.005
_TAIL = 2000

Event = dict[str, Any]
Found = TypeVar("Found")


class NotRecovered(Exception):
    """Raised when an awaited event did not come in time, or its process ended; the message has the end of its log."""


def collected(rows: Iterable[Event]) -> list[Event]:
    """All of them, each printed as it comes; ends the script when one cannot be had."""
    found = []
    try:
        for row in rows:
            found.append(row)
            print(row, flush=True)
    except NotRecovered as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    return found


def run_toml(name: str, settings: str, steps_a_round: int, patience_s: float) -> str:
    """Run file of members with loops of their own: so many steps of all together are a round."""
    return f"""{settings}
[run]
name = "{name}"
seed = 1
[recipe]
name = "own"
[data]
source = "own"
[inner]
batch_samples = 1
[round]
tokens = {steps_a_round}
max_s = 600
patience_s = {patience_s}
"""


class Running:
    """A process, its log and its events; ``again`` starts the same command after a ``kill``."""

    def __init__(self, name: str, command: list[str], folder: Path, deadline_s: float, cwd: Path | None = None) -> None:
        self.folder, self.name = folder, name
        self.events: list[Event] = []
        self._command, self._deadline_s, self._cwd = command, deadline_s, cwd
        self._log = folder / "log.txt"
        self._file = EventFile(folder / "events.jsonl")
        self.again()

    def again(self) -> None:
        self.started_s = time.time()
        self.said_before = len(self.text())
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self._cwd)

    def kill(self) -> float:
        """SIGKILL. Returns the moment."""
        moment_s = time.time()
        self.process.kill()
        self.process.wait()
        return moment_s

    def tell(self) -> None:
        """A line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def look(self) -> list[Event]:
        """All events so far."""
        self.events += self._file.new()
        return self.events

    def wait_for(self, what: str, found: Callable[[Event], bool], *, may_end: bool = False) -> Event:
        """The first event like that. Raises ``NotRecovered``."""
        return self.until(what, lambda: next(filter(found, self.look()), None), may_end=may_end)

    def until(self, what: str, look: Callable[[], Found | None], *, may_end: bool = False) -> Found:
        """Return what ``look`` gives as soon as that is something. Raises ``NotRecovered``."""
        while True:
            ended = not may_end and self.process.poll() is not None
            if found := look():
                return found
            if ended or time.monotonic() > self._deadline_s:
                why = f"ended with {self.process.returncode}" if ended else "took too long"
                raise NotRecovered(f"{self.name} {why}, waiting for {what}:\n{self.text()[-_TAIL:]}")
            time.sleep(_LOOK_S)


class Site:
    """A run's host and members in a folder; all of them are killed at the end."""

    def __init__(self, folder: Path, elements: int, members: int, limit_s: float) -> None:
        self._folder, self._elements = folder, elements
        self._deadline_s = time.monotonic() + limit_s
        self._all: list[Running] = []
        place = self._place("host")
        toml = run_toml("recovery", 'averaging.codec = "int8"', members * STEPS_A_ROUND, PATIENCE_S)
        (place / "run.toml").write_text(toml)
        where = ["--bind", "127.0.0.1:0", "--state", str(place / "state"), "--identity", str(place / "identity")]
        log = ["--log-json", str(place / "events.jsonl")]
        self.host = self._start(
            "host",
            ["-m", "shoal.peer", "host", str(place / "run.toml"), "--no-supervisor", "--no-keep-model", *where, *log],
            place,
        )
        self.await_invite()
        self.invite = next((place / "state").glob("*/invite.txt")).read_text().strip()

    def await_invite(self) -> float:
        """From the host's start until it has said how to join, seconds."""
        host = self.host
        host.until("the invite", lambda: "shoal join" in host.text()[host.said_before :])
        return time.time() - host.started_s

    def peer(self, task: str) -> Running:
        place = self._place(f"{task}-{len(self._all)}")
        return self._start(place.name, [str(_PEER), task, self.invite, str(self._elements), str(place)], place)

    def verdict(self, after_s: float, committed: bool = True) -> Event:
        """The first after that moment."""

        def found(event: Event) -> bool:
            fits = event["event"] == "verdict" and event["time"] > after_s
            return bool(fits and (event["committed"] or not committed))

        return self.host.wait_for("a verdict", found)

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(parents=True)
        return place

    def _start(self, name: str, arguments: list[str], place: Path) -> Running:
        self._all.append(Running(name, [sys.executable, *arguments], place, self._deadline_s))
        return self._all[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._all:
            one.kill()
