"""A directory of runs: a static JSON file that anybody can keep, with where each run's card is, and the run's key."""

from __future__ import annotations

import json
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from shoal.peer.directory.card import MAX_CARD_BYTES, SignedCard, parse_card
from shoal.peer.directory.places import Place, read_place
from shoal.swarm import durable
from shoal.swarm.errors import DirectoryError, StorageError
from shoal.swarm.protocol.run_file import OneLine, RunName
from shoal.swarm.protocol.types import Record

MAX_DIRECTORY_BYTES = 2**18
MOST_RUNS = 500
READ_S = 10.0
"""Most seconds that reading one file from elsewhere takes."""

_MOST_DIRECTORIES = 16
_MAX_SETTINGS_BYTES = 65_536

KeyText = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{52}$")]


class Entry(Record):
    """A run in a directory. ``key``: the key that signs its card; ``card``: a URL, or a path from where the directory
    lies."""

    run: RunName
    key: KeyText
    card: Annotated[OneLine, Field(min_length=1, max_length=1000)]


class Directory(Record):
    """Content of a directory file."""

    format: Literal[1] = 1
    runs: Annotated[tuple[Entry, ...], Field(max_length=MOST_RUNS)] = ()

    @property
    def file_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=2) + "\n").encode()


def parse_directory(data: bytes, shown: str) -> Directory:
    """Parse a directory's file. Raises ``DirectoryError``."""
    try:
        return Directory.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"][:4])[:80]
        message = f"{shown}: not a directory of runs: {where}: {first['msg']}"
        raise DirectoryError(message.replace(": : ", ": ")) from error


def add_card(path: Path, where: str) -> tuple[SignedCard, Place]:
    """Put a card, which is read and checked now, into a directory on this machine, which is made if it is missing.

    Returns the card and its place. Raises ``DirectoryError``, also where another run of that name is listed, and
    ``StorageError``."""
    place = Place(where)
    try:
        card = parse_card(read_place(place, MAX_CARD_BYTES, READ_S).data)
        card.check()
    except DirectoryError as error:
        raise DirectoryError(f"{place.shown}: {str(error).removeprefix(f'{place.shown}: ')}") from error
    listed = load_directory(path).runs if path.exists() else ()
    if any(one.run == card.run and one.key != card.key for one in listed):
        raise DirectoryError(
            f"{path}: lists another run of the name {card.run}, with another key: remove that one first, if it is over"
        )
    others = tuple(one for one in listed if one.run != card.run)
    entry = Entry(run=card.run, key=card.key, card=_reference(place, path))
    _write(path, Directory(runs=(*others, entry)))
    return card, place


def remove_run(path: Path, run: str) -> None:
    """Take a run out of a directory on this machine. Raises ``DirectoryError`` and ``StorageError``."""
    listed = load_directory(path).runs
    if all(one.run != run for one in listed):
        names = ", ".join(one.run for one in listed) or "none"
        raise DirectoryError(f"{path}: lists no run {run[:80]!r}; it lists {names}")
    _write(path, Directory(runs=tuple(one for one in listed if one.run != run)))


def load_directory(path: Path) -> Directory:
    """Read a directory on this machine. Raises ``DirectoryError``."""
    return parse_directory(read_place(Place(str(path)), MAX_DIRECTORY_BYTES, READ_S).data, str(path))


def usual_directories(home: Path) -> list[Place]:
    """The directories of the user's settings (``settings.toml`` in the folder ``home``) and the one of this package.

    Raises ``DirectoryError`` for settings that cannot be used."""
    path, named = home / "settings.toml", []
    if path.exists():
        content = read_place(Place(str(path)), _MAX_SETTINGS_BYTES, READ_S).data
        try:
            named = tomllib.loads(content.decode()).get("directories", [])
        except ValueError as error:
            raise DirectoryError(f"{path}: not valid TOML: {error}") from error
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise DirectoryError(f'{path}: directories: expected a list of URLs and files, such as ["runs.json"]')
        if len(named) > _MOST_DIRECTORIES:
            raise DirectoryError(f"{path}: directories: {len(named)} of them; at most {_MOST_DIRECTORIES} are read")
    own = resources.files("shoal.peer.directory") / "known.json"
    given = [Place(one) for one in dict.fromkeys(named)]
    beside_settings = [one if one.path is None else Place(str(home / one.path)) for one in given]
    return [*beside_settings, Place(str(own))]


def _reference(place: Place, directory: Path) -> str:
    """The card's place as the directory names it: a card on this machine by its path from the directory."""
    if place.path is None:
        return place.where
    return os.path.relpath(place.path.resolve(), directory.resolve().parent)


def _write(path: Path, directory: Directory) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.put(path, directory.file_bytes)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error
