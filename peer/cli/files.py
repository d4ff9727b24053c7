"""The commands that look at finished things: ``log verify replay restore checkpoint export generate identity``."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.peer.options import SHOAL_HOME, StartFrom
from shoal.swarm.errors import RecipeError, SealedForOthers, StateFileError, UserError

if TYPE_CHECKING:
    from shoal.peer.offline.replay import Replayed
    from shoal.swarm.protocol.identity import Identity

app = typer.Typer()
"""Without a name of its own: ``cli.py`` takes its commands over."""

console = Console()

IdentityOption = Annotated[Path, typer.Option(help="Ed25519 identity; made when it is missing.")]
ReaderOption = Annotated[Path, typer.Option("--identity", help="Of a reader, to open sealed checkpoints.")]


class Precision(StrEnum):
    """In which an export is fetched and written."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command("log")
def log_command(
    run: Annotated[str, typer.Argument(help="An invite, or the folder of a host, of a member, or of a checkpoint.")],
    last: Annotated[int, typer.Option(min=0, help="Only so many rounds, the newest; 0: all.")] = 0,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="One round in detail: weights, owners, digests.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line, with everything.")] = False,
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Show a run's history, checked from its beginning: each round's verdict, its hash and its signature."""
    from shoal.peer.cli.log import open_log, show_log

    show_log(open_log(run, _reader(identity)), console, last, round_number, json_lines=as_json)


@app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="A checkpoint's folder, a peer's, or a run's.")],
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Check checkpoints offline: every file, signature and verdict, and what vouches for each state."""
    from shoal.peer.cli.verify_view import summary, verify_notes, verify_table
    from shoal.peer.offline.verify import Refused, find_checkpoints, verify_checkpoints
    from shoal.peer.terminal.events import printable

    results = verify_checkpoints(find_checkpoints(folder), _reader(identity))
    console.print(verify_table(results))
    console.print(verify_notes(results), highlight=False)
    wrong = [one for one in results if isinstance(one, Refused)]
    for one in wrong:
        console.print(printable(one.reason), style="red", markup=False, highlight=False, soft_wrap=True)
    if wrong and all(one.is_for_others for one in wrong):
        raise SealedForOthers(f"{len(wrong)} of {len(results)} checkpoints are sealed for others, and not checked")
    if wrong:
        raise StateFileError(summary(results))


@app.command("replay")
def replay_command(
    folder: Annotated[Path, typer.Argument(help="One peer's folder (~/.shoal/runs/RUN-HASH/PEER), or the run's.")],
    number: Annotated[int | None, typer.Option("--round", min=0, help="Only up to this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object a line.")] = False,
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Make finished rounds again from their committed bytes, and show that the run's states come out: of a pipeline, in
    each stage that the peer has kept."""
    from shoal.peer.offline.replay import replay
    from shoal.peer.offline.replay import table as replay_table

    rows: list[Replayed] = []
    try:
        for row in replay(folder, number, _reader(identity)):
            rows.append(row)
            if as_json:
                print(json.dumps(row.as_json()), flush=True)
    finally:
        if rows and not as_json:
            console.print(replay_table(rows))


@app.command("restore")
def restore_command(
    url: Annotated[str, typer.Argument(help="What --copy-to of `shoal join` had, or a run's or peer's folder there.")],
    to: Annotated[Path, typer.Option(help="Where `shoal join --state` looks.")] = SHOAL_HOME / "runs",
    identity: IdentityOption = SHOAL_HOME / "identity",
    only_list: Annotated[bool, typer.Option("--list", help="Show what is there.")] = False,
    all_stages: Annotated[bool, typer.Option(help="Of a pipeline all, not only those that this peer copied.")] = False,
    number: Annotated[
        int | None, typer.Option("--round", min=0, help="The copy of that round, and not the newest one.")
    ] = None,
) -> None:
    """Bring back the newest whole copy of a run's checkpoint; `shoal join` goes on from it."""
    from shoal.peer.cli.restore import list_copies, restore

    if only_list:
        list_copies(url, console)
    else:
        restore(url, to, identity, console, all_stages=all_stages, number=number)


@app.command("checkpoint")
def checkpoint_command(
    run: Annotated[str, typer.Option(help="A pipeline's invite, or a folder with all its stages, of whichever peers.")],
    out: Annotated[Path, typer.Option(help="The folder that becomes the checkpoint; it must not be there.")],
    identity: IdentityOption = SHOAL_HOME / "identity",
) -> None:
    """Put a pipeline's whole model together from its stages, as one checkpoint that this identity signs."""
    from shoal.swarm.protocol.identity import Identity
    from shoal.swarm.protocol.invite import Invite

    invite = Invite.parse(run) if run.startswith("shoal://") else None
    from shoal.peer.offline.export import gather_checkpoint, gather_from_run

    own = Identity.load_or_create(identity)
    if invite is not None:
        made = asyncio.run(gather_from_run(invite, out, own))
    else:
        made = gather_checkpoint(Path(run), out, own)
    console.print(
        f"Anchor version {made.anchor_version}, of {len(made.parts or ())} stages after round {made.round}, "
        f"written to {out}, signed by {made.peer}"
    )


@app.command("export")
def export_command(
    run: Annotated[str, typer.Option(help="An invite, a run's folder, or a checkpoint's; with all stages, if any.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("model.safetensors"),
    precision: Annotated[Precision, typer.Option(help="bfloat16: half the bytes, from a live run only.")] = (
        Precision.float32
    ),
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Write a run's model for inference, from a live run (invite) or from what a member saved here."""
    from shoal.swarm.protocol.invite import Invite

    invite = Invite.parse(run) if run.startswith("shoal://") else None
    from shoal.peer.offline.export import export_from_run, export_model

    rounded = precision is Precision.bfloat16
    if invite is not None:
        version = asyncio.run(export_from_run(invite, out, rounded=rounded))
    elif rounded:
        raise UserError("--precision bfloat16 saves bytes on the way from a live run: give its invite, or leave it out")
    else:
        version = export_model(Path(run), out, _reader(identity))
    console.print(f"Anchor version {version} written to {out}, its recipe to {out.with_suffix('.json')}")


@app.command("generate")
def generate_command(
    model: Annotated[Path, typer.Argument(help="A model written by `shoal export`.")],
    prompt: Annotated[str, typer.Option(help="What to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens (bytes).")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Among so many; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Sample text from an exported gpt model."""
    from shoal.peer.offline.export import read_model
    from shoal.peer.recipes.gpt import Gpt, generate

    loaded = read_model(model)
    if not isinstance(loaded, Gpt):
        raise RecipeError(f"{model}: generate knows the gpt recipe only")
    text = generate(loaded, prompt.encode(), tokens, temperature, top_k or None, seed)
    print(prompt + text.decode(errors="replace"))


@app.command("identity")
def identity_command(identity: IdentityOption = SHOAL_HOME / "identity") -> None:
    """Show this machine's peer id, and its public key, which `readers` in a run file takes."""
    from shoal.swarm.protocol.identity import Identity, key_text

    found = Identity.load_or_create(identity)
    print(f"peer id     {found.peer_id}\npublic key  {key_text(found.public_key)}")


def _reader(identity: Path) -> Identity | None:
    from shoal.swarm.protocol.identity import Identity

    return Identity.load_or_create(identity) if identity.exists() else None


def start_of(folder: Path | None, identity: Path | None, *, only_parameters: bool) -> StartFrom | None:
    """The checkpoint to start from, by the host's options. Raises ``UserError``."""
    if folder is None:
        if only_parameters:
            raise UserError("--parameters-only says what to take from a checkpoint: give that with --from FOLDER")
        return None
    keys = identity or SHOAL_HOME / "identity"
    return StartFrom(folder, keys if keys.exists() else None, only_parameters)
