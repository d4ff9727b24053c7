"""GET over http and https with limits on bytes and time, connected only to addresses that the caller has allowed.

The host's name is resolved once, the caller judges the URL and every address (again after each redirect), and the
connection goes to an address that was judged: a name that changes its address meanwhile reaches nothing else."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

from shoal.swarm.protocol.addresses import reach_of
from shoal.swarm.protocol.run_sources import check_url

Judge = Callable[[str, Sequence[str]], None]
"""Allows a connection to a URL whose host has these IP addresses, or raises ``HttpError`` or ``ValueError``."""

Count = Callable[[int], None]
"""Called with the size of each piece of a body; may sleep, to keep to a rate."""

_MOST_REDIRECTS = 3
_PIECE_BYTES = 65_536
_AGENT = "shoal"


class HttpError(Exception):
    """The server gives no answer that can be used."""


@dataclass(frozen=True)
class Answer:
    """Body of an answer, at most one byte longer than the limit. ``url``: after redirects."""

    data: bytes = field(repr=False)
    url: str
    address: str


def allow_any(url: str, addresses: Sequence[str]) -> None:
    """Allow what the owner of this machine has named, wherever it lies."""


def allow_public(url: str, addresses: Sequence[str]) -> None:
    """Allow https to public servers only: for URLs that a stranger has written."""
    check_url(url)
    if not url.startswith("https://") or not all(reach_of(one) == "public" for one in addresses):
        raise HttpError("lies in a private network, or is not https: no run may have this machine look there")


def get(
    url: str,
    judge: Judge,
    limit_bytes: int,
    end_s: float,
    span: tuple[int, int] | None = None,
    count: Count | None = None,
) -> Answer:
    """GET with redirects, in HTTP/1.1 of the standard library, which bounds header lines itself.

    ``end_s``: when the whole answer is to be here, on the monotonic clock; ``span``: first byte and the one after the
    last, of a part of the file.
    Raises ``HttpError``, ``OSError``, ``ValueError`` and ``http.client.HTTPException``."""
    for _ in range(_MOST_REDIRECTS + 1):
        connection, address = _connect(url, judge, end_s)
        try:
            split = urlsplit(url)
            target = (split.path or "/") + (f"?{split.query}" if split.query else "")
            headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
            if span is not None:
                headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
            connection.response_class = functools.partial(_TimedResponse, end_s=end_s)  # type: ignore[assignment]
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                url = urljoin(url, response.getheader("Location", ""))
                continue
            if span is not None and response.status == 200 and span[0] > 0:
                raise HttpError("the server sends no parts of files (HTTP ranges)")
            if response.status not in (200, *((206,) if span is not None else ())):
                raise HttpError(f"the server answers {response.status}")
            return Answer(_body(response, limit_bytes, count), url, address)
        finally:
            connection.close()
    raise HttpError(f"more than {_MOST_REDIRECTS} redirects")


class _Plain(http.client.HTTPConnection):
    """Connection to an address that was judged, whatever the host's name has become since."""

    def __init__(self, host: str, port: int, address: str, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)


class _Secured(_Plain):
    """The same over TLS, with the certificate checked for the host's name."""

    def connect(self) -> None:
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


class _Timed(io.RawIOBase):
    """What a server sends until ``end_s``. A socket's own timeout begins anew with each byte, so that a header of a
    letter a second, or one that never ends, would take hours."""

    def __init__(self, stream: io.RawIOBase, connection: socket.socket, end_s: float) -> None:
        self._stream, self._connection, self._end_s = stream, connection, end_s

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any, /) -> int | None:
        left_s = self._end_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._connection.settimeout(left_s)
            return self._stream.readinto(out)
        except TimeoutError as error:
            raise HttpError("the server is too slow") from error

    def close(self) -> None:
        self._stream.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """Response of which every line, also those of its header, is here by ``end_s``."""

    def __init__(self, sock: socket.socket, *args: Any, end_s: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, end_s))


def _body(response: http.client.HTTPResponse, limit_bytes: int, count: Count | None) -> bytes:
    """Read up to one byte more than the limit."""
    data = bytearray()
    while len(data) <= limit_bytes:
        piece = response.read1(min(_PIECE_BYTES, limit_bytes + 1 - len(data)))
        if not piece:
            break
        data += piece
        if count is not None:
            count(len(piece))
    return bytes(data)


def _connect(url: str, judge: Judge, end_s: float) -> tuple[_Plain, str]:
    """Return a connection to an allowed address of the URL's host, and that address."""
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname or not url.isascii() or not url.isprintable():
        raise HttpError("leads to something that is no http(s) address")
    port = split.port or (443 if split.scheme == "https" else 80)
    found = socket.getaddrinfo(split.hostname, port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    judge(url, addresses)
    left_s = max(0.1, end_s - time.monotonic())
    kind = _Secured if split.scheme == "https" else _Plain
    return kind(split.hostname, port, addresses[0], left_s), addresses[0]
