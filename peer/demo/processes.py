"""Processes of a demo or a benchmark, each with a folder into which it logs its events as JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from shoal.peer.event_schema import Event
from shoal.peer.terminal.events import printable
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
    """A ``shoal`` command as a process; ``folder`` holds its ``log.txt`` and ``events.jsonl``."""

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
        """The events logged since the last call; all of them are kept in ``events``."""
        new = self.file.new()
        self.events += new
        return new

    def invite(self) -> str:
        """The invite of a host; empty until it has written one."""
        texts = [path.read_text() for path in (self.folder / "state").glob("*/invite.txt")]
        return next((text.strip() for text in texts if text.endswith("\n")), "")

    def page(self) -> str:
        """Address of the page of a host that has given an invite; empty without one."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.split()[1] for line in lines if line.startswith("Page  ")), "")

    def kill(self) -> None:
        """Send SIGKILL."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """Run the same command again after ``kill``."""
        assert self.killed
        self.killed = False
        self.process = self._start()

    def ask_to_end(self) -> None:
        if self.is_running:
            self.process.terminate()

    def end(self) -> None:
        """Wait a little, then kill it."""
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
    """Make a new folder in ``out``, named by the time. Raises ``StorageError``."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=out))
    except OSError as error:
        raise StorageError(f"{out}: no folder for the demo can be made there: {error}") from error
