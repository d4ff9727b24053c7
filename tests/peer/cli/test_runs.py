"""`shoal runs`, `shoal directory` and `shoal join NAME`: what is shown, and how a name becomes an invite."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.peer.directory.cards import NOW_S, make_card, run_file
from typer.testing import CliRunner

from shoal.peer.cli import main as command
from shoal.peer.cli.main import app
from shoal.peer.cli.runs import named_invite, run_table
from shoal.peer.directory.listing import ListedRun
from shoal.peer.directory.local_fit import Fit
from shoal.swarm.errors import DirectoryError


def put(folder: Path, *, admission: str = "open", **status: object) -> str:
    import time

    path = folder / "reef.json"
    path.write_bytes(make_card(run_file(admission=admission), written_s=time.time(), **status).file_bytes)
    return str(path)


def test_runs_are_listed(tmp_path: Path) -> None:
    card, directory, runner = put(tmp_path), str(tmp_path / "runs.json"), CliRunner()
    added = runner.invoke(app, ["directory", "add", directory, card], catch_exceptions=False)
    assert "is listed" in added.output
    assert "reef.json" in runner.invoke(app, ["directory", "list", directory]).output
    shown = runner.invoke(app, ["runs", directory, "--device", "cpu"], catch_exceptions=False)
    assert "Reefs" in shown.output
    assert "3 rounds of 9" in shown.output
    found = json.loads(
        runner.invoke(app, ["runs", directory, "--json", "--device", "cpu", "--max-memory", "1M"]).output
    )
    (one,) = found["runs"]
    assert one["card"]["run"] == "reef"
    assert one["can_join"] is False
    assert "memory" in one["obstacles"][0]
    assert runner.invoke(app, ["directory", "remove", directory, "reef"]).exit_code == 0
    assert "No runs are listed" in runner.invoke(app, ["runs", directory]).output


def test_nothing_that_a_card_says_moves_the_cursor() -> None:
    nasty = "\x1b[31m\r\x07\u202e"
    card = make_card().model_copy(update=dict.fromkeys(("data", "recipe", "algorithm", "purpose", "title"), nasty))
    console = Console(width=100)
    with console.capture() as capture:
        fit = Fit((nasty,))
        console.print(run_table(ListedRun(f"reef{nasty}", nasty, nasty, card, "stale", nasty), fit, NOW_S))
    text = capture.get()
    assert "reef" in text
    assert all(one.isprintable() or one == "\n" for one in text)


def test_a_name_becomes_the_invite_of_an_open_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = put(tmp_path)
    invite = named_invite("reef", [card])
    assert invite is not None
    assert invite.run_hash == run_file().hash
    assert named_invite(str(invite), [card]) is None, "that is an invite"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reef").write_text(str(invite))
    assert named_invite("reef", [card]) is None, "a file with an invite goes first"


@pytest.mark.parametrize(
    ("made", "words"), [({"admission": "token"}, "ask kim@example.org"), ({"phase": "ended"}, "has ended")]
)
def test_names_that_cannot_be_joined(tmp_path: Path, made: dict[str, str], words: str) -> None:
    with pytest.raises(DirectoryError, match=words):
        named_invite("reef", [put(tmp_path, **made)])


def test_what_a_directory_says_moves_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reasons quote strangers' files; they end the command as its error."""
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"format": 1, "\x1b]0;evil\x07": 1}))
    monkeypatch.setattr("sys.argv", ["shoal", "directory", "list", str(path)])
    with pytest.raises(SystemExit):
        command.main()
    told = capsys.readouterr().err
    assert "evil" in told
    assert "\x1b]" not in told
