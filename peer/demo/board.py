"""The demo while it runs: what its processes have logged, as a live table or as plain lines."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.peer.event_schema import Event
from shoal.peer.terminal.events import bytes_text, count_text, duration_text, loss_text, plain_line
from shoal.peer.terminal.views import sparkline

Anchor = tuple[int, str]
"""Version and digest."""


@dataclass(frozen=True)
class Death:
    """``replicas``: of its stage at that moment, with this one. Moments are those of ``time.time()``."""

    peer: str
    stage: int
    replicas: int
    killed_at: float
    back_at: float | None = None


def whole_run(event: Event, stages: int) -> Event | None:
    """An event of the coordinator as one of the run as a whole: rounds end in all stages alike, and the last one
    knows the loss. None for what is of one stage only."""
    if "stage" not in event:
        return event
    if event["event"] in ("verdict", "went_back") and event["stage"] == stages - 1:
        return {key: value for key, value in event.items() if key != "stage"}
    return None


def held_now(events: Sequence[Event]) -> tuple[int, ...]:
    """The stages that a peer works on, by what it has logged since it started: those whose state it has."""
    return tuple(sorted(held_anchors(events)))


def choose_victim(holders: Mapping[str, int], stages: int, before: Sequence[Death]) -> tuple[str, int, int] | None:
    """The next victim, its stage, and how many replicas that has: first a replica of the middlemost stage that has
    several, then the only one of a stage, another one if possible. None while there is nobody like that.

    ``holders``: by name the stage of whoever is there and has its state."""
    count = Counter(holders.values())
    if before:
        wanted = [stage for stage in range(stages) if count[stage] == 1]
        wanted.sort(key=lambda stage: stage in {death.stage for death in before})
    else:
        wanted = [stage for stage in range(stages) if count[stage] > 1]
        wanted.sort(key=lambda stage: abs(stage - (stages - 1) / 2))
    if not wanted or min(count[stage] for stage in range(stages)) == 0:
        return None
    name = max(name for name, stage in holders.items() if stage == wanted[0])
    return name, wanted[0], count[wanted[0]]


def held_anchors(events: Sequence[Event]) -> dict[int, Anchor]:
    """The newest of every stage that it holds now."""
    anchors: dict[int, Anchor] = {}
    for event in events:
        if event["event"] in ("joined", "span"):
            anchors = {}
        elif event["event"] in ("synced", "committed") and "stage" in event:
            anchors[event["stage"]] = event["anchor_version"], event["digest"]
    return anchors


def usual_round_s(moments: Sequence[float], deaths: Sequence[float]) -> float:
    """The median time between the ``moments`` at which rounds ended, without those in which somebody died; 0 where
    there is none."""
    gaps = [
        after - before for before, after in pairwise(moments) if not any(before <= death <= after for death in deaths)
    ]
    return statistics.median(gaps) if gaps else 0.0


_SHOWN_EVENTS = (
    *("verdict", "went_back", "member_joined", "member_lost", "demo"),
    *("stages_cut", "span_assigned", "span_taken"),
)
_STATE_STYLES = {"starting": "yellow", "syncing": "yellow", "training": "green", "killed": "bold red", "done": "cyan"}


@dataclass
class _Row:
    state: str = "starting"
    peer: str = ""
    stage: str = ""
    round: int | None = None
    loss: float | None = None
    tokens_per_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    mark: str = ""


class Board:
    """A context manager; feed it with events and ``refresh`` it now and then, from one thread."""

    def __init__(self, console: Console, run_s: float, rounds: int | None = None) -> None:
        """The run takes ``run_s``, or, where it has so many ``rounds``, at most that."""
        self._console = console
        self._rounds = rounds
        self._run_s = run_s
        self._began = time.monotonic()
        self._rows: dict[str, _Row] = {}
        self._losses: list[float] = []
        self._lines: deque[str] = deque(maxlen=6)
        self._ends_with_usual = False
        self._round = 0
        self._tokens = 0
        self._aborted = 0
        self._committed = 0
        self._round_began: float | None = None
        self._stages = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start_clock(self) -> None:
        """The run begins now."""
        self._began = time.monotonic()

    def add(self, name: str, mark: str = "") -> None:
        self._rows[name] = _Row(mark=mark)

    def mark(self, name: str, state: str, mark: str = "") -> None:
        """Set a peer's state by hand: the dead say nothing."""
        self._rows[name].state = state
        if mark:
            self._rows[name].mark = mark

    def say(self, words: str) -> None:
        """A line on what the demo itself does."""
        self._show({"event": "demo", "time": time.time(), "words": words})

    def feed_host(self, event: Event) -> None:
        if event["event"] == "round_planned":
            self._take_speeds(event)
        told = whole_run(event, self._stages)
        if told is None:
            return
        match told["event"]:
            case "member_joined":
                if told["name"] in self._rows:
                    self._rows[told["name"]].peer = told["peer"]
            case "stages_cut":
                self._stages = len(told["boundaries"]) - 1
            case "verdict" | "went_back":
                self._round = told["round"] + 1
                self._round_began = told["time"]
                self._tokens = told["tokens_total"]
                self._aborted += not told["committed"]
                self._committed += told["committed"]
                if told["loss"] is not None:
                    self._losses.append(told["loss"])
            case "member_lost" | "span_assigned" | "span_taken":
                names = [name for name, row in self._rows.items() if row.peer == told["peer"]]
                told = {**told, "name": names[0] if names else ""}
        self._show(told)

    def feed_peer(self, name: str, event: Event) -> None:
        row = self._rows[name]
        row.bytes_sent = event.get("bytes_sent", row.bytes_sent)
        row.bytes_received = event.get("bytes_received", row.bytes_received)
        match event["event"]:
            case "span":
                first, last = event["first"], event["last"]
                row.stage = str(first) if first == last else f"{first} to {last}"
                row.state, row.tokens_per_s = "syncing", 0.0
            case "synced":
                row.state = "training"
                if self._round_began is None:
                    self._round_began = event["time"]
            case "committed":
                row.round, row.loss = event["round"], event["loss"]
            case "left":
                row.state, row.tokens_per_s = "done", 0.0

    def _take_speeds(self, planned: Event) -> None:
        """Each peer's tokens of the round that closes, over the time since the last one's end."""
        if self._round_began is None:
            return
        seconds = max(0.1, planned["time"] - self._round_began)
        tokens = dict(zip(planned["members"], planned["tokens"], strict=True))
        for row in self._rows.values():
            # A stage's plan says nothing of the others.
            if row.state == "training" and (row.peer in tokens or "stage" not in planned):
                row.tokens_per_s = tokens.get(row.peer, 0) / seconds

    def _show(self, event: Event) -> None:
        if event["event"] not in _SHOWN_EVENTS:
            return
        line = plain_line(event)
        # One committed round after the other would leave no room for what happens to peers.
        is_usual = event["event"] == "verdict" and event["committed"]
        if is_usual and self._ends_with_usual:
            self._lines.pop()
        self._ends_with_usual = is_usual
        self._lines.append(line)
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._head(), self._table()]
        if self._lines:
            parts.append(Text("\n".join(self._lines), style="dim", no_wrap=True, overflow="ellipsis"))
        title = Text.assemble(("shoal", "bold"), " · ", ("demo", "bold cyan"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="cyan", box=box.ROUNDED)

    def _head(self) -> Table:
        passed_s = time.monotonic() - self._began
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        loss = self._losses[-1] if self._losses else None
        if self._rounds is None:
            total, done = self._run_s, min(passed_s, self._run_s)
            words = f"{duration_text(done)} of {duration_text(self._run_s)}"
        else:
            total, done = self._rounds, min(self._committed, self._rounds)
            words = f"{duration_text(passed_s)} · {done} of {self._rounds} rounds"
        grid.add_row("time", ProgressBar(total=total, completed=done), words)
        aborted = f", {self._aborted} aborted" if self._aborted else ""
        grid.add_row(
            "loss",
            Text.assemble((loss_text(loss), "bold"), "  ", (sparkline(self._losses, 32), "green")),
            f"round {self._round}{aborted} · {count_text(self._tokens)} tokens",
        )
        return grid

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
        table.add_column("peer", style="bold", no_wrap=True)
        table.add_column("", no_wrap=True)
        if self._stages:
            table.add_column("stage", justify="right", no_wrap=True)
        for name in ("round", "loss", "tokens/s", "sent", "received"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, ratio=1)
        for name, row in self._rows.items():
            table.add_row(
                name,
                Text(row.state, style=_STATE_STYLES.get(row.state, "")),
                *([row.stage or "–"] if self._stages else []),
                "–" if row.round is None else str(row.round),
                loss_text(row.loss),
                count_text(row.tokens_per_s) if row.state == "training" else "–",
                bytes_text(row.bytes_sent),
                bytes_text(row.bytes_received),
                Text(row.mark, style="yellow"),
                style="dim" if row.state == "killed" else "",
            )
        return table
