"""Places of directories and cards: paths and URLs, read with limits on bytes and time, and by rules on where they lie.

What a person types, or writes into a directory on this machine, may lie anywhere. What a directory on another machine
lists may lie on public servers only (``run_sources.check_url``), or where that directory itself lies: nobody's listing
makes this machine look into its own network. For http and https that is checked for the addresses that the name has,
after each redirect too, and the connection goes to an address that was checked."""

from __future__ import annotations

import http.client
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from shoal.peer.checkpoints.remote.store import RemoteStore, without_password
from shoal.peer.http_get import HttpError, get
from shoal.peer.regular_file import read_regular
from shoal.swarm.errors import DirectoryError, RemoteStorageError
from shoal.swarm.protocol.addresses import reach_of
from shoal.swarm.protocol.run_sources import check_url

T = TypeVar("T")

_AT_ONCE = 16
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


def _get(place: Place, limit_bytes: int, end_s: float) -> Fetched:
    """GET, where the rules on what a directory may list hold again for each redirect."""

    def judge(url: str, addresses: Sequence[str]) -> None:
        listed_by = place.listed_by
        if listed_by is None:
            return
        at_home = _origin(url) == _origin(listed_by.where)
        if not at_home:
            check_url(url)  # and with it only https
        known = listed_by.address if at_home else ""
        if not all(reach_of(one) == "public" or one == known for one in addresses):
            raise HttpError("lies in a private network, and a directory elsewhere lists it")

    try:
        answer = get(place.where, judge, limit_bytes, end_s)
    except HttpError as error:
        raise DirectoryError(f"{place.shown}: {error}") from error
    return Fetched(answer.data, answer.url, answer.address)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    split = urlsplit(url)
    return split.scheme, split.hostname, split.port
