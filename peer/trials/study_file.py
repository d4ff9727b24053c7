"""The study file: a run file and the settings of it that trials vary, validated, with a hash that names the study.

Host and members make a trial's run file from the study and the trial's values alike. So whoever agrees to a study, by
its hash, agrees to each run of it, and to no other."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from shoal.swarm.errors import RunFileError, StudyError
from shoal.swarm.protocol.field_errors import field_errors
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file
from shoal.swarm.protocol.run_toml import MAX_RUN_FILE_BYTES
from shoal.swarm.protocol.types import Record

MAX_STUDY_BYTES = 2 * MAX_RUN_FILE_BYTES
"""Of a study in JSON, with its run file."""

_MAX_STUDY_FILE_BYTES = 100_000
_FIXED = ("run.name", "pins", "start", "card", "access")
"""Settings that trials have no say in: by these a run is found, joined and begun."""

Value: TypeAlias = float | int | str | bool
Values: TypeAlias = dict[str, Value]
"""Settings of a trial, by their dotted keys in a run file."""

Number = Annotated[float, Field(allow_inf_nan=False)] | Annotated[int, Field(ge=-(2**53), le=2**53)]


class SearchRange(Record):
    """Values to try for one setting: ``choices``, or numbers from ``low`` to ``high``; integers if both are."""

    low: Number | None = None
    high: Number | None = None
    log: bool = False
    step: Annotated[Annotated[int, Field(gt=0)] | None, Field(description="distance of integers")] = None
    choices: Annotated[tuple[bool | int | float | str, ...], Field(strict=False, max_length=64)] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> SearchRange:
        if self.choices:
            if self.low is not None or self.high is not None or self.log or self.step is not None:
                raise ValueError("expected choices alone, or low and high")
            if len({json.dumps(one) for one in self.choices}) < len(self.choices):
                raise ValueError("choices: one is there twice")
            return self
        if self.low is None or self.high is None:
            raise ValueError("expected choices, or low and high")
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}: expected low < high")
        if self.log and self.low <= 0:
            raise ValueError("log: expected low > 0 with it")
        if self.step is not None and (not self.is_integer or self.log):
            raise ValueError("step: is for integers, without log")
        return self

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def has(self, value: Any) -> bool:
        """Whether a trial may have this value."""
        if self.choices:
            return any(type(value) is type(one) and value == one for one in self.choices)
        assert self.low is not None
        assert self.high is not None
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else int | float):
            return False
        return self.low <= value <= self.high and (self.step is None or (value - self.low) % self.step == 0)

    def corners(self) -> tuple[Value, ...]:
        """Values that have to be possible for all others to be."""
        return self.choices or tuple(one for one in (self.low, self.high) if one is not None)


class StudySection(Record):
    """``[study]``: how many trials there are, and how they are chosen and ended."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,49}$")]
    """Trials are runs of this name with a number."""

    trials: Annotated[int, Field(ge=1, le=10_000)]
    parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """Trials at once; peers are shared out among them."""

    sampler: Literal["tpe", "random"] = "tpe"
    pruner: Literal["median", "halving", "none"] = "median"
    startup_trials: Annotated[int, Field(ge=1, le=10_000)] = 5
    """Trials before the sampler learns from earlier ones and ``median`` ends any."""

    warmup_evaluations: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Evaluations of a trial before it may be ended early."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    every_rounds: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Committed rounds between evaluations of the held-out loss."""

    samples: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Held-out samples of an evaluation, the same for all trials."""


class StudyFile(Record):
    """A study. ``base``: the text of the run file; ``space``: what is tried, by dotted key of a run file; ``first``:
    values of the first trials, of which others are searched for."""

    study: StudySection
    base: Annotated[str, Field(max_length=MAX_RUN_FILE_BYTES)]
    space: Annotated[dict[str, SearchRange], Field(min_length=1, max_length=64)]
    first: Annotated[tuple[dict[str, bool | int | float | str], ...], Field(strict=False, max_length=100)] = ()

    @field_validator("space")
    @classmethod
    def _may_vary(cls, space: dict[str, SearchRange]) -> dict[str, SearchRange]:
        for key in space:
            steps = key.split(".")
            if not all(steps) or len(key) > 200 or (len(steps) < 2 and key != "algorithm"):
                raise ValueError(f"{key[:80]!r}: expected a dotted key of the run file, such as inner.lr")
            if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED):
                raise ValueError(f"{key}: is the same in all trials: set it in the run file")
        return space

    @model_validator(mode="after")
    def _first_values(self) -> StudyFile:
        for values in self.first:
            for key, value in values.items():
                if key not in self.space or not self.space[key].has(value):
                    raise ValueError(f"first: {key} = {value!r}: is not in the search space")
        return self

    @property
    def hash(self) -> bytes:
        """SHA-256 of the study's canonical JSON."""
        return hashlib.sha256(self.as_json().encode()).digest()

    def as_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def trial(self, number: int, values: Mapping[str, Any]) -> tuple[str, RunFile]:
        """Return the run file of a trial, its text and content. Raises ``StudyError`` for values that are not those of
        a trial, and ``RunFileError`` for settings that do not go together."""
        wrong = [key for key in {**self.space, **values} if key not in values or key not in self.space]
        wrong += [key for key, value in values.items() if key in self.space and not self.space[key].has(value)]
        if wrong:
            raise StudyError(f"trial {number}: {', '.join(sorted(wrong))[:200]}: is not of the study's search space")
        return self._run_file(f"{self.study.name}-{number}", values)

    def _run_file(self, name: str, values: Mapping[str, Any]) -> tuple[str, RunFile]:
        try:
            content = tomllib.loads(self.base)
        except (ValueError, RecursionError) as error:
            raise StudyError(f"the study's run file: not valid TOML: {error}") from error
        for key, value in {**values, "run.name": name}.items():
            *path, last = key.split(".")
            table = content
            for step in path:
                table = table.setdefault(step, {})
                if not isinstance(table, dict):
                    raise StudyError(f"space.{key}: {step} is no table in the run file")
            table[last] = value
        text = toml_text(content)
        return text, parse_run_file(text, f"the run file of {name}")

    def check(self) -> RunFile:
        """Try the search space's ends one by one, and return the run file of the study. Raises ``StudyError`` that
        names the setting, and ``RunFileError``."""
        base = parse_run_file(self.base, "the study's run file")
        if base.access.admission == "list":
            raise StudyError(
                'access.admission = "list": trials have no list of their own: take "token" or "open" in the run file'
            )
        if base.recipe.name == "own":
            raise StudyError("recipe.name: trials need a recipe, as members cannot start a loop of their own for each")
        if base.pipeline is not None:
            raise StudyError("pipeline: trials are of whole models, whose held-out loss one machine can compute")
        if base.run.tokens is None and base.run.rounds is None and base.run.max_s is None:
            raise StudyError("run: a trial has to end: set run.tokens, run.rounds or run.max_s in the run file")
        for key, one in self.space.items():
            for value in one.corners():
                try:
                    self._run_file(f"{self.study.name}-0", {key: value})
                except RunFileError as error:
                    raise StudyError(f"space.{key}: {value!r}: {error}") from error
        return base


class _StudyToml(Record):
    """The study file as it is written: ``run`` is the run file's path, from the study file's folder."""

    study: StudySection
    run: str
    space: dict[str, SearchRange]
    first: tuple[dict[str, bool | int | float | str], ...] = Field(default=(), strict=False)


def load_study(path: Path) -> StudyFile:
    """Read a study file and the run file that it names. Raises ``StudyError`` and ``RunFileError``."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_STUDY_FILE_BYTES + 1)
        content = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{path}: not valid TOML: {error}") from error
    if len(data) > _MAX_STUDY_FILE_BYTES:
        raise StudyError(f"{path}: larger than {_MAX_STUDY_FILE_BYTES} bytes, the most that a study file may have")
    try:
        written = _StudyToml.model_validate(content)
    except ValidationError as error:
        raise StudyError(f"{path}: " + "; ".join(field_errors(error, _StudyToml))) from error
    base, _ = load_run_file(path.parent / written.run)
    try:
        made = StudyFile(study=written.study, base=base, space=written.space, first=written.first)
    except ValidationError as error:
        raise StudyError(f"{path}: " + "; ".join(field_errors(error, StudyFile))) from error
    if len(made.as_json()) > MAX_STUDY_BYTES:
        raise StudyError(
            f"{path}: with its run file larger than {MAX_STUDY_BYTES} bytes, the most that members are sent"
        )
    try:
        made.check()
    except StudyError as error:
        raise StudyError(f"{path}: {error}") from error
    return made


def parse_study(text: str) -> StudyFile:
    """Validate a study in JSON, which came from its host. Raises ``StudyError``."""
    try:
        return StudyFile.model_validate_json(text)
    except ValidationError as error:
        raise StudyError("the host's study: " + "; ".join(field_errors(error, StudyFile))) from error


@dataclass(frozen=True)
class _Leaf:
    key: str
    value: Any


def toml_text(content: Mapping[str, Any]) -> str:
    """Write a run file's content as TOML: one dotted key a line."""
    return "".join(f"{leaf.key} = {_inline(leaf.value)}\n" for leaf in _leaves(content, ""))


def _leaves(table: Mapping[str, Any], prefix: str) -> list[_Leaf]:
    found: list[_Leaf] = []
    for name, value in table.items():
        key = prefix + json.dumps(name)
        found += _leaves(value, f"{key}.") if isinstance(value, Mapping) and value else [_Leaf(key, value)]
    return found


def _inline(value: Any) -> str:
    match value:
        case bool() | str() | int():
            return json.dumps(value)
        case float() if math.isfinite(value):
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(_inline, value))}]"
        case dict():
            return f"{{ {', '.join(f'{json.dumps(name)} = {_inline(one)}' for name, one in value.items())} }}"
    raise StudyError(f"the run file has a value that no setting can have: {str(value)[:80]}")
