"""Spot notices of the three providers, from a local stand-in of their metadata services that checks how it is asked."""

import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal.peer.guest.spot import MetadataService, SpotNotices, SpotProvider, SpotThread

Answer = tuple[int, bytes]
ACTION = b'{"action": "terminate", "time": "2026-11-27T03:00:00Z"}'
PREEMPT = b'{"DocumentIncarnation": 2, "Events": [%s]}'


def event(kind: str, machine: str) -> bytes:
    return b'{"EventType": "%s", "Resources": ["%s"], "NotBefore": "Fri, 27 Nov 2026 03:00:00 GMT"}' % (
        kind.encode(),
        machine.encode(),
    )


class Stand:
    """A metadata service: ``answers`` by path, after ``allows`` has seen the headers; ``asked``: what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.allows: Callable[[str, dict[str, str]], bool] = lambda path, headers: True
        self.asked: list[str] = []
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                stand.asked.append(f"{self.command} {path}")
                allowed = stand.allows(path, {name.lower(): value for name, value in self.headers.items()})
                status, body = stand.answers.get(path, (404, b"")) if allowed else (401, b"no")
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.service = MetadataService(("127.0.0.1", self._server.server_port))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.close()


def test_amazon_is_asked_with_a_token_and_says_when(stand: Stand) -> None:
    tokens = [b"first"]

    def allows(path: str, headers: dict[str, str]) -> bool:
        if path == "/latest/api/token":
            return int(headers["x-aws-ec2-metadata-token-ttl-seconds"]) > 0
        return headers["x-aws-ec2-metadata-token"].encode() == tokens[-1]

    stand.allows = allows
    stand.answers["/latest/api/token"] = (200, tokens[-1])
    notices = SpotNotices(SpotProvider.aws, stand.service)
    assert notices.look() == ""
    assert stand.asked == ["PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"]
    assert notices.look() == ""
    assert stand.asked[2:] == ["GET /latest/meta-data/spot/instance-action"], "the token is kept"
    tokens.append(b"second")
    stand.answers["/latest/api/token"] = (200, tokens[-1])
    stand.answers["/latest/meta-data/spot/instance-action"] = (200, ACTION)
    assert notices.look() == "", "the token is too old"
    assert notices.look() == "terminate at 2026-11-27T03:00:00Z"


def test_google_says_true_or_false(stand: Stand) -> None:
    path = "/computeMetadata/v1/instance/preempted"
    stand.allows = lambda _, headers: headers.get("metadata-flavor") == "Google"
    stand.answers[path] = (200, b"FALSE")
    notices = SpotNotices(SpotProvider.gcp, stand.service)
    assert notices.look() == ""
    stand.answers[path] = (200, b"TRUE\n")
    assert notices.look() == "preempted"


@pytest.mark.parametrize(
    ("kind", "machine", "says"),
    [
        ("Preempt", "Reef_3", "Preempt, not before Fri, 27 Nov 2026 03:00:00 GMT"),
        ("Terminate", "reef_3", "Terminate, not before Fri, 27 Nov 2026 03:00:00 GMT"),
        ("Preempt", "reef_4", ""),
        ("Freeze", "reef_3", ""),
    ],
)
def test_azure_tells_of_other_machines_too(stand: Stand, kind: str, machine: str, says: str) -> None:
    stand.allows = lambda _, headers: headers.get("metadata") == "true"
    stand.answers["/metadata/instance/compute/name"] = (200, b"reef_3")
    stand.answers["/metadata/scheduledevents"] = (200, PREEMPT % b"")
    notices = SpotNotices(SpotProvider.azure, stand.service)
    assert notices.look() == ""
    stand.answers["/metadata/scheduledevents"] = (200, PREEMPT % event(kind, machine))
    assert notices.look() == says


BAD: dict[str, tuple[SpotProvider, dict[str, Answer], str]] = {
    "too long": (SpotProvider.gcp, {"/computeMetadata/v1/instance/preempted": (200, b"T" * 70_000)}, "65,536"),
    "another word": (SpotProvider.gcp, {"/computeMetadata/v1/instance/preempted": (200, b"YES")}, "neither"),
    "not there": (SpotProvider.gcp, {}, "404"),
    "a redirect": (SpotProvider.gcp, {"/computeMetadata/v1/instance/preempted": (302, b"")}, "302"),
    "no JSON": (
        SpotProvider.aws,
        {"/latest/api/token": (200, b"t"), "/latest/meta-data/spot/instance-action": (200, b"<html>")},
        "Expecting value",
    ),
    "no action": (
        SpotProvider.aws,
        {"/latest/api/token": (200, b"t"), "/latest/meta-data/spot/instance-action": (200, b"[]")},
        "without an action",
    ),
    "a token with a header in it": (SpotProvider.aws, {"/latest/api/token": (200, b"t\r\nHost: x")}, "header value"),
    "events that are none": (
        SpotProvider.azure,
        {"/metadata/instance/compute/name": (200, b"reef"), "/metadata/scheduledevents": (200, b'{"Events": 3}')},
        "without events",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_answers_that_cannot_be_are_told_once_and_are_no_notice(
    stand: Stand, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider, stand.answers, words = BAD[name]
    notices = SpotNotices(provider, stand.service)
    with caplog.at_level(logging.WARNING):
        assert [notices.look() for _ in range(3)] == ["", "", ""]
    (said,) = [record.getMessage() for record in caplog.records]
    assert words in said
    assert f"--spot {provider}" in said


def test_where_nothing_answers_there_is_no_notice(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    stand.close()
    assert SpotNotices(SpotProvider.aws, stand.service).look() == ""
    assert "Connection refused" in caplog.text


def test_proxies_of_the_environment_are_not_used(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    stand.answers["/computeMetadata/v1/instance/preempted"] = (200, b"TRUE")
    assert SpotNotices(SpotProvider.gcp, stand.service).look() == "preempted"


def test_a_notice_beside_the_training_is_told_once(stand: Stand) -> None:
    path, told, heard = "/computeMetadata/v1/instance/preempted", [], threading.Event()
    stand.answers[path] = (200, b"FALSE")

    def on_notice(words: str) -> None:
        told.append(words)
        heard.set()

    with SpotThread(SpotNotices(SpotProvider.gcp, stand.service), on_notice, every_s=0.001) as watch:
        while len(stand.asked) < 3:
            assert not heard.wait(0.001)
        stand.answers[path] = (200, b"TRUE")
        assert heard.wait(20.0)
    assert told == ["preempted"]
    assert watch.notice == "preempted"


def test_a_training_that_ends_first_hears_nothing(stand: Stand) -> None:
    stand.answers["/computeMetadata/v1/instance/preempted"] = (200, b"FALSE")
    with SpotThread(SpotNotices(SpotProvider.gcp, stand.service), lambda _: pytest.fail("no notice")) as watch:
        pass
    assert watch.notice == ""
