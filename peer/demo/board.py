"""Board of a demo while it runs: what its processes have logged, as a live table or as plain lines."""

from __future__ import annotations

import time
from collections import deque

from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.peer.demo.run_log import RunLog
from shoal.peer.event_schema import Event
from shoal.peer.terminal.bars import sparkline
from shoal.peer.terminal.events import count_text, duration_text, loss_text, plain_line, span_text

_SHOWN_EVENTS = (
    *("verdict", "went_back", "member_joined", "member_lost", "demo"),
    *("stages_cut", "span_assigned", "span_taken"),
)
_STATE_STYLES = {"starting": "yellow", "syncing": "yellow", "training": "green", "killed": "bold red", "done": "cyan"}


class Board:
    """Shows events that it is given, and in a terminal the log as a table while ``live`` is entered. One thread."""

    def __init__(self, console: Console, log: RunLog) -> None:
        self._console = console
        self._log = log
        self._lines: deque[str] = deque(maxlen=6)
        self._ends_with_commit = False
        self.live = Live(console=console, auto_refresh=False, transient=not console.is_terminal)

    def say(self, words: str) -> None:
        """Show a line on what the demo itself does."""
        self.show({"event": "demo", "time": time.time(), "words": words})

    def show(self, event: Event) -> None:
        """Show the event as a line, if it is of interest here."""
        if event["event"] not in _SHOWN_EVENTS:
            return
        line = plain_line(event)
        # One committed round after the other would leave no room for what happens to peers.
        is_commit = event["event"] == "verdict" and event["committed"]
        if is_commit and self._ends_with_commit:
            self._lines.pop()
        self._ends_with_commit = is_commit
        self._lines.append(line)
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        self.live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._head(), self._table()]
        if self._lines:
            parts.append(Text("\n".join(self._lines), style="dim", no_wrap=True, overflow="ellipsis"))
        title = Text.assemble(("shoal", "bold"), " · ", ("demo", "bold cyan"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="cyan", box=box.ROUNDED)

    def _head(self) -> Table:
        log = self._log
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        done, total = log.done
        passed_s = log.now - log.started
        words = (
            f"{duration_text(passed_s)} · {done} of {total} rounds"
            if log.ends_by_rounds
            else f"{duration_text(done)} of {duration_text(total)}"
        )
        grid.add_row("time", ProgressBar(total=total, completed=done), words)
        losses = [event["loss"] for event in log.commits if event["loss"] is not None]
        loss = Text.assemble(
            (loss_text(losses[-1] if losses else None), "bold"), "  ", (sparkline(losses, 32), "green")
        )
        aborted = f", {log.rounds_aborted} aborted" if log.rounds_aborted else ""
        grid.add_row("loss", loss, f"round {log.round}{aborted} · {count_text(log.tokens)} tokens")
        return grid

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
        table.add_column("peer", style="bold", no_wrap=True)
        table.add_column("", no_wrap=True)
        for name in (*(("stage",) if self._log.boundaries else ()), "round", "loss", "tokens/s", "sent", "received"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, ratio=1)
        for name, peer in self._log.peers.items():
            span = span_text(*peer.spans[-1][1:]) if peer.spans else "–"
            table.add_row(
                name,
                Text(peer.state, style=_STATE_STYLES[peer.state]),
                *([span] if self._log.boundaries else []),
                "–" if peer.round is None else str(peer.round),
                loss_text(peer.loss),
                count_text(peer.tokens_per_s) if peer.state == "training" else "–",
                filesize.decimal(peer.bytes_sent),
                filesize.decimal(peer.bytes_received),
                Text(peer.mark, style="yellow"),
                style="" if peer.is_live else "dim",
            )
        return table
