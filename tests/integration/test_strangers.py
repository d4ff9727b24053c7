"""Processes with a wrong invite, key, version, corpus or model are refused clearly and soon; the run goes on."""

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.harness import (
    HERE,
    ROUNDS_S,
    SHOAL,
    START_S,
    Member,
    Swarm,
    finish,
    invite_with,
    run_toml,
)

from shoal.swarm.errors import (
    CorpusError,
    InviteError,
    ModelMismatch,
    NotAdmitted,
    ProtocolMismatch,
    ShoalError,
    UnknownRun,
    Unreachable,
    WrongKey,
)
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite

pytestmark = pytest.mark.integration

SOON_S = 12.0
"""Until somebody who cannot join knows that and why."""


def refused(member: Member, error: type[ShoalError], *words: str) -> None:
    """Check that the member ends with this error's name, exit code and words."""
    assert member.exit_code(START_S) == error.exit_code, member.tail()
    assert f"{error.__name__}: " in member.text()
    for word in words:
        assert word in member.text(), member.tail()
    assert "Traceback" not in member.text()


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Port of some other program, which calls ``answer`` with every connection."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with connection:
            try:
                answer(connection)
            except OSError:
                return  # hung up on

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield int(listening.getsockname()[1])


def http(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def silence(connection: socket.socket) -> None:
    while connection.recv(1000):
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_strangers(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    member = swarm.member(host.invite, "member")
    member.committed(within_s=START_S + ROUNDS_S)
    other_key = Identity.generate().coordinator_keys().public
    wrong_key = invite_with(host.invite, key=other_key)
    with server(http) as http_port, server(silence) as silent_port:
        tries: list[tuple[str, type[ShoalError], str]] = [
            (wrong_key, WrongKey, "does not hold the key"),
            (invite_with(host.invite, run="lagoon"), UnknownRun, "hosts the run 'reef', not 'lagoon'"),
            (invite_with(host.invite, port=free_port()), Unreachable, "refuses the connection"),
            (host.invite[:-1], InviteError, "t= is cut off"),
            (invite_with(host.invite, token=b""), NotAdmitted, "who has an invite with a token"),
            (host.invite.partition("&")[0], InviteError, "is missing or cut off"),
            (host.invite.partition("?")[0], InviteError, "is missing or cut off"),
            (invite_with(host.invite, port=http_port), Unreachable, "127.0.0.1"),
            (invite_with(host.invite, port=silent_port), Unreachable, "127.0.0.1"),
        ]
        command = (sys.executable, str(HERE / "strangers.py"), str(swarm.folder))
        strangers = swarm.command("strangers", *command, *[invite for invite, _, _ in tries])
        with socket.create_connection(("127.0.0.1", Invite.parse(host.invite).addresses[0].control_port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n" + bytes(10_000))
            assert strangers.exit_code(START_S + SOON_S) == 0, strangers.tail()
    found = [json.loads(line) for line in strangers.text().splitlines() if line.startswith("{")]
    for (invite, error, words), said in zip(tries, found, strict=True):
        assert (said["error"], said["code"]) == (error.__name__, error.exit_code), f"{invite}: {said}"
        assert words in said["text"]
        assert said["seconds"] < SOON_S, said
    # The command line makes exit codes of them.
    refused(swarm.member(wrong_key, "wrong-key", SHOAL), WrongKey, "check the invite")
    launcher = ("env", sys.executable, str(HERE / "other_version.py"))
    refused(swarm.member(host.invite, "version", launcher), ProtocolMismatch, "same release")

    last = member.last_round()
    member.committed(after=last)
    verdicts = finish(host, [member])
    assert all(one.verdict.committed for one in verdicts)
    assert member.events("resync") == []


def test_another_corpus(swarm: Swarm) -> None:
    host = swarm.host(run_toml(source="text:corpus/*.txt"))
    folders = {}
    for label, words in (("reader", "sea "), ("same", "sea "), ("other", "sky ")):
        folders[label] = swarm.folder / label / "data"
        (folders[label] / "corpus").mkdir(parents=True)
        for number in range(2):
            (folders[label] / "corpus" / f"{number}.txt").write_text(words * 5_000)
    with (folders["other"] / "corpus" / "1.txt").open("a") as file:
        file.write("and more")
    reader = swarm.member(host.invite, "reader", data=folders["reader"])
    reader.event("synced", START_S)
    other = swarm.member(host.invite, "other", data=folders["other"])
    same = swarm.member(host.invite, "same", cwd=folders["same"], data=Path())
    refused(other, CorpusError, "data differs from the run's", "here: ", "2 files", "text:GLOB")
    same.committed(within_s=START_S + ROUNDS_S)
    finish(host, [reader, same])


def test_another_model(swarm: Swarm) -> None:
    toml = """
[run]
name = "reef"
[recipe]
name = "own"
[data]
source = "own"
[inner]
batch_samples = 16
[round]
tokens = 1_000_000_000
max_s = 2
patience_s = 4
"""
    host = swarm.host(toml)

    def loop(label: str, width: int) -> tuple[str, ...]:
        folder = swarm.folder / label
        return (sys.executable, str(HERE / "small_loop.py"), str(width), host.invite, str(folder))

    narrow = swarm.command("narrow", *loop("narrow", 16))
    narrow.says("synced", START_S)
    wide = swarm.command("wide", *loop("wide", 32))
    assert wide.exit_code(START_S) == ModelMismatch.exit_code, wide.tail()
    assert "parameter 0 is 0.weight [32, 8] here, 0.weight [16, 8] in the run" in wide.text()
    narrow.says("committed")
    assert narrow.running
