"""The generated pages of docs/ say what the code says."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shoal.peer.event_schema import EVENTS, make_event

ROOT = Path(__file__).resolve().parent.parent


def load_maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "make_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["run-file.md", "events.md", "metrics.md"])
def test_pages_are_fresh(page: str) -> None:
    made = load_maker().PAGES[page]()
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == made, "run `make docs`"


def made_events() -> dict[str, set[str]]:
    """By name the fields of every event that the source makes or emits by a literal name."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "peer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("emit", "_emit", "make_event", "_report", "report") and isinstance(node.args[0].value, str):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                found.setdefault(node.args[0].value, set()).update(fields)
    return found


def test_every_event_of_the_code_is_in_the_schema_and_the_other_way_round() -> None:
    found = made_events()
    assert found.keys() == EVENTS.keys()
    for name, fields in found.items():
        assert fields <= EVENTS[name].fields.keys() | {"stage"}, name


def test_what_the_schema_does_not_have_is_no_event() -> None:
    assert make_event("aborted", round=3, reason="why", stage=1)["round"] == 3
    for name, fields in (("aborted", {"rounds": 3}), ("abort", {})):
        with pytest.raises(ValueError, match="schema of events has no"):
            make_event(name, **fields)
