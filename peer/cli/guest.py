"""Commands and options for the owner of a machine: ``terms``, ``pause``, ``resume``, and what ``join`` keeps to.

Nothing heavy is imported here: while a machine is not lent, its process waits with next to no memory.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.peer.guest.terms import FIELDS, TERMS_FILE, Power, TermsFile, TermsText, parse_terms
from shoal.peer.options import SHOAL_HOME, TERMINATED, peer_folder

if TYPE_CHECKING:
    from shoal.peer.event_schema import Event
    from shoal.peer.guest.gate import Pause
    from shoal.peer.guest.keeper import GuestKeeper
    from shoal.swarm.protocol.invite import Invite

app = typer.Typer()
"""Part of the ``shoal`` command in ``main.py``."""

console = Console()

MaxUpload = Annotated[
    str, typer.Option("--max-upload", metavar="20Mbit", help="Most that this machine sends; none: no limit.")
]
MaxDownload = Annotated[
    str, typer.Option("--max-download", metavar="50Mbit", help="Most that it receives; none: no limit.")
]
MonthlyData = Annotated[
    str, typer.Option("--monthly-data", metavar="500G", help="Most of both in a calendar month; none: no limit.")
]
HoursOption = Annotated[
    str, typer.Option("--hours", metavar="22-7", help="Local time at which it takes part: 22-7, or 22:30-7,12-13.")
]
PowerOption = Annotated[
    Power | None,
    typer.Option("--power", help="battery: not on battery; idle: nor while somebody uses the machine."),
]
NiceOption = Annotated[bool | None, typer.Option("--nice/--no-nice", help="Let all other programs go first.")]
StateOption = Annotated[Path, typer.Option("--state", help="Folder for checkpoints, as given to `shoal join`.")]
RunName = Annotated[str, typer.Argument(help="The run's name, or a peer's folder; by default all that run here.")]


def given_terms(
    max_upload: str, max_download: str, monthly_data: str, hours: str, power: Power | None, nice: bool | None
) -> TermsText:
    """Return the terms that were given as options. Raises ``TermsError`` for those that cannot be understood."""
    given = {
        "max_upload": max_upload,
        "max_download": max_download,
        "monthly_data": monthly_data,
        "hours": hours,
        "power": power.value if power is not None else "",
        "nice": "" if nice is None else "yes" if nice else "no",
    }
    parse_terms(given)
    return {name: value for name, value in given.items() if value}


@app.command("terms")
def terms_command(
    run: Annotated[str, typer.Argument(help="Terms for this run alone; by default for all runs.")] = "",
    max_upload: MaxUpload = "",
    max_download: MaxDownload = "",
    monthly_data: MonthlyData = "",
    hours: HoursOption = "",
    power: PowerOption = None,
    nice: NiceOption = None,
    state: StateOption = SHOAL_HOME / "runs",
) -> None:
    """Show and set what this machine lends to runs. Peers that run here take changes over at once."""
    from shoal.peer.guest.control_files import find_peers, read_presence

    changes, path = given_terms(max_upload, max_download, monthly_data, hours, power, nice), SHOAL_HOME / TERMS_FILE
    kept = TermsFile.read(path)
    if changes:
        kept = kept.changed(run, changes)
        kept.write(path)
    console.print(terms_table(kept, run))
    for folder in find_peers(state, ""):
        if (present := read_presence(folder)) is not None:
            console.print(f"{present.run} ({folder.name}): {present.state}", markup=False, highlight=False)


def terms_table(kept: TermsFile, run: str = "") -> Table:
    """Make the table of all terms, with those of single runs beside them."""
    runs = [run] if run else sorted(kept.runs)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("term", "all runs", *runs):
        table.add_column(name, no_wrap=True)
    for name in FIELDS:
        of_runs = [kept.runs.get(one, {}).get(name, "") for one in runs]
        table.add_row(name.replace("_", "-"), kept.all_runs.get(name) or Text("–", style="dim"), *of_runs)
    return table


@app.command("pause")
def pause_command(
    run: RunName = "",
    for_: Annotated[str, typer.Option("--for", metavar="2h", help="Go on by itself after 30m, 2h or 1d.")] = "",
    state: StateOption = SHOAL_HOME / "runs",
) -> None:
    """Have the peers of this machine leave their runs, with all they have done, until `shoal resume`."""
    from shoal.peer.cli.access import parse_duration
    from shoal.peer.guest.control_files import find_peers, read_presence, write_pause
    from shoal.peer.guest.gate import OwnerPause

    pause = OwnerPause(time.time() + parse_duration(for_, "--for") if for_ else None)
    folders = find_peers(state, run)
    for folder in folders:
        write_pause(folder, pause)
        present = read_presence(folder)
        what = "finishes its round and leaves" if present is not None else "will wait when it is started"
        console.print(f"{folder.parent.name} {folder.name}: {what}", markup=False, highlight=False)
    if not folders:
        console.print("no peer runs on this machine")


@app.command("resume")
def resume_command(run: RunName = "", state: StateOption = SHOAL_HOME / "runs") -> None:
    """Let paused peers of this machine join again."""
    from shoal.peer.guest.control_files import find_peers, write_pause

    folders = find_peers(state, run)
    for folder in folders:
        write_pause(folder, None)
        console.print(f"{folder.parent.name} {folder.name}: not paused any more", markup=False, highlight=False)
    if not folders:
        console.print("no peer runs on this machine")


# For `shoal join` ---------------------------------------------------------------------------------------------


def keeper_of(invite: Invite, identity: Path, state: Path, options: TermsText) -> GuestKeeper:
    """Make the keeper of the owner's terms for the run of an invite. Raises ``TermsError`` and ``IdentityError``."""
    from shoal.peer.guest.keeper import GuestKeeper
    from shoal.swarm.protocol.identity import Identity

    peer = Identity.load_or_create(identity).peer_id
    folder = peer_folder(state, invite.run, invite.run_hash, peer)
    return GuestKeeper(invite.run, folder, state, SHOAL_HOME / TERMS_FILE, options)


def wait_until_lent(keeper: GuestKeeper, run: str, on_event: Callable[[Event], None]) -> bool:
    """Wait until the terms allow to join; returns False if Ctrl-C ends the wait, and ends the process after SIGTERM.
    For the main thread."""
    from shoal.peer.event_schema import make_event

    def on_pause(pause: Pause) -> None:
        on_event(make_event("paused", run=run, reason=pause.reason, until=pause.until))

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        raise _Stopped

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        keeper.wait(on_pause, lambda: on_event(make_event("resumed", run=run)))
    except _Stopped:
        return False
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return True


class _Stopped(Exception):
    """Ctrl-C has come."""
