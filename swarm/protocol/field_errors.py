"""Sentences on the fields that pydantic refuses: what is wrong, what was given, and the name that was probably meant.

Settings are written by people, and a misspelt name is the most frequent mistake in them: pydantic reports it twice, as
an unknown field and as a missing one, and says neither which names there are nor which one is close."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_MAX_SHOWN = 80
_MAX_NAMES = 12
_MAX_LINES = 20  # a stranger's file may have thousands of wrong fields
_MAX_NAME = 64


def field_errors(error: ValidationError, model: type[BaseModel], prefix: str = "", *, got: bool = False) -> list[str]:
    """Explain each refused field of ``model`` in a sentence that starts with its dotted name, below ``prefix``.

    ``got``: quote what was given there, shortened; not for values that may be secret or that a stranger has sent."""
    problems = error.errors(include_url=False)
    left_out = len(problems) - _MAX_LINES
    problems = problems[:_MAX_LINES]
    unknown = {one["loc"]: _meant(one["loc"], model) for one in problems if one["type"] == "extra_forbidden"}
    # The missing field is told by the sentence on its misspelling.
    told = {(*loc[:-1], name) for loc, name in unknown.items() if name}
    lines = []
    for problem in problems:
        loc = problem["loc"]
        if problem["type"] == "missing" and loc in told:
            continue
        words = _words(loc, model, unknown) if loc in unknown else problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            words = "is missing"
        elif problem["type"] == "literal_error":
            words += did_you_mean(problem["input"], re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
        elif got and loc not in unknown:
            words += f" (got {repr(problem['input'])[:_MAX_SHOWN]})"
        field = ".".join(str(step) for step in ([prefix] if prefix else []) + list(loc))
        lines.append(f"{field}: {words}" if field else words)
    return [*lines, f"and {left_out} more"] if left_out > 0 else lines


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """The end of a sentence that asks for the one of ``names`` that is close to what was given; empty if none is."""
    close = difflib.get_close_matches(str(given)[:_MAX_NAME], sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _words(loc: Sequence[int | str], model: type[BaseModel], unknown: dict[tuple[int | str, ...], str]) -> str:
    if meant := unknown[tuple(loc)]:
        return f"no such field; did you mean {meant!r}?"
    names = sorted(_names(loc[:-1], model))
    if not names:
        return "no such field"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"no such field; there are {', '.join(names[:_MAX_NAMES])}{more}"


def _meant(loc: Sequence[int | str], model: type[BaseModel]) -> str:
    """Name of the field that is closest to the unknown one at ``loc``; empty if none is close."""
    close = difflib.get_close_matches(str(loc[-1])[:_MAX_NAME], sorted(_names(loc[:-1], model)), n=1, cutoff=0.6)
    return close[0] if close else ""


def _names(loc: Sequence[int | str], model: type[BaseModel]) -> set[str]:
    """Names of the fields at ``loc``; of all that may be there, where the type is a union."""
    models = [model]
    for step in loc:
        fields = [one.model_fields.get(str(step)) for one in models]
        inner = [found for field in fields if field is not None for found in _models(field.annotation)]
        models = inner or models  # steps of a union's branch, or of a list, name no field
    return {field.alias or name for one in models for name, field in one.model_fields.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """All models within a type such as ``list[Model | None]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
