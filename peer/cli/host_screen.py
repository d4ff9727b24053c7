"""Lines that a host prints: at its start, for each event, when members fail alike, and at the run's end."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.peer.terminal.bars import Lines
from shoal.peer.terminal.events import plain_line, printable
from shoal.peer.terminal.failures import AlikeFailures

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.peer.cli.host import Hosting
    from shoal.peer.event_schema import Event

_MOST_NAMES = 4096
_MOST_WORDS = 400


class MemberNames:
    """Names of a run's members by id, as they joined; the latest ones, as identities cost nothing."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def note(self, event: Event) -> None:
        """Learn a name from the event of a join."""
        if event.get("event") == "member_joined":
            self._names[str(event["peer"])] = str(event["name"])
            self._names.move_to_end(str(event["peer"]))
            while len(self._names) > _MOST_NAMES:
                self._names.popitem(last=False)

    def named(self, event: Event) -> Event:
        """Return the event with the name of the peer that it is about, for people."""
        name = self._names.get(str(event.get("peer", "")))
        return event | {"name": name} if name is not None and "name" not in event else event


class HostScreen:
    """Prints what a host of one or several runs does.

    ``hint``: of a run that others may not be able to join, empty for none, by the invite."""

    def __init__(self, console: Console, backup: Path | None, *, several: bool) -> None:
        self._console = console
        self._backup = backup
        self._several = several
        self._names: defaultdict[str, MemberNames] = defaultdict(MemberNames)
        self._failures: defaultdict[str, AlikeFailures] = defaultdict(AlikeFailures)

    def show_start(self, hosting: Hosting, pins: str, warning: str) -> None:
        """Print where the run is and how one joins it. ``pins``: what is fixed, in words; ``warning``: of an invite
        that few can use, or empty."""
        run = hosting.run
        self._print(f"Run     {run.run.name}  hash {run.hash.hex()[:16]}", style="bold")
        self._print(f"Files   {hosting.state}", to_copy=True)
        if self._backup is not None:
            self._print(f"Backup  {self._backup / run.run.name}", to_copy=True)
        self._print(f"Pins    {pins}")
        if run.start is not None:
            self._print(f"Start   {run.start.source}; where its checkpoint is, join with --from FOLDER")
        if hosting.page:
            self._print(f"Page    {hosting.page}", to_copy=True)
        if hosting.metrics:
            self._print(f"Metrics {hosting.metrics}", to_copy=True)
        if hosting.card:
            self._print(f"Card    {hosting.card}", to_copy=True)
            self._print(f"Key     {hosting.key}", to_copy=True)
        if hosting.resumed_round:
            self._print(f"Goes on in round {hosting.resumed_round}, from anchor version {hosting.resumed_version}")
        self._print("Invite  (this command joins a machine to the run)")
        self._print(f"\n  shoal join '{hosting.invite}'\n", to_copy=True)
        if warning:
            self._print(f"Note    {warning}", style="yellow")

    def show_event(self, event: Event) -> None:
        """Print a line on an event, and one more where several members have failed in the same way."""
        run = str(event["run"])
        self._names[run].note(event)
        line = plain_line(self._names[run].named(event), run if self._several else "")
        if event.get("event") == "verdict" and event.get("committed") and self._console.is_terminal:
            self._console.print(Lines([line], ""))
        else:
            self._print(line)
        if event.get("event") == "member_lost" and event.get("trouble"):
            trouble = str(event["trouble"])
            if alike := self._failures[run].note(str(event.get("peer")), trouble):
                words = printable(trouble)[:_MOST_WORDS]
                where = f"{run}: " if self._several else ""
                self._print(
                    f"{where}{alike} members have failed in the same way, so it is likely the run's and not theirs: "
                    f"{words}",
                    style="bold yellow",
                )

    def show(self, words: str) -> None:
        """Print a line that is not an event's."""
        self._print(words)

    def _print(self, words: str, *, to_copy: bool = False, **how: Any) -> None:
        """Print a line; in a terminal it is cut between words, unless it is ``to_copy``."""
        soft_wrap = to_copy or not self._console.is_terminal
        self._console.print(words, markup=False, highlight=False, soft_wrap=soft_wrap, **how)
