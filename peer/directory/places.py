"""Places of directories and cards: paths and URLs, read with limits on bytes and time, and by rules on where they lie.

What a person types, or writes into a directory on this machine, may lie anywhere. What a directory on another machine
lists may lie on public servers only (``run_sources.check_url``), or where that directory itself lies: nobody's listing
makes this machine look into its own network. For http and https that is checked for the addresses that the name has,
after each redirect too, and the connection goes to an address that was checked."""

from __future__ import annotations

import http.client
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from shoal.peer.checkpoints.remote.store import RemoteStore, without_password
from shoal.peer.regular_file import read_regular
from shoal.swarm.errors import DirectoryError, RemoteStorageError
from shoal.swarm.protocol.addresses import reach_of
from shoal.swarm.protocol.run_sources import check_url

T = TypeVar("T")

_MOST_REDIRECTS = 3
_AT_ONCE = 16
_PIECE_BYTES = 65_536
_AGENT = "shoal"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True)
class Place:
    """Location of a file: a path, or a URL. ``listed_by``: the directory on another machine that names it, if any."""

    where: str
    listed_by: Fetched | None = None

    @property
    def scheme(self) -> str:
        """Scheme of a URL in lower case; empty for a path."""
        found = _SCHEME.match(self.where)
        return found[1].lower() if found else ""

    @property
    def path(self) -> Path | None:
        """Path of a file on this machine, else None."""
        if self.scheme == "file":
            return Path(unquote(urlsplit(self.where).path))
        return None if self.scheme else Path(self.where).expanduser()

    @property
    def shown(self) -> str:
        """For messages: without passwords, and without letters that could move a terminal's cursor."""
        return "".join(one if one.isprintable() else "·" for one in without_password(self.where))[:300]

    def beside(self, reference: str, found: Fetched) -> Place:
        """The place that a directory, ``found`` here, names: a URL, or a path from where the directory lies."""
        if _SCHEME.match(reference):
            return Place(reference, None if self.path else found)
        if self.path is not None:
            return Place(str(self.path.parent / Path(reference).expanduser()))
        return Place(urljoin(found.where, reference), found)


@dataclass(frozen=True)
class Fetched:
    """A file that was read. ``where``: its place after redirects; ``address``: the IP address that it came from, over
    http and https."""

    data: bytes = field(repr=False)
    where: str
    address: str = ""


def read_place(place: Place, limit_bytes: int, within_s: float) -> Fetched:
    """Read a file of at most ``limit_bytes``; blocks for up to about ``within_s``, longer where a driver or a resolver
    hangs (``all_of`` does not wait for that). Raises ``DirectoryError``."""
    try:
        if place.listed_by is not None and place.path is not None:
            raise DirectoryError(f"{place.shown}: is a file of this machine, and a directory elsewhere lists it")
        if "::" in place.where and "://" in place.where:
            raise DirectoryError(f"{place.shown}: chained URLs (::) are not read")
        if place.path is not None:
            found = Fetched(read_regular(place.path, limit_bytes), place.where)
        elif place.scheme in ("http", "https"):
            found = _get(place, limit_bytes, time.monotonic() + within_s)
        else:
            found = Fetched(_read_store(place, limit_bytes + 1), place.where)
    except DirectoryError:
        raise
    except (OSError, http.client.HTTPException, RemoteStorageError, ValueError) as error:
        raise DirectoryError(f"{place.shown}: cannot be read: {error or type(error).__name__}") from error
    if len(found.data) > limit_bytes:
        raise DirectoryError(f"{place.shown}: has more than {limit_bytes:,} bytes")
    return found


def all_of(calls: Sequence[Callable[[], T]], within_s: float, late: str) -> list[T | DirectoryError]:
    """Return what each call returns or its ``DirectoryError``, with as many at once as is polite to a server.

    After ``within_s`` calls that have not returned are given up, as ``late``; their threads keep no process alive."""
    results: list[T | DirectoryError] = [DirectoryError(late) for _ in calls]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(calls)):
        waiting.put(number)
    done = threading.Semaphore(0)
    given_up = threading.Event()

    def work() -> None:
        while not given_up.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                result: T | DirectoryError = calls[number]()
            except DirectoryError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - what a stranger's file made fail is that file's failure
                result = DirectoryError(f"cannot be read: {type(error).__name__}: {error}")
            if not given_up.is_set():
                results[number] = result
            done.release()

    for _ in range(min(_AT_ONCE, len(calls))):
        threading.Thread(target=work, name="shoal-directory", daemon=True).start()
    end_s = time.monotonic() + within_s
    for _ in calls:
        if not done.acquire(timeout=max(0.0, end_s - time.monotonic())):
            break
    given_up.set()
    return list(results)


# Stores, through fsspec --------------------------------------------------------------------------------------------


def _read_store(place: Place, stop: int) -> bytes:
    if place.listed_by is not None:
        check_url(place.where)
    folder, _, name = place.where.rpartition("/")
    return RemoteStore.open(folder).read(name, 0, stop)


# http and https ----------------------------------------------------------------------------------------------------


class _Plain(http.client.HTTPConnection):
    """Connection to an address that was checked, whatever the host's name has become since."""

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


def _get(place: Place, limit_bytes: int, end_s: float) -> Fetched:
    """GET with redirects, in HTTP/1.1 of the standard library, which bounds header lines itself."""
    url = place.where
    for _ in range(_MOST_REDIRECTS + 1):
        connection, address = _connect(url, place, end_s)
        try:
            split = urlsplit(url)
            target = (split.path or "/") + (f"?{split.query}" if split.query else "")
            connection.request("GET", target, headers={"User-Agent": _AGENT, "Accept-Encoding": "identity"})
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                url = urljoin(url, response.getheader("Location", ""))
                continue
            if response.status != 200:
                raise DirectoryError(f"{place.shown}: the server answers {response.status}")
            return Fetched(_body(response, connection, limit_bytes, end_s), url, address)
        finally:
            connection.close()
    raise DirectoryError(f"{place.shown}: more than {_MOST_REDIRECTS} redirects")


def _body(
    response: http.client.HTTPResponse, connection: http.client.HTTPConnection, limit_bytes: int, end_s: float
) -> bytes:
    """Read up to one byte more than the limit, until ``end_s``."""
    data = bytearray()
    while len(data) <= limit_bytes:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise DirectoryError("the server is too slow")
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        piece = response.read1(min(_PIECE_BYTES, limit_bytes + 1 - len(data)))
        if not piece:
            break
        data += piece
    return bytes(data)


def _connect(url: str, place: Place, end_s: float) -> tuple[_Plain, str]:
    """Return a connection to an allowed address of the URL's host, and that address. Raises ``DirectoryError``."""
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname or not url.isascii() or not url.isprintable():
        raise DirectoryError(f"{place.shown}: leads to something that is no http(s) address")
    port = split.port or (443 if split.scheme == "https" else 80)
    at_home = place.listed_by is not None and _origin(url) == _origin(place.listed_by.where)
    if place.listed_by is not None and not at_home:
        check_url(url)  # and with it only https
    found = socket.getaddrinfo(split.hostname, port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    if place.listed_by is not None:
        known = place.listed_by.address if at_home else ""
        if not all(reach_of(one) == "public" or one == known for one in addresses):
            raise DirectoryError(f"{place.shown}: lies in a private network, and a directory elsewhere lists it")
    left_s = max(0.1, end_s - time.monotonic())
    kind = _Secured if split.scheme == "https" else _Plain
    return kind(split.hostname, port, addresses[0], left_s), addresses[0]


def _origin(url: str) -> tuple[str, str | None, int | None]:
    split = urlsplit(url)
    return split.scheme, split.hostname, split.port
