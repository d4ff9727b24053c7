"""Amendments of a running run: which settings its host may change, and the run file as it is with them.

Each names the round from which a setting has another value. The coordinator puts the settings of a round that differ
from the run file into the round's verdict, so one verdict is enough to compute what its round has to compute, and a
chain of verdicts is signed and checked as before. The run's hash stays that of the run file: it names the run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from shoal.swarm.errors import RunChanged, RunFileError
from shoal.swarm.protocol.field_errors import field_errors
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Amendment, Changes

AMENDABLE = (
    *("inner.lr", "outer.lr", "schedule.kind", "schedule.final_factor"),
    *("round.tokens", "round.max_s"),
    *("run.tokens", "run.rounds", "run.max_s"),
    *("access.admission", "access.joins_per_minute", "access.joins_per_minute_per_network"),
    *("access.members_per_network", "access.members_without_credit"),
    *("card.title", "card.purpose", "card.homepage", "card.contact"),
)
"""Settings that a host may change. All others are what the members have agreed to."""

_ENDS = ("run.tokens", "run.rounds", "run.max_s")


def changes_at(amendments: Iterable[Amendment], round_number: int) -> Changes:
    """Return the settings of a round that differ from the run file; of one setting the latest amendment counts."""
    in_force: dict[str, str] = {}
    for one in sorted(amendments, key=lambda one: one.at_round):
        if one.at_round <= round_number:
            in_force[one.key] = one.value
    return tuple(sorted(in_force.items()))


def amended(run: RunFile, changes: Changes) -> RunFile:
    """Return the run file with other settings, and the hash of the original.

    Raises ``RunChanged`` for changes that no host may make, whoever has signed them."""
    return _amended(_ById(run), changes) if changes else run


def check_changes(run: RunFile, changes: Changes) -> RunFile:
    """As ``amended``, for what a host asks for. Raises ``RunFileError`` that says why a change cannot be made."""
    for key, _ in changes:
        if key not in AMENDABLE:
            raise RunFileError(
                f"{key}: cannot be changed in a running run, as its members have agreed to it: start a new run, from a "
                f"checkpoint of this one if you like (shoal host --from). Amendable: {', '.join(AMENDABLE)}"
            )
        if run.pipeline is not None and key == "access.admission":
            raise RunFileError(f"{key}: a pipeline's stages are planned for it from the beginning: start a new run")
    if any(key == "inner.lr" for key, _ in changes):
        unused = run.algorithm == "virtual_batch" or run.recipe.name == "own"
        if unused:
            raise RunFileError("inner.lr: has no effect in this run")
    now = _validated(run, changes)
    if now.pipeline is not None and now.pins is not None:
        now.check_micro_batches(now.pins.tokens_per_sample)
    return now


def ends_of(run: RunFile) -> Changes:
    """Return the settings by which a run ends, as they are in a run file."""
    return tuple((key, json.dumps(getattr(run.run, key.removeprefix("run.")))) for key in _ENDS)


def asks_for_more(before: RunFile, now: RunFile, agreed: Changes = ()) -> list[str]:
    """Return the settings by which a run may last longer than its members have agreed to: to the run file ``before``,
    and later to the ends ``agreed`` (``ends_of``)."""
    found, ends = [], dict(ends_of(before)) | dict(agreed)
    for key in _ENDS:
        old, new = json.loads(ends[key]), getattr(now.run, key.removeprefix("run."))
        if old is not None and (new is None or new > old):
            found.append(key)
    return found


class _ById:
    """Run file as the key of a cache: the object itself, which never changes. Its hash is that of the run also after
    amendments, and takes long for how often a coordinator asks."""

    def __init__(self, run: RunFile) -> None:
        self.run = run

    def __hash__(self) -> int:
        return id(self.run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.run is self.run


@lru_cache(maxsize=64)
def _amended(original: _ById, changes: Changes) -> RunFile:
    try:
        return check_changes(original.run, changes)
    except RunFileError as error:
        raise RunChanged(f"the host has changed the run in a way that no host may: {error}") from error


def _validated(run: RunFile, changes: Changes) -> RunFile:
    """Raises ``RunFileError``."""
    content = run.model_dump()
    for key, text in changes:
        section, _, name = key.partition(".")
        content[section][name] = _parsed(key, text)
    try:
        return RunFile.model_validate(content).named_by(run)
    except ValidationError as error:
        raise RunFileError(field_errors(error, RunFile)[0]) from error


def _parsed(key: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"{key}: not a JSON value: {text[:80]!r}") from error
    if isinstance(value, list | dict) or json.dumps(value) != text:
        raise RunFileError(f"{key}: expected a number, a text or null in JSON, not {text[:80]!r}")
    return value
