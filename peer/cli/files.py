"""Commands on what runs have written: ``log verify replay restore checkpoint export generate identity``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.peer.cli.command import INVITE_VARIABLE
from shoal.peer.options import SHOAL_HOME, StartFrom
from shoal.swarm.errors import RecipeError, SealedForOthers, StateFileError, UserError
from shoal.swarm.system import run_loop

if TYPE_CHECKING:
    from shoal.peer.offline.replay import Replayed
    from shoal.swarm.protocol.identity import Identity

app = typer.Typer()
"""Part of the ``shoal`` command in ``main.py``."""

console = Console()

IdentityOption = Annotated[Path, typer.Option(help="File with this machine's Ed25519 keys; made if it is missing.")]
ReaderOption = Annotated[Path, typer.Option("--identity", help="A reader's keys, to open sealed checkpoints.")]


class Precision(StrEnum):
    """Number format in which an export is written; bfloat16 is also fetched so."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ExportFormat(StrEnum):
    """Values of ``ModelFormat``, whose module imports torch."""

    safetensors = "safetensors"
    hf = "hf"
    gguf = "gguf"


@app.command("log")
def log_command(
    run: Annotated[
        str,
        typer.Argument(
            envvar=INVITE_VARIABLE,
            help="An invite, a hosted run's name, or the folder of a host, a member or a checkpoint.",
        ),
    ],
    last: Annotated[int, typer.Option(min=0, help="Show only the newest rounds, so many; 0 shows all.")] = 0,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="Show one round in detail: weights, owners, digests.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one round a line, with all fields.")] = False,
    members: Annotated[
        bool,
        typer.Option("--members", help="For hosts: who came and went, and what was decided on that."),
    ] = False,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="For hosts: what validators found of the members' work."),
    ] = False,
    evaluations: Annotated[
        bool,
        typer.Option("--evaluations", help="For hosts: what validators measured of the model on held-out data."),
    ] = False,
    audit: Annotated[
        bool,
        typer.Option("--audit", help="For hosts: who was expelled for a wrong mean, and by which evidence."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --audit: judge the evidence in the host's folder again.")
    ] = False,
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Show a run's history: the verdict of each round. Hashes and signatures are checked from the first round on."""
    _check_invite(run)
    if members or scores or evaluations:
        from shoal.peer.cli.access import RecordsShown, show_records
        from shoal.swarm.protocol.invite import invite_text

        which: RecordsShown = "scores" if scores else "evaluations" if evaluations else "members"
        show_records(invite_text(run), identity, which, as_json=as_json)
        return
    if check and not audit:
        raise UserError("--check is for --audit")
    if audit:
        from shoal.peer.cli.audits import show_audits
        from shoal.swarm.protocol.invite import invite_text

        show_audits(invite_text(run), identity, console, check=check, as_json=as_json)
        return
    from shoal.peer.cli.log import open_log, show_log

    show_log(open_log(run, _reader(identity)), console, last, round_number, json_lines=as_json)


def _check_invite(text: str) -> None:
    """Raise ``InviteError`` for a broken invite, before anything large is loaded."""
    from shoal.swarm.protocol.invite import Invite, invite_text

    if (url := invite_text(text)).startswith("shoal://"):
        Invite.parse(url)


@app.command("page")
def page_command(
    run: Annotated[
        str,
        typer.Argument(envvar=INVITE_VARIABLE, help="An invite, or the name or folder of a run that is hosted here."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR|URL", help="Folder for the files, or a URL, with fsspec.")],
) -> None:
    """Copy a run's page into files that need no server: for a web site, or to open from a disk."""
    _check_invite(run)
    from shoal.peer.cli.page_copy import copy_page

    console.print(copy_page(run, out), highlight=False, soft_wrap=True)


@app.command("verify")
def verify_command(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a checkpoint, a peer or a run; or a .fork file, see below.")
    ],
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Check checkpoints offline: files, signatures and verdicts, and which verdict vouches for each state.

    Of a .fork file: whether it proves that a coordinator has signed two verdicts of one round."""
    from shoal.peer.cli.verify_view import fork_text, summary, verify_notes, verify_table
    from shoal.peer.history.fork_watch import PROOF_SUFFIX, read_proof
    from shoal.peer.offline.verify import Refused, find_checkpoints, verify_checkpoints
    from shoal.peer.terminal.events import printable

    if folder.suffix == PROOF_SUFFIX:
        console.print(fork_text(read_proof(folder)), highlight=False)
        return
    results = verify_checkpoints(find_checkpoints(folder), _reader(identity))
    console.print(verify_table(results))
    console.print(verify_notes(results), highlight=False)
    wrong = [one for one in results if isinstance(one, Refused)]
    for one in wrong:
        console.print(printable(one.reason), style="red", markup=False, highlight=False, soft_wrap=True)
    if wrong and all(one.is_for_others for one in wrong):
        raise SealedForOthers(
            f"{len(wrong)} of {len(results)} checkpoints are sealed for other readers and were not checked: give the "
            "--identity of a reader"
        )
    if wrong:
        raise StateFileError(summary(results))


@app.command("replay")
def replay_command(
    folder: Annotated[Path, typer.Argument(help="A peer's folder (~/.shoal/runs/RUN-HASH/PEER), or the run's.")],
    number: Annotated[int | None, typer.Option("--round", min=0, help="The last round to replay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one round a line.")] = False,
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Replay finished rounds from their committed bytes, and check that the run's states come out.

    Of a pipeline: in each stage that the peer has kept."""
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
    url: Annotated[str, typer.Argument(help="The URL of `shoal join --copy-to`, or a folder of a run or peer there.")],
    to: Annotated[Path, typer.Option(help="The folder that `shoal join` uses as --state.")] = SHOAL_HOME / "runs",
    identity: IdentityOption = SHOAL_HOME / "identity",
    only_list: Annotated[bool, typer.Option("--list", help="List the copies and restore nothing.")] = False,
    all_stages: Annotated[bool, typer.Option(help="Restore all stages of a pipeline, not only this peer's.")] = False,
    number: Annotated[
        int | None, typer.Option("--round", min=0, help="Restore the copy of this round instead of the newest.")
    ] = None,
) -> None:
    """Restore the newest complete copy of a run's checkpoint; `shoal join` goes on from it."""
    from shoal.peer.cli.restore import list_copies, restore

    if only_list:
        list_copies(url, console)
    else:
        restore(url, to, identity, console, all_stages=all_stages, number=number)


@app.command("checkpoint")
def checkpoint_command(
    run: Annotated[
        str,
        typer.Option(
            envvar=INVITE_VARIABLE, help="A pipeline's invite, or a folder with checkpoints of all its stages."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint to; it must not exist yet.")],
    identity: IdentityOption = SHOAL_HOME / "identity",
) -> None:
    """Join the stages of a pipeline into one checkpoint of the whole model, signed by this identity."""
    from shoal.swarm.protocol.identity import Identity
    from shoal.swarm.protocol.invite import Invite, invite_text

    run = invite_text(run)
    invite = Invite.parse(run) if run.startswith("shoal://") else None
    from shoal.peer.offline.export import gather_checkpoint, gather_from_run

    own = Identity.load_or_create(identity)
    made = run_loop(gather_from_run(invite, out, own)) if invite is not None else gather_checkpoint(Path(run), out, own)
    console.print(
        f"Anchor version {made.anchor_version}, of {len(made.parts or ())} stages after round {made.round}, "
        f"written to {out}, signed by {made.peer}"
    )


@app.command("export")
def export_command(
    run: Annotated[
        str | None,
        typer.Argument(
            envvar=INVITE_VARIABLE, help="An invite, or the folder of a run or of a checkpoint, with all stages."
        ),
    ] = None,
    run_option: Annotated[str | None, typer.Option("--run", help="The same, as an option.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File or folder to write: model.safetensors, model/ or model.gguf.")
    ] = None,
    file_format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: by the recipe's names, for `shoal generate`; hf: a folder for transformers, with "
            "tokenizer and model card; gguf: for llama.cpp.",
        ),
    ] = ExportFormat.safetensors,
    precision: Annotated[Precision, typer.Option(help="Number format; bfloat16 is fetched in half the bytes.")] = (
        Precision.float32
    ),
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or its folder, that made a corpus of tokens.")
    ] = None,
    contributors: Annotated[
        bool, typer.Option("--contributors", help="Name the peers of committed rounds in the model card.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier export.")] = False,
    push: Annotated[
        str | None, typer.Option(help="Also upload it: hub://ORG/NAME or mlflow://NAME.", metavar="URL")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository on the Hub private.")] = False,
    identity: ReaderOption = SHOAL_HOME / "identity",
) -> None:
    """Write a run's model for inference, from a running run (invite) or from checkpoints on this machine."""
    from shoal.swarm.protocol.invite import Invite, invite_text

    source = run_option or run
    if source is None:
        raise UserError("shoal export: name a run: its invite, or the folder of a run or of a checkpoint")
    if file_format is not ExportFormat.hf and contributors:
        raise UserError("--contributors: is for the model card of --format hf")
    if file_format is ExportFormat.safetensors and (tokenizer is not None or push is not None):
        raise UserError("--tokenizer and --push: are for --format hf and gguf")
    if private and push is None:
        raise UserError("--private: is for --push hub://ORG/NAME")
    source = invite_text(source)
    invite = Invite.parse(source) if source.startswith("shoal://") else None
    import torch

    from shoal.peer.exports.about import DEFAULT_NAMES, ExportOptions, ModelFormat, check_replaceable
    from shoal.peer.exports.publish import open_target
    from shoal.peer.offline.export import export_from_run, export_model

    chosen, dtype = ModelFormat(file_format), getattr(torch, precision)
    options = ExportOptions(chosen, dtype, tokenizer, contributors, replace)
    out = out or Path(DEFAULT_NAMES[chosen])
    check_replaceable(out, options)
    target = open_target(push, private=private) if push is not None else None
    if invite is not None:
        origin = run_loop(export_from_run(invite, out, options))
    else:
        origin = export_model(Path(source), out, _reader(identity), options)
    beside = f", its recipe to {out.with_suffix('.json')}" if chosen is ModelFormat.safetensors else ""
    console.print(f"Anchor version {origin.version} written to {out}{beside}", highlight=False)
    if target is not None:
        console.print(f"Uploaded to {target.push(out, origin)}", highlight=False)


@app.command("generate")
def generate_command(
    model: Annotated[Path, typer.Argument(help="Model that `shoal export` wrote: a file, or a folder of hf.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens (bytes) to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the K most likely tokens; 0 among all.")] = 50,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
) -> None:
    """Sample text from an exported model: of the recipe gpt, or a folder of --format hf."""
    if model.is_dir():
        from shoal.peer.exports.generation import generate_from_folder

        print(generate_from_folder(model, prompt, tokens, temperature, top_k, seed))
        return
    from shoal.peer.exports.model_file import read_model
    from shoal.peer.recipes.gpt import Gpt, generate

    loaded = read_model(model)
    if not isinstance(loaded, Gpt):
        raise RecipeError(
            f"{model}: is no model of the recipe gpt; export it with --format hf, and generate from that folder"
        )
    text = generate(loaded, prompt.encode(), tokens, temperature, top_k or None, seed)
    print(prompt + text.decode(errors="replace"))


@app.command("identity")
def identity_command(identity: IdentityOption = SHOAL_HOME / "identity") -> None:
    """Show this machine's peer id and public key; a run file lists such keys as `readers`."""
    from shoal.swarm.protocol.identity import Identity, key_text

    found = Identity.load_or_create(identity)
    print(f"peer id     {found.peer_id}\npublic key  {key_text(found.public_key)}")


def _reader(identity: Path) -> Identity | None:
    from shoal.swarm.protocol.identity import Identity

    return Identity.load_or_create(identity) if identity.exists() else None


def start_place(text: str) -> Path | str:
    """Read an option that names a folder or a URL."""
    return text if "://" in text else Path(text)


def start_of(folder: Path | str | None, identity: Path | None, *, only_parameters: bool) -> StartFrom | None:
    """Read the host's options for the checkpoint to start from. Raises ``UserError``."""
    if folder is None:
        if only_parameters:
            raise UserError(
                "--parameters-only: says what to take from a checkpoint; name the checkpoint with --from FOLDER"
            )
        return None
    keys = identity or SHOAL_HOME / "identity"
    return StartFrom(folder, keys if keys.exists() else None, only_parameters)
