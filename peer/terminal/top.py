"""``shoal top``: the members of a run in a table that is sorted as one likes, as high as the window. Values in,
renderables out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.peer.terminal.bars import Bar, left_text, of_goal
from shoal.peer.terminal.events import count_text, loss_text, number_of, printable
from shoal.peer.terminal.views import doing_text, phase_text, reach_text, steady_speed
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.types import MemberStatus


class SortBy(StrEnum):
    """Orders of the members, and the keys that choose them."""

    share = "share"
    speed = "speed"
    waited = "waited"
    name = "name"


KEYS: Mapping[str, SortBy] = {"s": SortBy.share, "t": SortBy.speed, "w": SortBy.waited, "n": SortBy.name}
_HELP = "sorted by {}   s share  t tokens/s  w waited for  n name   q quit"
_HEAD_LINES = 7
"""Lines above and below the rows of members."""


class WaitedFor:
    """Counts how long a run has waited for each member: looks at its status now and then. Moments are arguments.

    While a round closes, most members are ready and wait; the others are waited for."""

    def __init__(self) -> None:
        self.waited_s: dict[str, float] = {}
        self._last_s: float | None = None

    def look(self, status: CoordinatorToPeerStatus, now_s: float) -> None:
        """Take a status."""
        passed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        here = {one.peer: one for one in status.members if one.alive}
        self.waited_s = {peer: waited for peer, waited in self.waited_s.items() if peer in here}
        for peer in late(status):
            self.waited_s[peer] = self.waited_s.get(peer, 0.0) + passed_s


def late(status: CoordinatorToPeerStatus) -> list[str]:
    """Members that the open round waits for: the round closes, others are ready, and these still train."""
    if status.phase != "closing":
        return []
    here = [one for one in status.members if one.alive and one.synced]
    training = [one.peer for one in here if one.activity == "training"]
    return training if 0 < len(training) < len(here) else []


def sorted_members(
    status: CoordinatorToPeerStatus, by: SortBy, waited_s: Mapping[str, float] | None = None
) -> list[MemberStatus]:
    """Sort the members, those that are here first."""
    waited = waited_s or {}
    orders: Mapping[SortBy, Callable[[MemberStatus], float]] = {
        SortBy.share: lambda one: -one.share,
        SortBy.speed: lambda one: -steady_speed(one),
        SortBy.waited: lambda one: -waited.get(one.peer, 0.0),
        SortBy.name: lambda one: 0.0,
    }
    return sorted(status.members, key=lambda one: (not one.alive, orders[by](one), one.name, one.peer))


def top_view(
    status: CoordinatorToPeerStatus,
    by: SortBy,
    height: int,
    waited_s: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> RenderableType:
    """Render the run in a line and as many members as fit into ``height`` lines, each in one. ``notes``: sentences such
    as that the host does not answer."""
    members, waited = sorted_members(status, by, waited_s), waited_s or {}
    room = max(1, height - _HEAD_LINES - len(notes))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, expand=True)
    table.add_column("member", ratio=3, no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("doing", ratio=3, no_wrap=True, overflow="ellipsis", min_width=8)
    table.add_column("reach", no_wrap=True, overflow="ellipsis", max_width=22)
    for name in ("tok/s", "share", "waited", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in members[:room]:
        seconds = waited.get(one.peer, 0.0)
        table.add_row(
            Text.assemble((printable(one.name), "bold"), (f" {one.peer[:8]}", "dim")),
            Text(doing_text(one)),
            Text(reach_text(one)),
            count_text(steady_speed(one)) if one.alive else "–",
            f"{100 * one.share:.0f}%",
            f"{seconds:.0f} s" if seconds else "–",
            loss_text(one.loss),
            style="" if one.alive else "dim",
        )
    rest = len(members) - room
    below = f"{number_of(rest, 'more member')} below: a higher window shows them   " if rest > 0 else ""
    lines: list[RenderableType] = [*_head(status), table]
    lines += [Text(note, style="bold yellow") for note in notes]
    lines.append(Text(below + _HELP.format(by.value), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def _head(status: CoordinatorToPeerStatus) -> list[RenderableType]:
    progress, here = status.progress, sum(one.alive for one in status.members)
    first = Text.assemble((printable(status.run), "bold cyan"), f"  round {status.round} ", phase_text(status.phase))
    first.append(f"  {number_of(here, 'member')}  loss {loss_text(status.loss)}")
    if progress.tokens_per_s:
        first.append(f"  {count_text(progress.tokens_per_s)} tokens/s")
    words = of_goal(progress, status.tokens_committed, status.rounds_committed)
    if (left := left_text(progress)) and status.phase != "ended":
        words += f" · {left}"
    first.no_wrap, first.overflow = True, "ellipsis"
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_row(Bar(progress.share) if progress.share is not None else "", words)
    return [first, grid]


def summary_line(status: CoordinatorToPeerStatus) -> str:
    """The run in one plain line, for ``--watch`` where there is no terminal."""
    progress, here = status.progress, sum(one.alive for one in status.members)
    words = [
        f"round {status.round} {status.phase}",
        of_goal(progress, status.tokens_committed, status.rounds_committed),
        *([left_text(progress)] if progress.left_s is not None and status.phase != "ended" else []),
        f"loss {loss_text(status.loss)}",
        number_of(here, "member"),
        *([f"{count_text(progress.tokens_per_s)} tokens/s"] if progress.tokens_per_s else []),
        *([f"waits: {printable(status.outlook)}"] if status.outlook else []),
    ]
    return " · ".join(words)
