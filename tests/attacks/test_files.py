"""A host that wants a volunteer's files, or another run than the invite's, gets neither; the honest way works."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from tests.integration.harness import (
    CALM,
    FRESH,
    LOOPBACK,
    ROUNDS_S,
    SHOAL,
    START_S,
    Member,
    Process,
    Swarm,
    end_with_parent,
    finish,
    run_toml,
)

from shoal.swarm.errors import CorpusError, NotAccepted, RunChanged, RunFileError, ShoalError
from shoal.swarm.protocol.invite import Invite

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
WORDS = "a secret of the sea "


def refused(process: Process, error: type[ShoalError], *words: str) -> None:
    """Check that the process ends with this error's exit code and a sentence with these words."""
    assert process.exit_code(START_S) == error.exit_code, process.tail()
    for word in (f"{error.__name__}: ", *words):
        assert word in process.text(), process.tail()
    assert "Traceback" not in process.text()


def lying_host(swarm: Swarm, runs: Sequence[dict[str, Any]]) -> tuple[dict[str, str], Path]:
    """Start the lying host; return its invites by name, and the file with all that it hears."""
    folder = swarm.folder / "liar"
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps(runs))
    host = swarm.command("liar", sys.executable, str(HERE / "lying_host.py"), str(folder))
    host.says("listening", START_S)
    return json.loads((folder / "invites.json").read_text()), folder / "heard.jsonl"


def kinds(heard: Path) -> set[str]:
    return {json.loads(line)["kind"] for line in heard.read_text().splitlines()}


def home_with_secrets(swarm: Swarm) -> tuple[Path, Path]:
    """Make a volunteer's home; return it, and the folder in it that it gives to runs."""
    home = swarm.folder / "home"
    data = home / "data"
    (data / "books").mkdir(parents=True)
    (data / "books" / "a.txt").write_text("public words " * 3000)
    for folder in (".secrets", "diary"):
        (home / folder).mkdir()
        (home / folder / "key.txt").write_text(WORDS * 2000)
    (data / "leak.txt").symlink_to(home / "diary" / "key.txt")
    (data / "leaks").symlink_to(home / "diary")
    (data / "books" / "deep").symlink_to("../../.secrets")
    os.mkfifo(data / "pipe.txt")
    return home, data


def test_a_run_file_reaches_for_files(swarm: Swarm) -> None:
    home, data = home_with_secrets(swarm)
    named = ("--data", str(data))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/data.u16"
        tries: list[tuple[str, tuple[str, ...], type[ShoalError], str]] = [
            ("text:~/.secrets/*", (), RunFileError, "must be relative"),
            ("text:~/.secrets/*", ("--data", str(home)), RunFileError, "must be relative"),
            (f"text:{home}/diary/*", named, RunFileError, "must be relative"),
            ("text:../diary/*", named, RunFileError, "must be relative"),
            ("text:books/../../diary/*", named, RunFileError, "must be relative"),
            ("text:.secrets/*", ("--data", str(home)), RunFileError, "hidden files"),
            (f"tokens:{home}/diary/key.u16", named, RunFileError, "must be relative"),
            (f"file://{home}/diary/key.txt", named, RunFileError, "not file:"),
            (url, named, RunFileError, "not a public host name or IP address"),
            (f"simplecache::{url}", named, RunFileError, "not simplecache:"),
            (f"zip://key.txt::file://{home}/diary.zip", named, RunFileError, "not zip:"),
            ("https://example.org/a::file:///etc/passwd", named, RunFileError, "chained"),
            ("text:leak.txt", named, CorpusError, "leads out of"),
            ("text:leaks/*.txt", named, CorpusError, "leads out of"),
            ("text:*/key.txt", named, CorpusError, "leads out of"),
            ("text:books/deep/*", named, CorpusError, "leads out of"),
            ("text:pipe.txt", named, CorpusError, "is no regular file"),
            ("text:[.]secrets/*", ("--data", str(home)), CorpusError, "no file matches"),
            ("text:books/*.txt", (), CorpusError, "--data FOLDER"),
            ("text:books/*.txt", named, NotAccepted, "--accept"),
            ("text:books/*.txt", (*named, "--accept", "0" * 16), NotAccepted, "is of another run"),
        ]
        tomls = [run_toml(name=f"run-{number}", source=one[0]) for number, one in enumerate(tries)]
        runs = [{"name": f"run-{number}", "invited": toml, "served": [toml]} for number, toml in enumerate(tomls)]
        invites, heard = lying_host(swarm, runs)
        launcher = ("env", f"HOME={home}", *SHOAL)  # for the first one, as what is forked has pytest's environment
        for number, (source, extra, error, words) in enumerate(tries):
            label = f"run-{number}"
            victim = swarm.member(invites[label], label, SHOAL if number else launcher, extra=extra)
            refused(victim, error, words)
            assert victim.events("joined") == [], source
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    # All that the host has heard of these machines is that somebody wants to see its run files.
    assert kinds(heard) == {"PeerToCoordinatorGetRun"}
    assert "key.txt" not in heard.read_text()


def test_another_run_than_the_invites(swarm: Swarm) -> None:
    _, data = home_with_secrets(swarm)
    mild = run_toml(source="stdlib")
    greedy = run_toml(source="text:**/*.txt")
    runs: list[dict[str, Any]] = [
        {"name": "open", "served": [greedy], "owns_up": True},
        {"name": "lie", "served": [greedy]},
        {"name": "late", "served": [mild, greedy]},
        {"name": "later", "served": [mild, greedy], "owns_up": True},
    ]
    for one in runs:
        own = {"invited": mild, "served": one["served"]}
        one |= {key: json.loads(json.dumps(value).replace("reef", one["name"])) for key, value in own.items()}
    invites, heard = lying_host(swarm, runs)
    words = {
        "open": "since this invite",
        "lie": "does not have the hash",
        "late": "does not have the hash",
        "later": "since this invite",
    }
    for name, invite in invites.items():
        victim = swarm.member(invite, name, SHOAL, extra=("--data", str(data)))
        refused(victim, RunChanged, words[name])
        assert "key.txt" not in victim.text()
    refused(swarm.command("status", *SHOAL, "status", invites["lie"]), RunChanged, words["lie"])
    assert kinds(heard) == {"PeerToCoordinatorGetRun"}


# The honest way ---------------------------------------------------------------------------------------------


class Seated:
    """A ``shoal join`` at a terminal 80 columns wide; a context manager that ends its process."""

    def __init__(self, member: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = pty.openpty()
        self._screen, self._text = ours, b""
        self._popen = subprocess.Popen(
            member,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            process_group=0,
            preexec_fn=end_with_parent,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"},
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        os.close(self._screen)

    def reads(self, words: str, within_s: float = START_S) -> str:
        """Wait until the words are on the screen; return all of it."""
        until_s = time.monotonic() + within_s
        while words not in self.screen:
            assert time.monotonic() < until_s, f"not within {within_s} s: {words}\n{self.screen}"
            if not self._read() and self._popen.poll() is not None:
                raise AssertionError(f"ended without {words!r}\n{self.screen}")
        return self.screen

    @property
    def screen(self) -> str:
        """The screen's text without colours."""
        return re.sub(r"\x1b\[\d*m", "", self._text.decode(errors="replace"))

    def _read(self) -> bool:
        if not select.select([self._screen], [], [], 0.1)[0]:
            return False
        with suppress(OSError):  # Linux says so when the other side is closed
            self._text += (got := os.read(self._screen, 65536))
            return bool(got)
        return False

    def types(self, line: str) -> None:
        os.write(self._screen, f"{line}\n".encode())

    def interrupt(self) -> None:
        self._popen.send_signal(signal.SIGINT)

    def exit_code(self, within_s: float = START_S) -> int:
        until_s = time.monotonic() + within_s
        while self._popen.poll() is None:
            self._read()
            assert time.monotonic() < until_s, f"not ended within {within_s} s\n{self.screen}"
        while self._read():
            pass
        return int(self._popen.returncode)


def mentions(folder: Path, *words: str) -> list[str]:
    """Return the files below the folder that contain one of the words."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in found if any(word.encode() in path.read_bytes() for word in words)]


def test_who_agrees_trains_and_the_host_learns_no_names(swarm: Swarm) -> None:
    home, _ = home_with_secrets(swarm)
    data = home / "my-private-folder"
    for number in range(2):
        (data / "books").mkdir(parents=True, exist_ok=True)
        (data / "books" / f"holiday-{number}.txt").write_text(WORDS * 2000)
    host = swarm.host(run_toml(source="text:books/*.txt"))
    run_hash = Invite.parse(host.invite).run_hash.hex()
    named = ("--data", str(data))

    alone = swarm.member(host.invite, "alone", SHOAL, extra=named)
    refused(alone, NotAccepted, f"--accept {run_hash[:16]}", "holiday-0.txt")
    assert alone.events("joined") == []
    agreed = swarm.member(host.invite, "agreed", CALM, extra=(*named, "--accept", run_hash[:16]))
    agreed.committed(within_s=START_S + ROUNDS_S)

    # Somebody with other data is told so on the own terminal, and nowhere else.
    other = swarm.folder / "elsewhere" / "books"
    other.mkdir(parents=True)
    (other / "holiday-0.txt").write_text("other words " * 2000)
    stranger = swarm.member(host.invite, "stranger", SHOAL, data=other.parent)
    refused(stranger, CorpusError, "data differs from the run's", "here: ", "holiday-0.txt")

    # The same command goes on without being asked again, at no terminal either.
    agreed.kill()
    agreed.command = [*CALM, *agreed.command[agreed.command.index("join") : agreed.command.index("--accept")]]
    agreed.start()
    agreed.committed(within_s=START_S + ROUNDS_S)
    status = swarm.command("status", *SHOAL, "status", host.invite, "--json")
    assert status.exit_code(START_S) == 0, status.tail()
    finish(host, [agreed])
    for folder in (host.state, host.log.parent):
        assert mentions(folder, "holiday", "my-private-folder", "elsewhere", str(home)) == []
    assert "holiday" not in status.text()


def test_at_a_terminal(swarm: Swarm) -> None:
    _, data = home_with_secrets(swarm)
    host = swarm.host(run_toml(source="text:books/*.txt"))

    def join(label: str) -> Seated:
        folder = swarm.folder / label
        places = ("--identity", str(folder / "identity"), "--state", str(folder / "state"), "--bind", LOOPBACK)
        return Seated((*FRESH, "join", host.invite, *places, "--device", "cpu", "--data", str(data)), folder)

    with join("unwilling") as unwilling:
        shown = unwilling.reads("Join? [y/N]")
        for words in ("reef, hash ", "recipe gpt, 21.6k parameters", "1 file of this machine, 39.0 kB", "books/a.txt"):
            assert words.replace(" ", "") in "".join(shown.split())
        assert max(len(line) for line in shown.splitlines()) <= 80
        assert "joined" not in shown
        unwilling.types("n")
        assert unwilling.exit_code() == NotAccepted.exit_code, unwilling.screen
        assert "not joined" in unwilling.screen
    assert host.events("member_joined") == []
    with join("willing") as willing:
        willing.reads("Join? [y/N]")
        willing.types("y")
        willing.reads("holds version")
        willing.interrupt()
        assert willing.exit_code() == 0, willing.screen
    assert len(host.events("member_joined")) == 1
    with join("willing") as again:
        again.reads("holds version")
        assert "Join?" not in again.screen
        again.interrupt()
        assert again.exit_code() == 0, again.screen


def test_a_run_without_files_needs_the_invite_alone(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    member: Member = swarm.member(host.invite, "member", SHOAL)
    member.event("synced", START_S)
    assert Invite.parse(host.invite).run_hash.hex()[:16] in member.text()
    wrong = swarm.member(host.invite, "wrong", SHOAL, extra=("--accept", "f" * 16))
    refused(wrong, NotAccepted, "is of another run")
    finish(host, [member])
