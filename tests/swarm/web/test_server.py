"""The page's server on loopback: what it answers, and whom it cuts off."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import logging.handlers
import select
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import pytest
from tests.swarm.web.samples import RUN, member, status, timing, verdict

from shoal.swarm.errors import StorageError, Unreachable, UserError
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.web.files import STATIC_FILES
from shoal.swarm.web.metrics import Reading, Readings
from shoal.swarm.web.server import CONTENT_SECURITY_POLICY, PageServer, connections_beside

pytest.importorskip("uvicorn")


class Source:
    """A run with some rounds. ``asked``: how often it was."""

    own_peer = ""

    def __init__(self, name: str = "reef") -> None:
        self.run = RUN.model_copy(update={"run": RUN.run.model_copy(update={"name": name})})
        self.asked = 0
        self.trouble: Exception | None = None
        self.members = [member(1), member(2)]
        self.rounds = 3
        self.answers_from = 0
        self.is_restless = False

    def run_file(self) -> RunFile:
        return self.run

    async def status(self) -> CoordinatorToPeerStatus:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble
        if self.is_restless:
            wall = "xy"[self.asked % 2] * 1_000
            self.members = [one.model_copy(update={"wall": wall}) for one in self.members]
        return status(self.members, run=self.run.run.name, round=self.rounds)

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        numbers = range(max(0, first - self.answers_from), self.rounds)[:limit]
        return [verdict(number, number + 1) for number in numbers]

    async def readings(self) -> Sequence[Reading]:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble
        readings = Readings(self.run.run.name)
        readings.put("shoal_round", self.rounds)
        return readings

    async def timings(self, first: int) -> Sequence[RoundTiming]:
        return [timing(number) for number in range(first, self.rounds)]


@pytest.fixture
def network() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of the run's network, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server(source: Source, network: asyncio.AbstractEventLoop) -> Iterator[PageServer]:
    made = PageServer(("127.0.0.1", 0), most_connections=64)
    with made.showing(source, network):
        yield made
    made.close()


def port(server: PageServer) -> int:
    return urlsplit(server.url).port or 0


def get(server: PageServer, path: str, method: str = "GET") -> tuple[int, http.client.HTTPMessage, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port(server), timeout=20)
    with contextlib.closing(line):
        line.request(method, path)
        answer = line.getresponse()
        return answer.status, answer.headers, answer.read()


def test_all_files_and_documents_are_served_with_a_strict_policy(server: PageServer) -> None:
    for path in (
        "/",
        *(f"/{name}" for name in STATIC_FILES),
        "/runs.json",
        "/run.json",
        "/status.json",
        "/rounds.json",
    ):
        code, headers, data = get(server, path)
        assert (path, code) == (path, 200)
        assert data
        assert headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_the_page_names_no_other_server_and_has_no_inline_code(server: PageServer) -> None:
    page = get(server, "/")[2].decode()
    assert "//" not in page.replace("<!doctype html>", "")
    assert "style=" not in page
    assert page.count("<script") == page.count("<script src=")


@pytest.mark.parametrize("path", ["/", "/status.json", "/events", "/page.js"])
def test_nothing_can_be_changed(server: PageServer, path: str) -> None:
    assert get(server, path, "POST")[0] == 405
    assert get(server, path, "DELETE")[0] == 405


def test_documents_tell_the_run(server: PageServer) -> None:
    assert json.loads(get(server, "/status.json")[2])["round"] == 3
    assert json.loads(get(server, "/rounds.json?from=1")[2])["round"] == [1, 2]
    assert json.loads(get(server, "/round.json?round=1")[2])["members"][0]["weight"] == 100
    assert json.loads(get(server, "/runs.json")[2])[0]["name"] == "reef"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/status.json?run=other", 404),
        ("/round.json?round=99", 404),
        ("/round.json?round=-1", 404),
        ("/round.json?round=x", 400),
        ("/rounds.json?from=" + "9" * 30, 200),
        ("/rounds.json?from=-5", 200),
        ("/../swarm/errors.py", 404),
        ("/static/page.js", 404),
        ("/" + "a" * 5_000, 404),
    ],
)
def test_strange_requests_get_an_answer(server: PageServer, path: str, code: int) -> None:
    assert get(server, path)[0] == code


def test_a_run_that_does_not_answer_is_said_to(server: PageServer, source: Source) -> None:
    source.trouble = StorageError("the disk is full")
    code, headers, data = get(server, "/status.json")
    assert code == 503
    assert headers["Retry-After"]
    assert b"disk" not in data


def test_the_run_is_asked_once_for_many_browsers(server: PageServer, source: Source) -> None:
    for _ in range(20):
        get(server, "/status.json")
    assert source.asked <= 3


def test_of_several_runs_one_has_to_be_named(
    server: PageServer, source: Source, network: asyncio.AbstractEventLoop
) -> None:
    with server.showing(Source("atoll"), network):
        assert [one["name"] for one in json.loads(get(server, "/runs.json")[2])] == ["reef", "atoll"]
        assert get(server, "/status.json")[0] == 404
        assert json.loads(get(server, "/status.json?run=atoll")[2])["run"] == "atoll"
    assert json.loads(get(server, "/status.json")[2])["run"] == "reef"


def test_events_tell_the_status_and_then_its_changes(server: PageServer, source: Source) -> None:
    with socket.create_connection(("127.0.0.1", port(server)), timeout=20) as line:
        line.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        read = b""
        while b"event: status" not in read or not read.endswith(b"\n\n\r\n"):
            read += line.recv(65_536)
        source.members = [member(1, loss=1.0), member(2)]
        while b"event: delta" not in read:
            read += line.recv(65_536)
        assert b"text/event-stream" in read


def test_connections_are_bounded(server: PageServer) -> None:
    lines = [socket.create_connection(("127.0.0.1", port(server)), timeout=20) for _ in range(80)]
    try:
        lines[-1].settimeout(20)
        with contextlib.suppress(ConnectionError):
            assert lines[-1].recv(1) == b""  # it was closed at once
        lines[0].sendall(b"GET /runs.json HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lines[0].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for line in lines:
            line.close()
    code = 0
    while code != 200:  # as soon as the others are gone
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            code = get(server, "/runs.json")[0]


def test_too_many_streams_are_refused_and_pages_are_served_still(server: PageServer) -> None:
    lines = []
    try:
        for _ in range(48):
            line = socket.create_connection(("127.0.0.1", port(server)), timeout=20)
            lines.append(line)
            line.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
            assert line.recv(20).startswith(b"HTTP/1.1 200")
        assert get(server, "/events")[0] == 503
        assert get(server, "/status.json")[0] == 200
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("again", [False, True])
def test_who_follows_a_run_that_is_not_shown_any_more_is_told(
    server: PageServer, source: Source, network: asyncio.AbstractEventLoop, again: bool
) -> None:
    with socket.create_connection(("127.0.0.1", port(server)), timeout=20) as line:
        with server.showing(Source("atoll"), network):
            line.sendall(b"GET /events?run=atoll HTTP/1.1\r\nHost: x\r\n\r\n")
            read = b""
            while b"event: status" not in read:
                read += line.recv(65_536)
            if again:
                with server.showing(Source("atoll"), network):
                    while not read.endswith(b"0\r\n\r\n"):
                        read += line.recv(65_536)
        while not read.endswith(b"0\r\n\r\n"):
            read += line.recv(65_536)


def test_a_long_history_does_not_hold_up_the_status(server: PageServer, source: Source) -> None:
    source.rounds = 3_000
    assert json.loads(get(server, "/status.json")[2])["round"] == 3_000
    assert len(json.loads(get(server, "/rounds.json?from=1500")[2])["round"]) == 548


def test_a_run_that_tells_the_same_rounds_again_and_again_is_asked_once(server: PageServer, source: Source) -> None:
    source.answers_from, source.rounds = 10**6, 200
    assert get(server, "/status.json")[0] == 200
    assert json.loads(get(server, "/rounds.json")[2])["round"] == list(range(64))


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /",
        b"GET /page.css HTTP/1.1\r\nHost: x\r\n\r\nGET /",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
    ],
)
def test_who_does_not_finish_a_request_is_cut_off(
    server: PageServer, request_line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.swarm.web.server._IDLE_S", 0.2)
    with socket.create_connection(("127.0.0.1", port(server)), timeout=10) as line:
        line.sendall(request_line)
        with contextlib.suppress(ConnectionError):
            while line.recv(65_536):
                pass


def test_who_follows_and_does_not_read_is_cut_off(
    server: PageServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the page what lies in the buffers until then, and nobody else's events."""
    monkeypatch.setattr("shoal.swarm.web.event_stream._SEND_S", 2.0)
    monkeypatch.setattr("shoal.swarm.web.server._IDLE_S", 1.0)
    monkeypatch.setattr("shoal.swarm.web.run_page._TICK_S", 0.02)
    monkeypatch.setattr("shoal.swarm.web.run_page._MEMBERS_A_TICK", 10**6)
    source.members = [member(number) for number in range(500)]
    source.is_restless = True
    with socket.socket() as slow, socket.create_connection(("127.0.0.1", port(server)), timeout=20) as fast:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port(server)))
        for line in (slow, fast):
            line.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        read, closed = b"", select.poll()
        closed.register(slow, select.POLLHUP | select.POLLERR)
        while not closed.poll(0):  # it is reset, and does not wait for what lies in the buffers
            assert fast.recv(1 << 20)
        source.rounds = 4
        while b'"round":4,' not in read:
            read = read[-100:] + (more := fast.recv(1 << 20))
            assert more


def test_an_unexpected_error_of_one_run_ends_its_page_only(
    server: PageServer, source: Source, network: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Source("atoll")
    broken.trouble = ZeroDivisionError("nobody expected that")
    with server.showing(broken, network), socket.create_connection(("127.0.0.1", port(server)), timeout=20) as line:
        assert get(server, "/status.json?run=atoll")[0] == 500
        line.sendall(b"GET /events?run=atoll HTTP/1.1\r\nHost: x\r\n\r\n")
        read = b""
        while not read.endswith(b"0\r\n\r\n"):  # who follows it is told
            read += line.recv(65_536)
        assert [one["name"] for one in json.loads(get(server, "/runs.json")[2])] == ["reef"]
    assert json.loads(get(server, "/status.json")[2])["run"] == "reef"
    assert "the page of the run atoll has failed" in caplog.text


def test_facts_follow_amendments(server: PageServer, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.swarm.web.run_page._TICK_S", 0.1)
    before = json.loads(get(server, "/status.json")[2])["facts"]
    source.run = source.run.model_copy(update={"run": source.run.run.model_copy(update={"rounds": 99})})
    while json.loads(get(server, "/status.json")[2])["facts"] == before:
        pass
    assert json.loads(get(server, "/run.json")[2])["goals"] == {"rounds": 99}


def test_requests_that_are_none_are_not_told_the_hosts_terminal(
    server: PageServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "shoal.swarm.web.server")  # whatever commands have set before
    terminal = logging.handlers.BufferingHandler(100)
    logging.getLogger().addHandler(terminal)
    try:
        with socket.create_connection(("127.0.0.1", port(server)), timeout=20) as line:
            line.sendall(b"no request\r\n\r\n")
            assert line.recv(100).startswith(b"HTTP/1.1 400")
    finally:
        logging.getLogger().removeHandler(terminal)
    told = [(one.levelno, one.name) for one in terminal.buffer if "Invalid HTTP request" in one.getMessage()]
    assert told == [(logging.DEBUG, "shoal.swarm.web.server")]


def test_a_process_that_may_open_few_files_has_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.swarm.web.server.allow_files", lambda wanted: min(wanted, 1_000))
    assert connections_beside(900) == 100
    assert connections_beside(0) == 1_000


def test_a_port_in_use_is_said(server: PageServer) -> None:
    with pytest.raises(Unreachable, match=r"--web 127\.0\.0\.1:.*give another address"):
        PageServer(("127.0.0.1", port(server)), 64)


def test_closing_ends_streams_at_once(source: Source, network: asyncio.AbstractEventLoop) -> None:
    made = PageServer(("127.0.0.1", 0), 64)
    with made.showing(source, network), socket.create_connection(("127.0.0.1", port(made)), timeout=20) as line:
        line.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(20)
        made.close()
        with contextlib.suppress(ConnectionError):
            while line.recv(65_536):
                pass


# Metrics --------------------------------------------------------------------------------------------------


def test_the_page_serves_metrics_too(server: PageServer) -> None:
    pytest.importorskip("prometheus_client")
    code, headers, data = get(server, "/metrics")
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert b'shoal_round{run="reef"} 3.0\n' in data
    assert b'shoal_up{run="reef"} 1.0\n' in data
    assert b"process_resident_memory_bytes " in data
    assert get(server, "/metrics", "POST")[0] == 405


def test_all_runs_are_scraped_and_one_that_does_not_answer_holds_up_no_other(
    server: PageServer, source: Source, network: asyncio.AbstractEventLoop
) -> None:
    pytest.importorskip("prometheus_client")
    source.trouble = StorageError("the disk is full")
    with server.showing(Source("atoll"), network):
        code, _, data = get(server, "/metrics")
        assert code == 200
        assert b'shoal_up{run="reef"} 0.0\n' in data
        assert b'shoal_up{run="atoll"} 1.0\n' in data
        assert b'shoal_round{run="reef"}' not in data
        assert data.count(b"# TYPE shoal_up gauge") == 1


def test_scrapes_in_a_row_ask_the_run_once(server: PageServer, source: Source) -> None:
    pytest.importorskip("prometheus_client")
    for _ in range(20):
        get(server, "/metrics")
    assert source.asked <= 3


def test_metrics_can_be_had_without_a_page(source: Source, network: asyncio.AbstractEventLoop) -> None:
    pytest.importorskip("prometheus_client")
    made = PageServer(("127.0.0.1", 0), 16, only_metrics=True)
    try:
        with made.showing(source, network):
            assert made.url.endswith("/metrics")
            assert get(made, "/metrics")[0] == 200
            for path in ("/", "/status.json", "/events", "/runs.json", "/page.js"):
                assert get(made, path)[0] == 404
            lines = [socket.create_connection(("127.0.0.1", port(made)), timeout=20) for _ in range(20)]
            lines[-1].settimeout(20)
            with contextlib.suppress(ConnectionError):
                assert lines[-1].recv(1) == b""  # it was closed at once
            for line in lines:
                line.close()
        with pytest.raises(Unreachable, match=r"--metrics 127\.0\.0\.1"):
            PageServer(("127.0.0.1", port(made)), 16, only_metrics=True)
    finally:
        made.close()


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, server: PageServer) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert get(server, "/metrics")[0] == 501
    with pytest.raises(UserError, match=r"shoal\[metrics\]"):
        PageServer(("127.0.0.1", 0), 16, only_metrics=True)
