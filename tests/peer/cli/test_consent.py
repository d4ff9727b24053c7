import base64
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.peer.cli.consent import ACCEPTED_FILE, AGREED_ENDS_FILE, Consent, RunTerms, agreed_ends
from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes import load_recipe
from shoal.swarm.errors import CorpusError, NotAccepted, RunAmended, UserError
from shoal.swarm.protocol.run_file import RunFile

SETTINGS = {"layers": 1, "heads": 2, "width": 16, "context": 12}


def run_file(source: str = "text:*.txt", **run: Any) -> RunFile:
    content = {"run": {"name": "reef", **run}, "recipe": {"name": "gpt", "settings": SETTINGS}}
    return RunFile.model_validate(content | {"data": {"source": source}, "round": {"tokens": 1}})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text("sea " * 1000)
    return folder


class Terminal:
    """What is shown and answered. ``stdin``: whether somebody sits there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str, stdin: bool = True) -> None:
        self.shown = io.StringIO()
        self.console = Console(file=self.shown, width=80, force_terminal=True, no_color=True)
        self._answers = list(answers)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{one}\n" for one in answers)))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: stdin)

    def agree(self, run: RunFile, folder: Path, data: Sequence[Path] = (), accept: str = "") -> None:
        places = DataPlaces.of(data)
        Consent(self.console, accept)(RunTerms.of(run, load_recipe(run, places), places), folder)

    @property
    def text(self) -> str:
        return " ".join(re.sub(r"\x1b\[\d*m", "", self.shown.getvalue()).split())


@pytest.mark.parametrize("stdin", [True, False])
def test_a_run_without_files_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: bool) -> None:
    terminal, run = Terminal(monkeypatch, stdin=stdin), run_file("stdlib", rounds=10)
    terminal.agree(run, tmp_path / "peer")
    assert not (tmp_path / "peer").exists()
    assert f"reef, hash {run.hash.hex()[:16]}" in terminal.text
    assert "recipe gpt, 8.2k parameters (layers 1, heads 2, width 16, context 12)" in terminal.text
    assert "diloco, until 10 rounds" in terminal.text
    assert "the standard library of this Python" in terminal.text
    assert "Join?" not in terminal.text


def test_files_are_shown_and_asked_for(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, "y")
    terminal.agree(run_file(), tmp_path / "peer", [data])
    assert "5 files of this machine, 20.0 kB, text:*.txt below" in terminal.text
    assert str(data) in terminal.text.replace(" ", "")
    assert ": 0.txt, 1.txt, 2.txt and 2 more" in terminal.text
    assert "who gets the model may get parts of these files out of it" in terminal.text
    assert "Join? [y/N]" in terminal.text
    # The same command again does not ask; another run, or another folder, does.
    again = Terminal(monkeypatch)
    again.agree(run_file(), tmp_path / "peer", [data])
    assert "Join?" not in again.text
    (tmp_path / "other").mkdir()
    for run, folders in ((run_file(seed=2), [data]), (run_file(), [data, tmp_path / "other"])):
        with pytest.raises(NotAccepted):
            Terminal(monkeypatch).agree(run, tmp_path / "peer", folders)


@pytest.mark.parametrize("answer", ["n", "", "no", "yes please", "j"])
def test_all_but_yes_is_no(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    with pytest.raises(NotAccepted, match="not joined"):
        Terminal(monkeypatch, answer).agree(run_file(), tmp_path / "peer", [data])
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize("answer", ["y", "Y", " yes "])
def test_yes(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    Terminal(monkeypatch, answer).agree(run_file(), tmp_path / "peer", [data])
    assert (tmp_path / "peer" / ACCEPTED_FILE).exists()


def test_without_a_terminal_the_hash_has_to_be_given(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_file()
    with pytest.raises(NotAccepted, match=f"--accept {run.hash.hex()[:16]}"):
        Terminal(monkeypatch, "y", stdin=False).agree(run, tmp_path / "peer", [data])
    as_in_invite = base64.urlsafe_b64encode(run.hash).decode().rstrip("=")
    given = (run.hash.hex(), run.hash.hex()[:16], run.hash.hex()[:20].upper(), as_in_invite, f"run={as_in_invite}")
    for accept in given:
        Terminal(monkeypatch, stdin=False).agree(run, tmp_path / accept, [data], accept)


@pytest.mark.parametrize("source", ["text:*.txt", "stdlib"])
def test_another_hash_is_refused_always(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    run = run_file(source)
    terminal = Terminal(monkeypatch, "y")
    for accept in ("0" * 16, run.hash.hex()[:15], run.hash.hex() + "0", "yes", run.hash.hex()[:16] + "x", "A" * 43):
        with pytest.raises(NotAccepted, match="--accept"):
            terminal.agree(run, tmp_path / "peer", [data], accept)
    assert "Join?" not in terminal.text


@pytest.mark.parametrize("kept", [b"", b"{}", b"[]", b'{"run": 1, "folders": []}', b"\xff"])
def test_a_damaged_answer_is_asked_for_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, kept: bytes
) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / ACCEPTED_FILE).write_bytes(kept)
    terminal = Terminal(monkeypatch, "y")
    terminal.agree(run_file(), tmp_path / "peer", [data])
    assert "Join?" in terminal.text


def test_what_is_not_there_is_said_before_anything_is_asked(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch, "y")
    with pytest.raises(CorpusError, match="--data FOLDER"):
        terminal.agree(run_file(), tmp_path / "peer")
    with pytest.raises(CorpusError, match="no file matches"):
        terminal.agree(run_file("text:nothing/*"), tmp_path / "peer", [data])
    with pytest.raises(UserError, match="no such folder"):
        terminal.agree(run_file("stdlib"), tmp_path / "peer", [tmp_path / "nothing"])
    assert terminal.text == ""


def test_a_run_file_moves_no_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, run = Terminal(monkeypatch), run_file("stdlib")
    recipe = load_recipe(run)
    settings = {"text": "\x1b[2J\x1b]0;x\x07[bold]", "long": "x" * 10_000}
    hostile = run.model_copy(update={"recipe": run.recipe.model_copy(update={"settings": settings})})
    Consent(terminal.console)(RunTerms(hostile, recipe), tmp_path / "peer")
    assert "\x1b[2J" not in terminal.shown.getvalue()
    assert "\x07" not in terminal.shown.getvalue()
    assert "[bold]" in terminal.text
    assert len(terminal.text) < 2000


def test_nothing_is_opened_before_the_answer(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("shoal.peer.training.data_files.DataFile.open", lambda file: opened.append(file.name))
    with pytest.raises(NotAccepted):
        Terminal(monkeypatch, "n").agree(run_file(), tmp_path / "peer", [data])
    assert opened == []


LONGER = RunAmended("the host has made the run longer: run.rounds = 20", (("run.rounds", "20"), ("run.max_s", "null")))


def test_a_longer_run_is_agreed_to_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, folder = Terminal(monkeypatch, "y"), tmp_path / "peer"
    Consent(terminal.console).ask_again(LONGER, b"r" * 32, folder)
    assert "run.rounds = 20" in terminal.text
    assert agreed_ends(folder, b"r" * 32) == LONGER.ends
    assert agreed_ends(folder, b"s" * 32) == ()
    (folder / AGREED_ENDS_FILE).write_text('{"run": "72", "ends": {"run.rounds": "many"}}')
    assert agreed_ends(folder, b"r" * 32) == ()


@pytest.mark.parametrize(("answer", "stdin"), [("n", True), ("", True), ("y", False)])
def test_a_longer_run_without_consent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, stdin: bool
) -> None:
    terminal = Terminal(monkeypatch, answer, stdin=stdin)
    with pytest.raises(RunAmended) as ended:
        Consent(terminal.console).ask_again(LONGER, b"r" * 32, tmp_path / "peer")
    assert ended.value is LONGER
    assert not (tmp_path / "peer").exists()
