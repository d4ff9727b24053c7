"""Consent of a machine's owner to a run, asked after a summary of what the run would do there.

An invite names the run's hash, so who pastes it agrees to that run: a run that reads no files needs no question. For a
run that reads files, the owner agrees at the terminal, or with ``--accept`` where there is none. The answer is kept
beside the run's checkpoints, for this run file and these folders. Where a host makes the run longer than it was, the
owner is asked again.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.peer.checkpoints.remote.store import without_password
from shoal.peer.data.manifest import MANIFEST
from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import Recipe
from shoal.peer.terminal.events import count_text, number_of, printable
from shoal.peer.training.data_files import DataFile, find_files, named_folders
from shoal.swarm import durable
from shoal.swarm.errors import NotAccepted, RunAmended, StorageError
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.run_sources import file_pattern, shards_url
from shoal.swarm.protocol.types import Changes

log = logging.getLogger(__name__)

ACCEPTED_FILE = "accepted.json"
"""File in a peer's folder of a run that keeps the answer."""

AGREED_ENDS_FILE = "agreed_ends.json"
"""File there that keeps to which later ends of the run the owner has agreed since."""

_AnswerT = TypeVar("_AnswerT", bound=BaseModel)

_LEAST_DIGITS = 16
"""Hexadecimal digits of a run's hash: nobody can find a second run file with the same 64 bits by trying."""

_SHOWN_FILES = 3
_SHOWN_LETTERS = 160


@dataclass(frozen=True)
class RunTerms:
    """Terms to which a volunteer agrees before joining. ``files``: the files that the run would read."""

    run: RunFile
    recipe: Recipe
    folders: tuple[Path, ...] = ()
    files: tuple[DataFile, ...] = ()
    places: DataPlaces = NOWHERE

    @classmethod
    def of(cls, run: RunFile, recipe: Recipe, places: DataPlaces) -> RunTerms:
        """Find the files that the run names, without opening any. ``places``: what ``--data`` names.

        Raises ``UserError`` for a path that is no folder, ``CorpusError`` for missing files."""
        folders, named = named_folders(places.folders), file_pattern(run.data.source)
        files: tuple[DataFile, ...] = ()
        if named is not None:
            files = find_files(*named, folders)
        elif shards_url(run.data.source) is not None:
            files = tuple(find_files("tokens", MANIFEST, [folder])[0] for folder in folders)
        return cls(run, recipe, folders, files, places)


class Consent:
    """Asks the owner. ``accept``: the value of ``--accept``, empty without the option."""

    def __init__(self, console: Console, accept: str = "") -> None:
        self._console = console
        self._accept = accept

    def __call__(self, terms: RunTerms, folder: Path) -> None:
        """Show the terms; return if the owner agrees now or has agreed before. ``folder``: the peer's.

        Raises ``NotAccepted``, and ``StorageError`` where the answer cannot be kept."""
        digest = terms.run.hash.hex()
        self._console.print(terms_table(terms))
        kept = _Accepted(run=digest, folders=[str(one) for one in terms.folders])
        if self._accept:
            check_accepted(self._accept, digest)
        elif not terms.files or _read(folder, ACCEPTED_FILE, _Accepted) == kept:
            return
        elif not _somebody_is_there(self._console):
            raise NotAccepted(
                f"the run would train on the files shown above, and there is no terminal to ask at: if you agree, "
                f"join with --accept {digest[:_LEAST_DIGITS]}"
            )
        else:
            self._ask()
        if terms.files:
            _keep(folder, ACCEPTED_FILE, kept)

    def ask_again(self, amended: RunAmended, run_hash: bytes, folder: Path) -> None:
        """Ask about a run that its host has made longer; return if the owner agrees, for this machine's peer, until the
        host does so again. ``folder``: the peer's.

        Raises ``amended`` if the owner does not agree, or there is nobody to ask."""
        if not _somebody_is_there(self._console):
            raise amended
        self._console.print(Text(printable(str(amended)), style="yellow"))
        if not self._says_yes("Go on? [y/N] "):
            raise amended
        ends = {key: json.loads(value) for key, value in amended.ends}
        _keep(folder, AGREED_ENDS_FILE, _AgreedEnds(run=run_hash.hex(), ends=ends))

    def _ask(self) -> None:
        if not self._says_yes("Join? [y/N] "):
            raise NotAccepted(
                "you did not agree, so the run was not joined: no file was read, and the host was told nothing"
            )

    def _says_yes(self, question: str) -> bool:
        try:
            answer = self._console.input(question, markup=False)
        except (EOFError, KeyboardInterrupt):
            answer = ""
        return answer.strip().lower() in ("y", "yes")


def _somebody_is_there(console: Console) -> bool:
    return sys.stdin.isatty() and console.is_terminal


def check_accepted(given: str, digest: str) -> None:
    """Compare the hash with the given one: in hex digits, or as an invite has it. Raises ``NotAccepted``."""
    digits = given.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{_LEAST_DIGITS},64}}", digits):
        if not re.fullmatch(r"(run=)?[A-Za-z0-9_-]{43}", given):
            raise NotAccepted(
                f"--accept {given[:80]}: expected the run's hash, at least its first {_LEAST_DIGITS} hex digits, or "
                "what follows run= in the invite"
            )
        digits = base64.urlsafe_b64decode(given.removeprefix("run=") + "=").hex()
    if not digest.startswith(digits):
        raise NotAccepted(
            f"--accept {given}: the invite is of another run, {digest[:_LEAST_DIGITS]}, which is shown above"
        )


# What is shown ----------------------------------------------------------------------------------------------


def terms_table(terms: RunTerms) -> Table:
    """Make the summary. Text of the run file is stripped of what could move the cursor."""
    run, table = terms.run, Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("Run", f"{run.run.name}, hash {run.hash.hex()[:_LEAST_DIGITS]}"),
        ("Trains", _model(terms)),
        ("How", f"{run.algorithm}, {_end(run)}"),
        ("On", _data(terms)),
        (
            "Gives",
            "what training changes in the model, a digest of the data, and this machine's name, device and speed; no "
            "files and nothing of their names",
        ),
    ]
    if terms.files:
        rows.append(("Mind", "who gets the model may get parts of these files out of it again"))
    for label, words in rows:
        table.add_row(label, Text(printable(words)))
    return table


def _model(terms: RunTerms) -> str:
    recipe = terms.run.recipe
    settings = ", ".join(f"{name} {value}" for name, value in recipe.settings.items())
    parameters = _parameters(terms.recipe)
    size = "" if parameters is None else f", {count_text(parameters)} parameters"
    return f"recipe {recipe.name}{size}{f' ({_short(settings)})' if settings else ''}"


def _parameters(recipe: Recipe) -> int | None:
    """Count the model's parameters without memory for them; None where the model cannot be built so."""
    try:
        with torch.device("meta"):
            return sum(one.numel() for one in recipe.model_from_config(recipe.config()).parameters())
    except (RuntimeError, NotImplementedError) as error:
        log.debug("how many parameters there are is not known before: %s", error)
        return None


def _end(run: RunFile) -> str:
    section = run.run
    ends = [
        f"{count_text(section.tokens)} tokens" if section.tokens else "",
        number_of(section.rounds, "round") if section.rounds else "",
        f"{section.max_s / 3600:.3g} hours" if section.max_s else "",
    ]
    if section.stop_when is not None:
        ends.append("its held-out loss says so")
    words = " or ".join(one for one in ends if one)
    return f"until {words}" if words else "until the host ends it"


def _data(terms: RunTerms) -> str:
    source, files = terms.run.data.source, terms.files
    if not files and source == "stdlib":
        return "the standard library of this Python"
    if not files and shards_url(source) is not None:
        mirrors = terms.places.mirrors or (shards_url(source) or "", *terms.run.data.mirrors)
        disk = filesize.decimal(terms.places.cache_bytes)
        return (
            f"token shards, downloaded from {', '.join(map(without_password, mirrors))}, of which at most {disk} "
            "stay on the disk; no files of this machine"
        )
    if not files:
        return f"{source}; no files of this machine"
    names = ", ".join(_short(file.name) for file in files[:_SHOWN_FILES])
    more = f" and {len(files) - _SHOWN_FILES:,} more" if len(files) > _SHOWN_FILES else ""
    size = filesize.decimal(sum(file.size_bytes for file in files))
    places = ", ".join(str(folder) for folder in dict.fromkeys(file.folder for file in files))
    return f"{number_of(len(files), 'file')} of this machine, {size}, {source} below {places}: {names}{more}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"


# What is remembered -----------------------------------------------------------------------------------------


class _Accepted(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    folders: list[str]


class _AgreedEnds(BaseModel):
    model_config = ConfigDict(extra="forbid")

    run: str
    ends: dict[str, int | float | None]


def agreed_ends(folder: Path, run_hash: bytes) -> Changes:
    """Return the later ends of a run to which the owner has agreed before. ``folder``: the peer's."""
    kept = _read(folder, AGREED_ENDS_FILE, _AgreedEnds)
    if kept is None or kept.run != run_hash.hex():
        return ()
    return tuple((key, json.dumps(value)) for key, value in kept.ends.items())


def _read(folder: Path, name: str, kind: type[_AnswerT]) -> _AnswerT | None:
    try:
        return kind.model_validate_json((folder / name).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("whether this run was agreed to before cannot be read: %s", error)
        return None


def _keep(folder: Path, name: str, answer: BaseModel) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.put(folder / name, answer.model_dump_json().encode())
    except OSError as error:
        raise StorageError(f"{folder / name}: cannot be written: {error}") from error
