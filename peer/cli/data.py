"""``shoal data build``, ``verify`` and ``show``: token shards, which runs train on by URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal.swarm.errors import CorpusError, UserError

if TYPE_CHECKING:
    from shoal.peer.data.manifest import Manifest

app = typer.Typer()
shards = typer.Typer(no_args_is_help=True, help="Token shards: build them from text, check them, show them.")
app.add_typer(shards, name="data")
"""Part of the ``shoal`` command in ``main.py``."""

console = Console()

SourceArgument = Annotated[str, typer.Argument(metavar="FOLDER|URL", help="Where the shards and their manifest are.")]


@shards.command("build")
def build_command(
    out: Annotated[Path, typer.Argument(help="Folder for the shards; with --tokens, where they are already.")],
    text: Annotated[Path | None, typer.Option(help="Text files: a document each.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Files of JSON lines: a document a line.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Parquet files: a document a row.")] = None,
    hf_dataset: Annotated[Path | None, typer.Option(help="Folder of a Hugging Face dataset.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Only write a manifest for .ds, .u8, .u16 or .u32 files in OUT.")
    ] = False,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json; or bytes.")] = "bytes",
    field: Annotated[str, typer.Option(help="Field or column with the text.")] = "text",
    end: Annotated[str, typer.Option(help="Token after each document; by default a usual one, if there is.")] = "",
    block: Annotated[str, typer.Option(metavar="SIZE", help="Size of a block, such as 4M.")] = "4M",
    processes: Annotated[int, typer.Option(min=0, help="Processes that tokenize; 0: one a core.")] = 0,
) -> None:
    """Make token shards and their manifest. The same command goes on after a kill."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from shoal.peer.data.build import about_tokenizer, build_shards, index_shards
    from shoal.peer.data.documents import dataset_files, input_files, plan_pieces
    from shoal.peer.data.manifest import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES
    from shoal.peer.machine_memory import parse_memory

    given = {"text": text, "jsonl": jsonl, "parquet": parquet, "hf": hf_dataset, "tokens": out if tokens else None}
    named = {kind: path for kind, path in given.items() if path is not None}
    if len(named) != 1:
        raise UserError("expected one of --text, --jsonl, --parquet, --hf-dataset and --tokens")
    block_bytes = parse_memory(block, "--block")
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 4:
        raise UserError(f"--block {block}: expected 4K to 64M, a multiple of 4 bytes")
    ((kind, folder),) = named.items()
    if not folder.exists():
        raise CorpusError(f"{folder}: there is no such file or folder")
    about = about_tokenizer(tokenizer, end)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("Tokenizing" if kind != "tokens" else "Hashing", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if kind == "tokens":
            manifest = index_shards(out, about, block_bytes, progress)
        else:
            kind, files = dataset_files(folder) if kind == "hf" else (kind, input_files(folder, kind))
            manifest = build_shards(
                out,
                plan_pieces(kind, files),
                tokenizer,
                about,
                field=field,
                block_bytes=block_bytes,
                processes=processes or os.cpu_count() or 1,
                progress=progress,
            )
    _show(manifest)
    console.print(
        f'\nPut {out} on a web server that sends ranges, and into the run file:\n\n[data]\nsource = "shards:https://…"\n'
        f'manifest = "{manifest.digest.hex()}"',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@shards.command("show")
def show_command(source: SourceArgument) -> None:
    """Show what shards are of: tokens, tokenizer, blocks, and the digest for a run file."""
    _show(_manifest(source))


@shards.command("verify")
def verify_command(source: SourceArgument) -> None:
    """Read all shards and compare every block with the manifest."""
    from blake3 import blake3
    from rich.progress import track

    from shoal.peer.data.mirrors import Mirror, Mirrors
    from shoal.peer.data_places import is_url

    manifest = _manifest(source)
    mirrors = Mirrors([Mirror(source, by_owner=True)]) if is_url(source) else None
    bad: list[str] = []
    for block in track(range(manifest.blocks), "Checking", console=console):
        file, start, stop = manifest.place(block)
        digest = manifest.block_digest(block)

        def is_right(data: bytes, digest: bytes = digest) -> bool:
            return blake3(data).digest() == digest

        if mirrors is not None:
            mirrors.block(file.name, start, stop, is_right)
            continue
        try:
            with Path(source, file.name).open("rb") as opened:
                opened.seek(start)
                data = opened.read(stop - start)
        except OSError as error:
            raise CorpusError(f"{Path(source, file.name)}: {error.strerror}; copy the file again") from error
        if not is_right(data):
            bad.append(f"{file.name}: bytes {start:,} to {stop:,}{' (cut off)' if len(data) < stop - start else ''}")
    if bad:
        more = f" and {len(bad) - 3:,} more" if len(bad) > 3 else ""
        raise CorpusError(f"{len(bad):,} of {manifest.blocks:,} blocks are damaged: {'; '.join(bad[:3])}{more}")
    console.print(f"All {manifest.blocks:,} blocks are as the manifest says.")


def _manifest(source: str) -> Manifest:
    from shoal.peer.data.manifest import MANIFEST, MAX_MANIFEST_BYTES, parse_manifest
    from shoal.peer.data.mirrors import Mirror, Mirrors
    from shoal.peer.data_places import is_url

    if is_url(source):
        return parse_manifest(Mirrors([Mirror(source, by_owner=True)]).manifest(lambda data: True), source)
    path = Path(source) / MANIFEST
    try:
        with path.open("rb") as file:
            return parse_manifest(file.read(MAX_MANIFEST_BYTES + 1), str(path))
    except OSError as error:
        raise CorpusError(f"{path}: {error.strerror}: give the folder that `shoal data build` has made") from error


def _show(manifest: Manifest) -> None:
    from rich import filesize

    about = manifest.tokenizer
    table = Table.grid(padding=(0, 2))
    rows = [
        ("Tokens", f"{manifest.tokens:,} of {manifest.dtype}, {filesize.decimal(manifest.size_bytes)}"),
        ("Tokenizer", f"{about.name}, {about.vocab:,} tokens{f', {about.digest.hex()}' if about.digest else ''}"),
        ("Blocks", f"{manifest.blocks:,} of {filesize.decimal(manifest.block_bytes)} in {len(manifest.files):,} files"),
        ("Manifest", manifest.digest.hex()),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
