"""Sentences on refused fields."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.swarm.protocol.field_errors import field_errors


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    layers: int
    width: int = 4


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    settings: Inner
    many: list[Inner] = Field(default_factory=list)
    kind: Literal["far", "near"] = "far"


def errors(content: Any, **options: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(content)
    return field_errors(caught.value, Outer, **options)


def test_a_misspelt_name_is_told_once_with_the_one_that_was_meant() -> None:
    told = errors({"name": "a", "settings": {"layer": 3}})
    assert told == ["settings.layer: no such field; did you mean 'layers'?"]


def test_a_name_that_is_close_to_none_is_told_with_those_that_there_are() -> None:
    told = errors({"name": "a", "settings": {"layers": 3, "colour": 1}})
    assert told == ["settings.colour: no such field; there are layers, width"]


def test_fields_of_list_items_are_known_too() -> None:
    told = errors({"name": "a", "settings": {"layers": 1}, "many": [{"layers": 1, "widht": 2}]})
    assert told == ["many.0.widht: no such field; did you mean 'width'?"]


def test_a_misspelt_choice_is_told_with_the_one_that_was_meant() -> None:
    content = {"name": "a", "settings": {"layers": 1}}
    assert errors(content | {"kind": "neer"}) == ["kind: Input should be 'far' or 'near'; did you mean 'near'?"]
    assert errors(content | {"kind": "x"}) == ["kind: Input should be 'far' or 'near'"]


def test_what_is_missing_is_missing() -> None:
    assert errors({"settings": {"layers": 1}}) == ["name: is missing"]


def test_values_are_quoted_only_if_asked_for_and_never_at_length() -> None:
    content = {"name": "a", "settings": {"layers": "x" * 10_000}}
    [silent] = errors(content)
    [quoted] = errors(content, prefix="recipe", got=True)
    assert "xx" not in silent
    assert quoted.startswith("recipe.settings.layers: ")
    assert "xx" in quoted
    assert len(quoted) < 300


def test_a_file_of_thousands_of_wrong_fields_is_told_in_some_lines() -> None:
    told = errors({"name": "a", "settings": {"layers": 1}, **{f"wrong{number}": 1 for number in range(5_000)}})
    assert len(told) == 21
    assert told[-1] == "and 4980 more"
