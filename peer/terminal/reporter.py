"""Progress of a session: the live panel or plain lines for people, one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from shoal.peer.event_schema import Event
from shoal.peer.terminal.events import plain_line
from shoal.peer.terminal.keyboard import without_echoed_signals
from shoal.peer.terminal.snapshot import Snapshot, Watched
from shoal.peer.terminal.speed import SpeedMeter
from shoal.peer.terminal.views import session_panel, status_line, status_table
from shoal.swarm.errors import ShoalError, StorageError

log = logging.getLogger(__name__)

_REFRESHES_A_SECOND = 4
_LINE_EVERY_S = 10.0
_HANDLER = "shoal-console"
_LASTING = frozenset({"joined", "span", "state_fetched", "donor_refused", "synced", "paused", "resumed"})
"""Events printed above the live panel, where they stay; in the panel, later events push lines out."""


def setup_logging(console: Console, verbose: bool) -> None:
    """Send log records to this console, above a live view if there is one. Other libraries log warnings only."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=verbose, log_time_format="%H:%M:%S", markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s  %(levelname)s: %(message)s", "%H:%M:%S"))
    handler.set_name(_HANDLER)
    root = logging.getLogger()
    for earlier in [one for one in root.handlers if one.get_name() == _HANDLER]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.INFO)


class JsonLines:
    """File of events, one JSON object a line, flushed at once. Raises ``StorageError`` when it cannot be opened; when
    it cannot be written later, one warning is logged and further events are dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Append: a peer that is restarted with the same command continues the same file.
            self._file: BinaryIO | None = path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{path}: events cannot be logged there: {error}") from error

    def write(self, event: Event) -> None:
        line = json.dumps(event, default=str).encode() + b"\n"
        trouble: OSError | None = None
        with self._lock:
            if self._file is None:
                return
            try:
                written = self._file.write(line)
                if written != len(line):
                    raise OSError(f"only {written} of {len(line)} bytes were written")
            except OSError as error:
                trouble = error
                self._file.close()
                self._file = None
        if trouble is not None:
            log.warning("%s: the event log cannot be written, so no more events are logged: %s", self._path, trouble)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class Reporter:
    """Shows a session on ``console`` and logs its events to ``json_path``.

    Give ``on_event`` to the session's options and the session to ``watch``. No failure here stops the training."""

    def __init__(self, console: Console, json_path: Path | None) -> None:
        self._console = console
        self._json_path = json_path
        self._json: JsonLines | None = None
        # Never held while printing: rich's refresh thread holds rich's own locks when it calls ``render``.
        self._lock = threading.Lock()
        self._losses: deque[float] = deque(maxlen=200)
        self._run_speed, self._own_speed = SpeedMeter(), SpeedMeter()
        self._lines: deque[str] = deque(maxlen=4)
        self._session: Watched | None = None
        self._snapshot: Snapshot | None = None
        self._live: Live | None = None
        self._ending = ExitStack()
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._json_path is not None:
            self._json = JsonLines(self._json_path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
        if self._live is not None:
            self._live.stop()
        self._ending.close()
        if self._json is not None:
            self._json.close()

    def record(self, event: Event) -> None:
        """Log the event without showing it. Thread-safe."""
        if self._json is not None:
            self._json.write(event)

    def on_event(self, event: Event) -> None:
        """Log the event and show it. Thread-safe."""
        self.record(event)
        line = plain_line(event)
        if event.get("event") in _LASTING or not self._console.is_terminal:
            self._print(line)
            return
        with self._lock:
            self._lines.append(line)

    def watch(self, session: Watched) -> None:
        """Show this session from now on: four times a second in a terminal, else every ten seconds."""
        self._session = session
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=_REFRESHES_A_SECOND,
            )
            self._ending.enter_context(without_echoed_signals())
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._tick, name="shoal-progress", daemon=True)
            self._ticker.start()

    def render(self) -> RenderableType:
        """Render the panel; a session that has failed keeps its last one."""
        self._look()
        with self._lock:
            losses, lines = list(self._losses), list(self._lines)
        if self._snapshot is None:
            return Text("joining …", style="dim")
        speeds = {"run_tokens_per_s": self._run_speed.per_s, "own_tokens_per_s": self._own_speed.per_s}
        return session_panel(self._snapshot, losses, lines, **speeds)

    def _tick(self) -> None:
        while not self._stop.wait(_LINE_EVERY_S):
            self._look()
            if self._session is None or self._snapshot is None:
                return
            self._print(plain_line({"event": "status", "words": status_line(self._snapshot)}))

    def _look(self) -> None:
        # Cleared first, so that a session whose snapshot raises is not asked again.
        session, self._session = self._session, None
        if session is None:
            return
        try:
            snapshot = session.snapshot()
        except ShoalError as error:
            # The training thread gets the same error and ends with it.
            log.debug("no more progress to show: %s", error)
            return
        self._session, self._snapshot = session, snapshot
        now_s = time.monotonic()
        self._run_speed.note(snapshot.tokens_committed + snapshot.tokens_in_round, now_s)
        self._own_speed.note(snapshot.tokens_trained, now_s)
        if snapshot.loss is not None:
            with self._lock:
                if not self._losses or self._losses[-1] != snapshot.loss:
                    self._losses.append(snapshot.loss)

    def _print(self, line: str) -> None:
        try:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError as error:
            # A closed pipe or a full disk behind the output must not stop the training.
            log.debug("progress cannot be printed: %s", error)


__all__ = [
    "JsonLines",
    "Reporter",
    "plain_line",
    "setup_logging",
    "status_table",
]
