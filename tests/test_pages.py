"""What README and docs/ name exists: linked pages and headings, files, and the functions of the hop tables."""

import ast
import re
from pathlib import Path

import pytest

from shoal.swarm import errors

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("compression", "swarm", "peer")
SOURCES = sorted(
    path for room in (*ROOMS, "tests", "benchmarks", "examples", "docs") for path in (ROOT / room).rglob("*.py")
)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCT = [path.read_text(encoding="utf-8") for path in SOURCES if path.relative_to(ROOT).parts[0] in ROOMS]
HOP_TABLES = ("The way of a newcomer", "The way of a contribution", "The way of a report to the verdict")

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@named
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@named
def test_named_source_files_exist(page: Path) -> None:
    known = {f"/{path.relative_to(ROOT)}" for path in SOURCES}
    for name in re.findall(r"`([\w/.]+\.py)`", page.read_text(encoding="utf-8")):
        assert any(path.endswith(f"/{name}") for path in known), name


@named
def test_named_classes_exist(page: Path) -> None:
    page_text = page.read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```.*?^```", page_text, flags=re.MULTILINE | re.DOTALL))
    for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w+)\b[^`]*`", page_text):
        assert name.startswith("Llama") or name in code or any(name in text for text in PRODUCT), name


def functions_in(path: Path) -> set[str]:
    """Functions of a module, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name for one in members if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


@pytest.mark.parametrize("title", HOP_TABLES)
def test_functions_of_the_hop_tables_exist(title: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    assert len(rows) >= 10
    for row in rows:
        hop = re.match(r"\| `([\w/]+\.py)` `([\w.]+)` \| ", row)
        assert hop is not None, f"not a file and a function: {row}"
        assert hop[2] in functions_in(ROOT / hop[1]), row


def test_exit_codes_are_those_of_the_errors() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    said = {
        (name, int(code))
        for code, names in re.findall(r"^\| (\d+) \| ([^|]+) \|", page, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    made = {
        (name, one.exit_code)
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, errors.ShoalError) and one.exit_code != 1
    }
    assert said == made
