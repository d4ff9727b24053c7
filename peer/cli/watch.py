"""``shoal status --watch`` and ``shoal top``: a run's status, refreshed in place until Ctrl-C or q.

The coordinator is asked again only after many times the time that its last answer took, so that watching costs it
little, however many members it has. While it is away the last status stays, with the time since when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from shoal.peer.terminal.events import clock, printable
from shoal.peer.terminal.keyboard import keys_pressed
from shoal.peer.terminal.top import KEYS, SortBy, WaitedFor, summary_line, top_view
from shoal.peer.terminal.views import status_table
from shoal.swarm.aio import task_scope
from shoal.swarm.client.observer import follow_status
from shoal.swarm.errors import LinkError
from shoal.swarm.system import call_on_signals

if TYPE_CHECKING:
    from shoal.swarm.protocol.invite import Invite
    from shoal.swarm.protocol.messages import CoordinatorToPeerStatus


class WatchedRun:
    """Newest status of a run that is watched. ``by``: the order of its members in ``top``, None for the whole status.

    ``take`` is given each status or failure; ``render`` makes the view. Moments are arguments."""

    def __init__(self, by: SortBy | None) -> None:
        self.by = by
        self.status: CoordinatorToPeerStatus | None = None
        self._waited = WaitedFor()
        self._away_since: float | None = None
        self._trouble = ""

    def take(self, found: CoordinatorToPeerStatus | LinkError, now_s: float, unix_s: float) -> None:
        """Take what the coordinator answered, or that it did not."""
        if isinstance(found, LinkError):
            self._away_since = unix_s if self._away_since is None else self._away_since
            self._trouble = printable(str(found).split("\n")[0])[:300]
            return
        self.status, self._away_since, self._trouble = found, None, ""
        self._waited.look(found, now_s)

    @property
    def notes(self) -> list[str]:
        """Sentences on a host that does not answer."""
        if self._away_since is None:
            return []
        return [f"the host has not answered since {clock(self._away_since)}: {self._trouble}"]

    def render(self, height: int) -> RenderableType:
        """Render the view for a window of ``height`` lines."""
        from rich.console import Group
        from rich.text import Text

        if self.status is None:
            return Text("asking the coordinator …", style="dim")
        if self.by is not None:
            return top_view(self.status, self.by, height, self._waited.waited_s, self.notes)
        return Group(*(Text(note, style="bold yellow") for note in self.notes), status_table(self.status))


async def watch(invite: Invite, console: Console, every_s: float, by: SortBy | None = None) -> None:
    """Show a run until a signal, or q. Raises the error of the first look; later ones are shown."""
    stop, run = asyncio.Event(), WatchedRun(by)
    call_on_signals(stop.set)
    if console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:

            def draw() -> None:
                live.update(run.render(console.size.height), refresh=True)

            def press(key: str) -> None:
                if key in ("q", "Q"):
                    stop.set()
                elif run.by is not None and key in KEYS:
                    run.by = KEYS[key]
                    draw()

            draw()
            with keys_pressed(press):
                await _follow(invite, every_s, run, stop, draw)
        if run.status is not None and by is None:
            console.print(run.render(console.size.height))
        return

    def say() -> None:
        words: Sequence[str] = run.notes or [summary_line(run.status)] if run.status is not None else run.notes
        for line in words:
            console.print(f"{clock(time.time())}  {line}", markup=False, highlight=False, soft_wrap=True)

    await _follow(invite, every_s, run, stop, say)


async def _follow(
    invite: Invite, every_s: float, run: WatchedRun, stop: asyncio.Event, show: Callable[[], None]
) -> None:
    def take(found: CoordinatorToPeerStatus | LinkError) -> None:
        if isinstance(found, LinkError) and run.status is None:
            raise found
        run.take(found, time.monotonic(), time.time())
        show()

    async with task_scope() as tasks:
        following = tasks.create_task(follow_status(invite, every_s, take))
        stopping = tasks.create_task(stop.wait())
        await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        stopping.cancel()
