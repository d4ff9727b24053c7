"""Publication by a run's host: its card and a copy of its page, written anew when the run goes on, and now and then.

A store that hangs or refuses, or a card that cannot be made, holds up nothing but the card."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from shoal.peer.checkpoints.remote.store import DaemonThreads, RemoteStore
from shoal.peer.directory.places import Place
from shoal.swarm import durable
from shoal.swarm.errors import RemoteStorageError, StorageError, UserError

log = logging.getLogger(__name__)

RENEW_S = 600.0
"""Most seconds between two cards, of which readers see that the host is there."""

CARD_PAUSE_S = 15.0
"""Fewest seconds between two cards: stores limit how often a file is replaced."""

PAGE_PAUSE_S = 300.0
"""Fewest seconds between two copies of a page, which has some megabytes in a long run."""

_WRITE_S = 60.0
_LAST_S = 10.0
"""Most seconds that the last card, of a host that ends, may take."""

T = TypeVar("T")


def card_place(where: str, run: str) -> Place:
    """The place of a card: ``where`` itself if it ends with ``.json``, else ``RUN.json`` in that folder.

    Raises ``UserError`` for a place where nothing can be written."""
    place = Place(where if where.endswith(".json") else f"{where.rstrip('/')}/{run}.json")
    if place.scheme in ("http", "https"):
        raise UserError(f"--publish {place.shown}: nothing can be written over http: name a folder of the web server")
    if "::" in where:
        raise UserError(f"--publish {place.shown}: chained URLs (::) are not written to")
    return place


def page_place(card: Place) -> Place:
    """The folder of the page beside a card: with the card's name, without ``.json``."""
    return Place(card.where.removesuffix(".json"))


class PlaceWriter(Generic[T]):
    """Keeps a card, or a page, up to date at a place. ``changed`` may be called from anywhere in the loop; ``keep``
    runs until cancelled."""

    def __init__(
        self,
        place: Place,
        make: Callable[[bool], Awaitable[T]],
        write: Callable[[Place, T], None],
        what: str = "the run's card",
        pause_s: float = CARD_PAUSE_S,
    ) -> None:
        """``make``: makes what is so now; called with true, that of a host that ends. ``pause_s``: fewest seconds
        between two."""
        self.place = place
        self._make, self._write = make, write
        self._what, self._pause_s = what, pause_s
        self._changed = asyncio.Event()
        self._threads = DaemonThreads()
        self._writing: asyncio.Future[None] | None = None
        self._has_failed = False

    def changed(self) -> None:
        """Note that what is there is out of date."""
        self._changed.set()

    async def keep(self) -> None:
        """Write now, after changes, and every ``RENEW_S``."""
        while True:
            self._changed.clear()
            await self._put(stopped=False, within_s=_WRITE_S)
            await asyncio.sleep(self._pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S - self._pause_s):
                    await self._changed.wait()

    async def close(self) -> None:
        """Write a last time: the host ends."""
        await self._put(stopped=True, within_s=_LAST_S)

    async def _put(self, *, stopped: bool, within_s: float) -> None:
        """Write; what goes wrong is said once, until it goes well again."""
        try:
            async with asyncio.timeout(within_s):
                if self._writing is not None:  # the store may replace the new card by the old one
                    with suppress(StorageError):
                        await asyncio.shield(self._writing)
                future = self._threads.submit(self._write, self.place, await self._make(stopped))
                self._writing = asyncio.wrap_future(future)
                await asyncio.shield(self._writing)
        except TimeoutError:
            self._say(f"{self.place.shown}: has not taken {self._what} within {within_s:.0f} s")
        except (StorageError, ValueError) as error:  # a card of values that it has no room for is one of the latter
            self._say(str(error))
        else:
            if self._has_failed:
                log.warning("%s: %s is up to date again", self.place.shown, self._what)
            self._has_failed = False

    def _say(self, trouble: str) -> None:
        if not self._has_failed:
            log.warning("%s is not up to date, and is tried again and again: %s", self._what, trouble)
        self._has_failed = True


def write_files(folder: Place, files: Mapping[str, bytes], known: dict[str, bytes] | None = None) -> None:
    """Replace files in a folder one after the other, in this order. Blocks. Raises ``StorageError``.

    ``known``: digests of what was written there before, which is not written again."""
    known = {} if known is None else known
    for name, data in files.items():
        digest = hashlib.sha256(data).digest()
        if known.get(name) != digest:
            write_card(Place(f"{folder.where.rstrip('/')}/{name}"), data)
            known[name] = digest


def write_card(place: Place, data: bytes) -> None:
    """Replace the file at a place, at once for its readers. Blocks. Raises ``StorageError``."""
    path = place.path
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.put(path, data)
            return
        folder, _, name = place.where.rpartition("/")
        with tempfile.TemporaryDirectory(prefix="shoal-card-") as made:
            (Path(made) / name).write_bytes(data)
            RemoteStore.open(folder).put(Path(made) / name, name)
    except OSError as error:
        raise RemoteStorageError(f"{place.shown}: cannot be written: {error}") from error
