"""Servers that cannot be talked to, told apart: real sockets on this machine."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from shoal.swarm.transport.tcp import diagnosis
from shoal.swarm.transport.tcp.diagnosis import unknown_name, why_silent

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def speaking(first: bytes = b"", answer: bytes = b"") -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        if answer and await reader.read(64):
            writer.write(answer)
        await reader.read(64)
        writer.close()

    return serve


@pytest.mark.parametrize(
    ("serve", "words", "is_certain"),
    [
        (speaking(b"SSH-2.0-OpenSSH_9\r\n"), "an SSH server answers", True),
        (speaking(answer=b"HTTP/1.1 400 Bad Request\r\n"), "a web server answers", True),
        (speaking(answer=b"\x15\x03\x01\x00"), "a server for TLS", True),
        (speaking(b"220 mail\r\n"), "another kind of server", True),
        (speaking(b"\xff" + bytes(8) + b"\x7f"), "does not finish its greeting", False),
        (speaking(), "says nothing", False),
    ],
    ids=["ssh", "http", "tls", "smtp", "zmq", "silent"],
)
def test_what_answers_is_named(monkeypatch: pytest.MonkeyPatch, serve: Serve, words: str, is_certain: bool) -> None:
    monkeypatch.setattr(diagnosis, "_SPEAKS_FIRST_S", 0.2)
    monkeypatch.setattr(diagnosis, "_ANSWER_S", 0.2)

    async def look() -> tuple[str, bool]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await why_silent("127.0.0.1", server.sockets[0].getsockname()[1], 5.0)

    told, certain = asyncio.run(look())
    assert words in told
    assert certain == is_certain


def test_refused_is_no_silence() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, and not listening
        told = asyncio.run(why_silent("127.0.0.1", listener.getsockname()[1], 5.0))
    assert told == (
        f"127.0.0.1:{listener_port(told[0])} refuses the connection: nothing listens on that port at the moment",
        False,
    )


def listener_port(words: str) -> int:
    return int(words.split(":")[1].split()[0])


def test_packets_that_are_dropped_are_silence() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        callers = []
        try:
            for _ in range(8):  # a full backlog drops the packets of further callers
                callers.append(socket.socket())
                callers[-1].setblocking(False)
                callers[-1].connect_ex(listener.getsockname())
            told, certain = asyncio.run(why_silent("127.0.0.1", listener.getsockname()[1], 0.3))
        finally:
            for one in callers:
                one.close()
    assert "does not answer at all" in told
    assert not certain


def test_a_name_that_nobody_has_is_known_at_once() -> None:
    assert "no machine is known by the name 'nobody.invalid'" in asyncio.run(unknown_name("nobody.invalid", 5.0))
    assert asyncio.run(unknown_name("127.0.0.1", 5.0)) == asyncio.run(unknown_name("localhost", 5.0)) == ""
