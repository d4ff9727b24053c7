"""Tree of the source in ``docs/architecture.md``, made from the modules' docstrings; ``make docs`` runs it.

The first sentence of a module's docstring says what the module is: here they stand side by side, so that a line's room
is found from the tree alone. Without arguments the page is written; with ``--check`` it is compared, and 1 returned
where it is stale.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree: made by `make docs` -->\n", "<!-- end of the tree -->\n"
ROOMS = {
    "compression": "Tensors to bytes and back; knows nothing of Shoal's other rooms.",
    "swarm": "Everything that holds peers together.",
    "peer": "Everything that runs on a volunteer's machine.",
}
_WIDTH, _INDENT, _NAMES = 118, 2, 24


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line; empty without one."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    end = text.find(". ")
    return (text if end < 0 else text[: end + 1]).replace("``", "").removesuffix(".")


def _entry(depth: int, name: str, words: str) -> str:
    lead = " " * (_INDENT * depth) + name
    lead = lead.ljust(_NAMES) if len(lead) < _NAMES else lead + "  "
    return textwrap.fill(words, _WIDTH, initial_indent=lead, subsequent_indent=" " * _NAMES, break_on_hyphens=False)


def _folder(folder: Path, depth: int) -> Iterator[str]:
    face = folder / "__init__.py"
    words = ROOMS[folder.name] if not depth else first_sentence(face)
    yield _entry(depth, f"{folder.name}/", words.removesuffix("."))
    for path in sorted(folder.iterdir(), key=lambda one: (one.is_dir(), one.name)):
        if path.is_dir() and any(path.glob("*.py")):
            yield from _folder(path, depth + 1)
        elif path.suffix == ".py" and path.name not in ("__init__.py", "__main__.py"):
            yield _entry(depth + 1, path.name, first_sentence(path))


def tree() -> str:
    """Return the whole tree as a block of Markdown."""
    lines = [line for room in ROOMS for line in _folder(ROOT / room, 0)]
    return "\n".join(["```", *lines, "```", ""])


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = before + BEGIN + tree() + END + after
    if "--check" in sys.argv:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
