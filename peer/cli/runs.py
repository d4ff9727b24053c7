"""Commands that find a run: ``runs`` lists those of directories, ``directory`` keeps one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.peer.options import SHOAL_HOME
from shoal.swarm.errors import DirectoryError

if TYPE_CHECKING:
    from shoal.peer.directory.card import RunCard
    from shoal.peer.directory.listing import ListedRun, Listing
    from shoal.peer.directory.local_fit import Fit
    from shoal.peer.directory.places import Place
    from shoal.swarm.protocol.invite import Invite

app = typer.Typer()
"""Part of the ``shoal`` command in ``main.py``."""

directories = typer.Typer(no_args_is_help=True, help="Keep a directory of runs: a file that `shoal runs` reads.")
app.add_typer(directories, name="directory")

console = Console()

DirectoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--directory",
        metavar="URL|FILE",
        help="Where the run's name is looked up, instead of the directories of ~/.shoal/settings.toml; repeatable.",
    ),
]
DirectoryFile = Annotated[Path, typer.Argument(metavar="DIRFILE", help="The directory's file (JSON).")]


@app.command("runs")
def runs_command(
    where: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL|FILE", help="Directories, or cards; by default those of ~/.shoal/settings.toml."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    max_memory: Annotated[str, typer.Option(help="Memory of this machine that a run could use, such as 8G.")] = "",
    max_device_memory: Annotated[str, typer.Option(help="The same of the GPU's own memory.")] = "",
    state: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = SHOAL_HOME / "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List runs that one can join, and say which of them this machine can. Signatures of their cards are checked."""
    from shoal.peer.directory.local_fit import fit_of, look_at_machine
    from shoal.peer.machine_memory import parse_memory

    host_limit = parse_memory(max_memory) if max_memory else None
    device_limit = parse_memory(max_device_memory, "--max-device-memory") if max_device_memory else None
    listing = _listing(where)
    fits: list[Fit | None] = [None] * len(listing.runs)
    if any(one.card is not None for one in listing.runs):
        machine = look_at_machine(device, host_limit, device_limit, state)
        fits = [None if one.card is None else fit_of(one.card, machine) for one in listing.runs]
    if as_json:
        print(json.dumps(listing_json(listing, fits), indent=2))
    else:
        for one, fit in zip(listing.runs, fits, strict=True):
            console.print(run_table(one, fit, time.time()))
        for failure in listing.failures:
            console.print(_text(f"not read: {failure}", "yellow"), soft_wrap=True)
        if not listing.runs and not listing.failures:
            console.print(f"No runs are listed. Name directories here, or in {SHOAL_HOME / 'settings.toml'}:", end=" ")
            console.print('directories = ["https://…/runs.json"]', markup=False, highlight=False)
    if listing.failures and not listing.runs:
        raise DirectoryError("no directory could be read")


def _listing(where: list[str] | None) -> Listing:
    from shoal.peer.directory.directory_file import usual_directories
    from shoal.peer.directory.listing import list_runs
    from shoal.peer.directory.places import Place

    places: list[Place] = [Place(one) for one in where] if where else usual_directories(SHOAL_HOME)
    return list_runs(places)


def is_named(text: str) -> bool:
    """Whether a text is a run's name in directories, rather than an invite or the file with one."""
    from shoal.swarm.protocol.invite import is_run_name

    return is_run_name(text) and not Path(text).is_file()


def named_invite(text: str, where: list[str] | None) -> Invite | None:
    """The invite of an open run that directories list under the name ``text``; None where that is no name but an
    invite, or the file with one. Shows the card. Raises ``DirectoryError``."""
    from shoal.peer.directory.listing import find_run

    if not is_named(text):
        return None
    listing = _listing(where)
    one = find_run(listing, text)
    card = one.card
    assert card is not None
    console.print(run_table(one, None, time.time()))
    if card.state == "ended":
        raise DirectoryError(f"the run {card.run} has ended")
    invite = card.parsed_invite()
    if invite is None:
        whom = f"ask {printable_text(card.contact)} for one" if card.contact else "ask its host for one"
        raise DirectoryError(f"the run {card.run} is by invitation only: {whom}, and join with that")
    return invite


# What is shown ------------------------------------------------------------------------------------------------


def run_table(one: ListedRun, fit: Fit | None, unix_s: float) -> Table:
    """Make the entry of a run: one line a subject, in printable letters only, whatever the card says."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=6)
    table.add_column(overflow="fold")
    title = Text(printable_text(one.run), style="bold")
    card = one.card
    if card is not None and card.title:
        title.append(f"  {printable_text(card.title)}", style="not bold")
    if one.mark:
        title.append(f"  {one.mark}", style="bold red" if one.mark == "forged" else "bold yellow")
    table.add_row("run", title)
    rows: list[tuple[str, str, str]] = []
    if one.problem:
        rows.append((one.mark, one.problem, "red" if one.mark == "forged" else "yellow"))
    if card is not None:
        rows += [
            ("why", card.purpose, ""),
            ("model", _model(card), ""),
            ("far", _progress(card), ""),
            ("needs", _needs(card), ""),
            ("who", _members(card, unix_s), ""),
            ("more", card.homepage, ""),
        ]
        if fit is not None:
            rows.append(("here", _here(fit), "green" if fit.can_join else "yellow"))
    for label, words, style in rows:
        if words:
            table.add_row(label, _text(words, style))
    table.add_row("", "")
    return table


def _model(card: RunCard) -> str:
    from shoal.peer.terminal.events import count_text

    size = "size not known yet" if card.parameters is None else f"{count_text(card.parameters)} parameters"
    stages = ", in stages" if card.in_stages else ""
    licence = f", {card.licence}" if card.licence else ""
    return f"{card.recipe}, {size}{stages}, {card.algorithm}, on {card.data}{licence}"


def _progress(card: RunCard) -> str:
    from shoal.peer.terminal.events import count_text, loss_text

    rounds = f"{card.round:,} rounds" + (f" of {card.of_rounds:,}" if card.of_rounds else "")
    tokens = f"{count_text(card.tokens)} tokens" + (f" of {count_text(card.of_tokens)}" if card.of_tokens else "")
    loss = "" if card.loss is None else f", loss {loss_text(card.loss)}"
    return f"{rounds}, {tokens}{loss}" + ("" if card.state == "running" else f", {card.state}")


def _needs(card: RunCard) -> str:
    from shoal.peer.machine_memory import memory_text

    needs = card.needs
    if needs is None:
        return ""
    traffic = f"{filesize.decimal(needs.round_bytes)} a round each way"
    return (
        f"{memory_text(needs.device_bytes)} on a GPU and {memory_text(needs.host_bytes)} beside it, or "
        f"{memory_text(needs.shared_bytes)} without; {memory_text(needs.disk_bytes)} of disk; {traffic}"
    )


def _members(card: RunCard, unix_s: float) -> str:
    from shoal.peer.terminal.events import count_text, duration_text, number_of

    age = duration_text(max(0.0, unix_s - card.written_s))
    return f"{number_of(card.members, 'peer')}, {count_text(card.tokens_per_s)} tokens/s; as of {age} ago"


def _here(fit: Fit) -> str:
    if not fit.can_join:
        return "no: " + "; ".join(fit.obstacles)
    return "; ".join(("yes", *fit.doubts))


def listing_json(listing: Listing, fits: list[Fit | None]) -> dict[str, Any]:
    """The same as JSON. ``can_join`` is null where there is no genuine card to judge by."""
    runs = []
    for one, fit in zip(listing.runs, fits, strict=True):
        card = None if one.card is None else one.card.model_dump(mode="json")
        about = {"run": one.run, "directory": one.directory, "card_at": one.card_at, "mark": one.mark}
        judged = {
            "can_join": None if fit is None else fit.can_join,
            "obstacles": [] if fit is None else list(fit.obstacles),
            "doubts": [] if fit is None else list(fit.doubts),
        }
        runs.append(about | {"problem": one.problem} | judged | {"card": card})
    return {"runs": runs, "not_read": list(listing.failures)}


def printable_text(text: str) -> str:
    """``printable`` of ``terminal/events.py``, imported late."""
    from shoal.peer.terminal.events import printable

    return printable(text)


def _text(words: str, style: str = "") -> Text:
    return Text(printable_text(words), style=style)


# A directory of one's own ---------------------------------------------------------------------------------------


@directories.command("add")
def add_command(
    directory: DirectoryFile,
    card: Annotated[str, typer.Argument(metavar="CARD_URL", help="The card's URL or path, which is read and checked.")],
) -> None:
    """Put a run into a directory, with the key that its card is signed with now."""
    from shoal.peer.directory.directory_file import add_card

    found, _ = add_card(directory, card)
    console.print(_text(f"{found.run} is listed in {directory}, under the key {found.key}"), soft_wrap=True)
    console.print("Compare that key with the one that its host prints, before others rely on it.")


@directories.command("remove")
def remove_command(directory: DirectoryFile, run: Annotated[str, typer.Argument(help="The run's name.")]) -> None:
    """Take a run out of a directory."""
    from shoal.peer.directory.directory_file import remove_run

    remove_run(directory, run)
    console.print(_text(f"{run} is not listed in {directory} any more"), soft_wrap=True)


@directories.command("list")
def list_command(
    directory: DirectoryFile, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show what a directory lists, without reading any card: see `shoal runs DIRFILE`."""
    from shoal.peer.directory.directory_file import load_directory

    found = load_directory(directory)
    if as_json:
        print(json.dumps(found.model_dump(mode="json")["runs"], indent=2))
        return
    for one in found.runs:
        console.print(_text(f"{one.run}  {one.key}  {one.card}"), soft_wrap=True, highlight=False)
