"""The command line: ``shoal host | join | status | log | verify | replay | …``; errors become exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.peer.capability import parse_memory
from shoal.peer.checkpoints.retention import parse_retention
from shoal.peer.daemon import STOPPED_AT_ONCE, Work, run_member
from shoal.peer.demo import DemoOptions, run_demo
from shoal.peer.descriptors import allow_descriptors, warn_host
from shoal.peer.events import printable
from shoal.peer.export import export_from_run, export_model, read_model
from shoal.peer.hosting import DEFAULT_PORT, Hosting, HostOptions, host
from shoal.peer.log_command import show_log
from shoal.peer.progress import Reporter, describe_fact, plain_line, setup_logging, status_json, status_table
from shoal.peer.recipes.gpt import Gpt, generate
from shoal.peer.remote.commands import list_copies, parse_copy_to, restore
from shoal.peer.replay import Replayed, replay
from shoal.peer.replay import table as replay_table
from shoal.peer.session import SHOAL_HOME, SessionOptions
from shoal.peer.verifying import Refused, find_checkpoints, verify_checkpoints, verify_table
from shoal.swarm.coordinator.facts import Fact
from shoal.swarm.errors import RecipeError, ShoalError, StateFileError, UserError
from shoal.swarm.identity import Identity, key_text
from shoal.swarm.invite import Invite, parse_address, parse_addresses
from shoal.swarm.messages import Role
from shoal.swarm.observer import get_status

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one model together, on machines that nobody owns together.",
)
console = Console()
errors = Console(stderr=True)


class JoinRole(StrEnum):
    """What a member does in a run, as the command line names it."""

    full = "full"
    contribute_only = "contribute-only"
    observe = "observe"


class Precision(StrEnum):
    """In which an export is fetched and written."""

    float32 = "float32"
    bfloat16 = "bfloat16"


_ROLES: dict[JoinRole, Role] = {
    JoinRole.full: "trainer",
    JoinRole.contribute_only: "contributor",
    JoinRole.observe: "validator",
}

InviteArgument = Annotated[str, typer.Argument(help="shoal://HOST:PORT/RUN?key=… (quote it: it contains ?)")]
IdentityOption = Annotated[Path, typer.Option(help="Ed25519 identity; made when it is missing.")]
ReaderOption = Annotated[Path, typer.Option("--identity", help="Of a reader, to open sealed checkpoints.")]
LogJson = Annotated[Path | None, typer.Option(help="Write one JSON event a line to this file.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]


@app.command("host")
def host_command(
    run: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    bind: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0: any free one.")] = (
        f"0.0.0.0:{DEFAULT_PORT}"
    ),
    advertise: Annotated[
        str, typer.Option(help="HOST[:PORT] that the invite shall name; several with commas: A:1,B:2.")
    ] = "",
    state: Annotated[Path, typer.Option(help="Where journal and identity are kept, in a folder per run.")] = (
        SHOAL_HOME / "host"
    ),
    backup: Annotated[Path | None, typer.Option(help="Keep all of that in this folder, too, up to date.")] = None,
    identity: Annotated[Path | None, typer.Option(help="The host's keys; the run's own in --state by default.")] = None,
    log_json: LogJson = None,
    verbose: Verbose = False,
) -> None:
    """Host a run: keep its membership, rounds and verdicts. The same command goes on where it was stopped."""
    setup_logging(console, verbose)
    warn_host(allow_descriptors())
    options = HostOptions(identity, state, parse_address(bind, DEFAULT_PORT), parse_addresses(advertise), backup)

    def on_start(hosting: Hosting) -> None:
        console.print(f"Run     [bold]{hosting.invite.run}[/]  hash {hosting.run_hash.hex()[:16]}")
        console.print(f"Files   {hosting.state}")
        if hosting.resumed_round:
            console.print(f"Resumed in round {hosting.resumed_round}")
        console.print("Invite  (one command joins a machine)")
        console.print(f"\n  shoal join '{hosting.invite}'\n", soft_wrap=True, highlight=False)

    with Reporter(console, log_json) as reporter:

        def on_fact(fact: Fact) -> None:
            event = describe_fact(fact)
            if event is not None:
                reporter.record(event)
                console.print(plain_line(event), markup=False, highlight=False, soft_wrap=True)

        asyncio.run(host(run, options, on_start, on_fact))


@app.command("join")
def join_command(
    invite: InviteArgument,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    max_memory: Annotated[str, typer.Option(help="At most so much memory, such as 8G.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for training; 0: all.")] = 0,
    name: Annotated[str, typer.Option(help="How others see this machine; its host name by default.")] = "",
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on; data goes over the next port.")] = "0.0.0.0",
    advertise: Annotated[str, typer.Option(help="HOST[:PORT] at which other peers reach this one.")] = "",
    role: Annotated[
        JoinRole, typer.Option(help="full; contribute-only: train, reduce nothing; observe: follow the model only.")
    ] = JoinRole.full,
    state: Annotated[Path, typer.Option(help="Where checkpoints are kept.")] = SHOAL_HOME / "runs",
    keep_checkpoints: Annotated[str, typer.Option(metavar="N|off", help="So many of the newest are kept.")] = "3",
    keep_every: Annotated[int, typer.Option(min=0, help="Also one of each so many rounds, for ever; 0: none.")] = 0,
    copy_to: Annotated[str, typer.Option(metavar="URL", help="Also copy checkpoints there, by fsspec.")] = "",
    copy_every: Annotated[int, typer.Option(min=1, metavar="K", help="Copy after so many rounds or more.")] = 1,
    identity: IdentityOption = SHOAL_HOME / "identity",
    log_json: LogJson = None,
    verbose: Verbose = False,
) -> None:
    """Join a run and train until it ends. Ctrl-C leaves gracefully, a second one at once."""
    setup_logging(console, verbose)
    work = Work(device, _memory(max_memory), threads or None)
    retention = parse_retention(keep_checkpoints, keep_every)
    with Reporter(console, log_json) as reporter:
        options = SessionOptions(
            identity=identity,
            state=state,
            name=name,
            bind=parse_address(bind),
            advertise=parse_address(advertise) if advertise else ("", 0),
            role=_ROLES[role],
            checkpoints=retention,
            copy_to=parse_copy_to(copy_to, copy_every, retention),
            on_event=reporter.on_event,
        )
        run_member(invite, options, work, reporter.watch)


@app.command("status")
def status_command(
    invite: InviteArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show a run: round, loss, and its members with device, speed and share of the work."""
    status = asyncio.run(get_status(Invite.parse(invite)))
    if as_json:
        console.print_json(data=status_json(status))
    else:
        console.print(status_table(status))


@app.command("log")
def log_command(
    run: Annotated[str, typer.Argument(help="An invite, or the folder of a host, of a member, or of a checkpoint.")],
    last: Annotated[int, typer.Option(min=0, help="Only so many rounds, the newest; 0: all.")] = 0,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="One round in detail: weights, owners, digests.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line, with everything.")] = False,
) -> None:
    """Show a run's history, checked from its beginning: each round's verdict, its hash and its signature."""
    show_log(run, console, last, round_number, json_lines=as_json)


@app.command("export")
def export_command(
    run: Annotated[str, typer.Option(help="An invite, a run's folder, or a checkpoint's.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("model.safetensors"),
    precision: Annotated[Precision, typer.Option(help="bfloat16: half the bytes, from a live run only.")] = (
        Precision.float32
    ),
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Write a run's model for inference, from a live run (invite) or from what a member saved here."""
    rounded = precision is Precision.bfloat16
    if run.startswith("shoal://"):
        version = asyncio.run(export_from_run(Invite.parse(run), out, rounded=rounded))
    elif rounded:
        raise UserError("--precision bfloat16 saves bytes on the way from a live run: give its invite, or leave it out")
    else:
        version = export_model(Path(run), out, _reader(identity))
    console.print(f"Anchor version {version} written to {out}, its recipe to {out.with_suffix('.json')}")


@app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="A checkpoint's folder, a peer's, or a run's.")],
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Check checkpoints offline: every file, signature and verdict, and what vouches for each state."""
    results = verify_checkpoints(find_checkpoints(folder), _reader(identity))
    console.print(verify_table(results))
    console.print("Checked: sizes and SHA-256 of all files, layout, state digests, signatures, chains of verdicts.")
    console.print("Vouched by: a later round's plan, which the coordinator signed, or this checkpoint's peer alone.")
    wrong = [one for one in results if isinstance(one, Refused)]
    for one in wrong:
        console.print(printable(one.reason), style="red", markup=False, highlight=False, soft_wrap=True)
    if wrong:
        raise StateFileError(f"{len(wrong)} of {len(results)} checkpoints are not what they have to be")


@app.command("replay")
def replay_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder (~/.shoal/runs/RUN-HASH), or one peer's in it.")],
    number: Annotated[int | None, typer.Option("--round", min=0, help="Only up to this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object a line.")] = False,
) -> None:
    """Make finished rounds again from their committed bytes, and show that the run's states come out."""
    rows: list[Replayed] = []
    try:
        for row in replay(folder, number):
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
) -> None:
    """Bring back the newest whole copy of a run's checkpoint; `shoal join` goes on from it."""
    if only_list:
        list_copies(url, console)
    else:
        restore(url, to, identity, console)


@app.command("identity")
def identity_command(identity: IdentityOption = SHOAL_HOME / "identity") -> None:
    """Show this machine's peer id, and its public key as `[checkpoints] readers` names it in run files."""
    found = Identity.load_or_create(identity)
    print(f"peer id     {found.peer_id}\npublic key  {key_text(found.public_key)}")


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
    loaded = read_model(model)
    if not isinstance(loaded, Gpt):
        raise RecipeError(f"{model}: generate knows the gpt recipe only")
    text = generate(loaded, prompt.encode(), tokens, temperature, top_k or None, seed)
    print(prompt + text.decode(errors="replace"))


@app.command("demo")
def demo_command(
    peers: Annotated[int, typer.Option(min=2, max=16, help="Peers at the start.")] = 4,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long to train.")] = 3.0,
    preset: Annotated[str, typer.Option(help="The algorithm: diloco or sparseloco.")] = "diloco",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("shoal-demo"),
) -> None:
    """A whole run on this machine: one peer is killed, one comes late, a model is trained."""
    raise typer.Exit(run_demo(DemoOptions(peers, minutes, preset, json_file, out), console))


def _reader(identity: Path) -> Identity | None:
    return Identity.load_or_create(identity) if identity.exists() else None


def _memory(text: str) -> int | None:
    return parse_memory(text) if text else None


def main() -> None:
    """The ``shoal`` command."""
    allow_descriptors()
    try:
        app()
    except ShoalError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED_AT_ONCE)
