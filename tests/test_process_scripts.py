"""Scripts that patch the product in processes of their own patch what exists: found at once, not when they run."""

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SCRIPTS = sorted(
    path
    for folder in ("integration", "attacks", "chaos/real")
    for path in (TESTS / folder).glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The script as a module; what stands below ``if __name__ == "__main__"`` does not run."""
    for folder in ("integration", path.parent):
        monkeypatch.syspath_prepend(str(TESTS / folder))
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


def is_of_shoal(value: Any) -> bool:
    """Whether it is one of the product's modules or classes, whose attributes have to be there."""
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith("shoal.")
    return isinstance(value, type) and value.__module__.startswith("shoal.")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_it_patches_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = vars(loaded(path, monkeypatch))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        owner = names.get(node.value.id)
        if is_of_shoal(owner) and not getattr(owner, "__annotations__", {}).get(node.attr):
            assert hasattr(owner, node.attr), f"line {node.lineno}: {node.value.id}.{node.attr}"
