"""Copies of a run's page, made from a host's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.journals import leased
from tests.swarm.coordinator.stories import RUN, story
from typer.testing import CliRunner

from shoal.peer.cli import host as hosting
from shoal.peer.cli.main import app
from shoal.peer.cli.page_copy import copy_page
from shoal.swarm.errors import StateFileError, UserError
from shoal.swarm.web.files import STATIC_FILES

pytest.importorskip("starlette")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's folder with a run of some rounds."""
    folder = tmp_path / "host" / "test"
    journal = leased(folder, RUN.hash, "toml")
    for events, _ in story():
        journal.append(journal.next_index, events)
    journal.close()
    (folder / hosting.RUN_FILE).write_text("toml")
    monkeypatch.setattr("shoal.peer.cli.page_copy.load_run_file", lambda path: ("toml", RUN))
    return folder


def data_of(out: Path) -> dict[str, object]:
    text = (out / "data.js").read_text()
    found = json.loads(text.removeprefix("window.shoalCopy = ").removesuffix(";\n"))
    assert isinstance(found, dict)
    return found


def test_a_copy_has_all_files_and_all_rounds(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page"
    assert copy_page(str(folder), f"{out}/") == str(out / "index.html")
    assert all((out / name).is_file() for name in STATIC_FILES)
    page = (out / "index.html").read_text()
    assert page.index("data.js") < page.index('src="page.js"')
    told = data_of(out)
    _, verdicts = hosting.hosted_verdicts(folder, has_stages=False)
    assert verdicts
    assert told["rounds"]["round"] == [one.round for one in verdicts]  # type: ignore[index]
    assert told["status"]["chain"] == verdicts[-1].chain.hex()  # type: ignore[index]
    assert not any(one["alive"] for one in told["status"]["members"])  # type: ignore[index]
    assert told["status"]["waits_for"] == ""  # type: ignore[index]


@pytest.mark.parametrize("by", ["name", "folder"])
def test_the_status_of_a_run_can_be_had_from_its_folder(by: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "SHOAL_HOME", folder.parent.parent)
    shown = CliRunner().invoke(app, ["status", str(folder) if by == "folder" else "test", "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert told["run"] == RUN.run.name
    assert told["costs"]["currency"] == "USD"
    assert "--watch" in str(CliRunner().invoke(app, ["status", str(folder), "--watch"]).exception)


def test_what_is_no_hosts_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="no run that this machine hosts"):
        copy_page(str(tmp_path), str(tmp_path / "page"))
    assert not (tmp_path / "page").exists()


def test_nothing_is_written_over_http(folder: Path) -> None:
    with pytest.raises(UserError, match="over http"):
        copy_page(str(folder), "https://example.org/page")
