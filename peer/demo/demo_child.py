"""A process of the demo: started, listened to by the events it logs, ended by its process id."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from shoal.peer.terminal.events import Event, printable
from shoal.swarm.errors import StorageError

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
