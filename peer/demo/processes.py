"""The processes of a demo: started, watched on the board, killed, and all ended with it.

Each has a folder, into which it logs its events as JSON lines. Those events are all that the demo knows of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from shoal.peer.demo.board import Board
from shoal.peer.event_schema import Event
from shoal.peer.terminal.events import printable
from shoal.swarm.errors import RunEnded, StorageError
from shoal.swarm.protocol.run_file import RunSection

_LEAVE_S = 5.0
_TAIL_LINES = 20


class EventFile:
    """A file with one JSON event a line that another process is still writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def new(self) -> list[Event]:
        """The events since the last call. A line without its end is left for later: its writer may be dead."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        events = [json.loads(line) for line in whole.splitlines() if line]
        return [event for event in events if isinstance(event, dict)]


class Child:
    """One process of ours with its folder: ``log.txt`` and ``events.jsonl`` in it. It can be started again."""

    def __init__(self, name: str, folder: Path, arguments: list[str]) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / "log.txt"
        self.file = EventFile(folder / "events.jsonl")
        self.events: list[Event] = []
        self.killed = False
        folder.mkdir(parents=True)
        own = ["--state", folder / "state", "--identity", folder / "identity", "--log-json", folder / "events.jsonl"]
        self._command = [sys.executable, "-m", "shoal.peer", *arguments, *map(str, own)]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def take_events(self) -> list[Event]:
        new = self.file.new()
        self.events += new
        return new

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """The same command, after ``kill``."""
        assert self.killed
        self.killed = False
        self.process = self._start()

    def ask_to_end(self) -> None:
        if self.is_running:
            self.process.terminate()

    def end(self) -> None:
        """Wait a little, then insist."""
        try:
            self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self) -> Panel:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        words = "\n".join(printable(line) for line in lines) or "(it said nothing)"
        return Panel(Text(words), title=str(self.log), title_align="left", border_style="red")


def fresh_folder(out: Path) -> Path:
    """A new folder named by the time. Raises ``StorageError``."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        folder = out / (f"{stamp}-{attempt}" if attempt else stamp)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError(f"{folder}: cannot be made: {error}") from error
        return folder
    raise StorageError(f"{out}: no new folder can be made there")


_START_S = 90.0
_POLL_S = 0.25
_AFTERWARDS_S = 90.0


class DemoFailed(Exception):
    """A process of the demo did not do its part; ``args`` are a sentence and that process."""


class Act(Protocol):
    """A demo's actions on its processes."""

    def begin(self, swarm: DemoSwarm) -> None:
        """The coordinator is there: start the peers."""
        ...

    def act(self, swarm: DemoSwarm, passed_s: float) -> None:
        """Called all the time while there are peers, ``passed_s`` after the coordinator's start."""
        ...


class DemoSwarm:
    """A coordinator and its peers, each with a folder in ``folder``; the context ends them all."""

    def __init__(self, folder: Path, toml: str, ends: RunSection, console: Console) -> None:
        """``ends``: after how many seconds, at the latest, and maybe rounds."""
        assert ends.max_s is not None
        self.folder = folder
        self.run_s = ends.max_s
        self.console = console
        self.peers: dict[str, Child] = {}
        self.started = time.time()
        self.invite = ""
        self._toml = toml
        self._board = Board(console, self.run_s, ends.rounds)
        self._host: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Peers first: they say goodbye to the coordinator.
        for group in (list(self.peers.values()), [self._host] if self._host else []):
            for child in group:
                child.ask_to_end()
            for child in group:
                child.end()

    @property
    def host(self) -> Child:
        """The coordinator, once it was started."""
        assert self._host is not None
        return self._host

    def run(self, course: Act) -> list[str]:
        """Until every peer has ended by itself; returns the names of those that did not, in bounded time."""
        self.console.print(Text.assemble("Everything goes to ", (str(self.folder), "cyan")))
        (self.folder / "run.toml").write_text(self._toml)
        with self._board:
            self._start_host()
            course.begin(self)
            deadline = self.started + self.run_s + _AFTERWARDS_S
            while time.time() < deadline and any(child.is_running for child in self.peers.values()):
                course.act(self, time.time() - self.started)
                self._look()
                time.sleep(_POLL_S)
            self._look()
        return [child.name for child in self.peers.values() if child.is_running]

    def _start_host(self) -> None:
        folder = self.folder / "host"
        arguments = ["host", str(self.folder / "run.toml"), "--bind", "127.0.0.1:0"]
        self.say("the coordinator starts")
        self._host = Child("host", folder, arguments)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._look()
            for path in (folder / "state").glob("**/invite.txt"):
                text = path.read_text()
                if text.endswith("\n"):
                    self.started = time.time()
                    self._board.start_clock()
                    self.invite = text.strip()
                    return
            time.sleep(_POLL_S)
        raise DemoFailed(f"the coordinator gave no invite within {_START_S:.0f} s", self._host)

    def start_peer(self, name: str, mark: str = "", extra: tuple[str, ...] = ()) -> None:
        """One that joins with ``extra`` options; ``mark`` says something about it."""
        self._board.add(name, mark)
        self.say(f"{name} starts{f' ({mark})' if mark else ''}")
        arguments = ["join", self.invite, "--name", name, "--bind", "127.0.0.1", "--threads", "1", "--device", "cpu"]
        self.peers[name] = Child(name, self.folder / name, [*arguments, *extra])

    def kill(self, name: str, why: str = "") -> None:
        """SIGKILL."""
        victim = self.peers[name]
        victim.kill()
        self._board.mark(name, "killed", "SIGKILL")
        self.say(f"{name}{f', {why},' if why else ''} is killed (SIGKILL to process {victim.process.pid})")

    def start_again(self, name: str) -> None:
        """A killed peer comes back."""
        self.peers[name].start_again()
        self._board.mark(name, "starting", "came back")
        self.say(f"{name} starts again, with the same command")

    def say(self, words: str) -> None:
        """A line on the board."""
        self._board.say(words)

    def _look(self) -> None:
        """Take in what was logged, and notice who died. Raises ``DemoFailed``."""
        for child in self.peers.values():
            for event in child.take_events():
                if not child.killed:
                    self._board.feed_peer(child.name, event)
        if self._host is not None:
            for event in self._host.take_events():
                self._board.feed_host(event)
        self._board.refresh()
        for child in [*self.peers.values(), *([self._host] if self._host else [])]:
            code = child.process.poll()
            # The coordinator serves until it is told to stop; a peer that started again may come too late.
            fine = () if child is self._host else (0, RunEnded.exit_code)
            if code is not None and not child.killed and code not in fine:
                raise DemoFailed(f"{child.name} ended with exit code {code}", child)

    def take_last_events(self) -> None:
        """Read the events that were logged after the last look."""
        for child in [self.host, *self.peers.values()]:
            child.take_events()
