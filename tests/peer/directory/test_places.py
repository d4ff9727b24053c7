"""Reading of places: limits on bytes and time, and no directory elsewhere leads into a private network."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.peer.directory.places import Fetched, Place, all_of, read_place
from shoal.swarm.errors import DirectoryError

ELSEWHERE = Fetched(b"", "https://runs.example.org/runs.json", "203.0.113.5")


class Handler(BaseHTTPRequestHandler):
    let_go = threading.Event()
    asked: list[str]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/hang":
            self.let_go.wait(30)
            return
        if self.path == "/slow":
            with suppress(OSError):
                for letter in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 80 + b"\r\n\r\n":
                    self.wfile.write(bytes([letter]))
                    self.let_go.wait(0.02)
            return
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "/file")
            self.end_headers()
            return
        if self.path == "/around":
            self.send_response(302)
            self.send_header("Location", "/around")
            self.end_headers()
            return
        self.send_response(200 if self.path in ("/file", "/endless") else 404)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(b"hello" if self.path == "/file" else b"x" * 10**6)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[tuple[str, list[str]]]:
    """Yield the server's URL and the list of what it was asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []  # type: ignore[attr-defined]
    Handler.let_go.clear()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
    finally:
        Handler.let_go.set()
        server.shutdown()
        server.server_close()


def test_http_with_limits() -> None:
    with serving() as (url, _):
        found = read_place(Place(f"{url}/file"), 100, 5)
        assert (found.data, found.address) == (b"hello", "127.0.0.1")
        assert read_place(Place(f"{url}/away"), 100, 5).where == f"{url}/file"
        for path, words in (("endless", "more than 100"), ("missing", "404"), ("around", "redirects")):
            with pytest.raises(DirectoryError, match=words):
                read_place(Place(f"{url}/{path}"), 100, 5)
        for path in ("hang", "slow"):
            with pytest.raises(DirectoryError, match="too slow"):
                read_place(Place(f"{url}/{path}"), 100, 0.2)


def test_a_directory_elsewhere_leads_into_no_private_network() -> None:
    with serving() as (url, asked):
        for where in (f"{url}/file", url.replace("http", "https") + "/file", "s3://bucket@evil/x", "file:///etc/hosts"):
            with pytest.raises(DirectoryError):
                read_place(ELSEWHERE_PLACE.beside(where, ELSEWHERE), 100, 5)
        assert asked == []


ELSEWHERE_PLACE = Place(ELSEWHERE.where)


def test_names_are_looked_up_before_they_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public name of a private address, and a directory's own name once it has another address."""
    with serving() as (url, asked):
        port = int(url.rpartition(":")[2])
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", port))])
        for where in ("https://cards.example.org/card.json", "https://runs.example.org/card.json"):
            with pytest.raises(DirectoryError, match="private network"):
                read_place(ELSEWHERE_PLACE.beside(where, ELSEWHERE), 100, 5)
        assert asked == []


def test_what_lies_beside_a_directory_is_read() -> None:
    with serving() as (url, _):
        directory = Place(f"{url}/away")
        found = read_place(directory, 100, 5)
        assert read_place(directory.beside("file", found), 100, 5).data == b"hello"


def test_paths_are_relative_to_a_directory_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_bytes(b"card")
    directory = Place(str(tmp_path / "runs.json"))
    place = directory.beside("card.json", Fetched(b"", directory.where))
    assert read_place(place, 4, 5).data == b"card"
    assert read_place(Place((tmp_path / "card.json").as_uri()), 4, 5).data == b"card"
    with pytest.raises(DirectoryError, match="more than 3"):
        read_place(place, 3, 5)
    with pytest.raises(DirectoryError, match="cannot be read"):
        read_place(directory, 3, 5)


def test_a_store_of_fsspec() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/runs/card.json", b"card")
    assert read_place(Place("memory://runs/card.json"), 4, 5).data == b"card"
    with pytest.raises(DirectoryError, match="more than 3"):
        read_place(Place("memory://runs/card.json"), 3, 5)
    with pytest.raises(DirectoryError, match="not read"):
        read_place(Place("simplecache::memory://runs/card.json"), 3, 5)


def test_what_hangs_is_given_up() -> None:
    never = threading.Event()

    def fail() -> str:
        raise DirectoryError("gone")

    def hang() -> str:
        never.wait(30)
        return "late"

    found = all_of([partial(str, "here"), fail, hang], 0.2, "too late")
    never.set()
    assert found[0] == "here"
    assert [str(one) for one in found[1:]] == ["gone", "too late"]


def test_messages_have_neither_passwords_nor_control_characters() -> None:
    assert Place("https://me:secret@example.org/\x1b[2J").shown == "https://…@example.org/·[2J"
