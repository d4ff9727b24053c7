"""Publication of a run's card by its host: written anew when the run goes on, and now and then when it does not.

A store that hangs or refuses, or a card that cannot be made, holds up nothing but the card."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from shoal.peer.checkpoints.remote.store import DaemonThreads, RemoteStore
from shoal.peer.directory.places import Place
from shoal.swarm import durable
from shoal.swarm.errors import RemoteStorageError, StorageError, UserError

log = logging.getLogger(__name__)

RENEW_S = 600.0
"""Most seconds between two cards, of which readers see that the host is there."""

_PAUSE_S = 15.0
"""Fewest seconds between two cards: stores limit how often a file is replaced."""

_WRITE_S = 60.0
_LAST_S = 10.0
"""Most seconds that the last card, of a host that ends, may take."""

MakeCard = Callable[[bool], Awaitable[bytes]]
"""Makes the card of this moment; true: of a host that ends."""


def card_place(where: str, run: str) -> Place:
    """The place of a card: ``where`` itself if it ends with ``.json``, else ``RUN.json`` in that folder.

    Raises ``UserError`` for a place where nothing can be written."""
    place = Place(where if where.endswith(".json") else f"{where.rstrip('/')}/{run}.json")
    if place.scheme in ("http", "https"):
        raise UserError(f"--publish {place.shown}: nothing can be written over http: name a folder of the web server")
    if "::" in where:
        raise UserError(f"--publish {place.shown}: chained URLs (::) are not written to")
    return place


class CardWriter:
    """Keeps a card up to date. ``changed`` may be called from anywhere in the loop; ``keep`` runs until cancelled."""

    def __init__(self, place: Place, make: MakeCard, write: Callable[[Place, bytes], None] | None = None) -> None:
        self.place = place
        self._make = make
        self._write = write or write_card
        self._changed = asyncio.Event()
        self._threads = DaemonThreads()
        self._writing: asyncio.Future[None] | None = None
        self._has_failed = False

    def changed(self) -> None:
        """Note that the card is out of date."""
        self._changed.set()

    async def keep(self) -> None:
        """Write the card now, after changes, and every ``RENEW_S``."""
        while True:
            self._changed.clear()
            await self._put(stopped=False, within_s=_WRITE_S)
            await asyncio.sleep(_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S - _PAUSE_S):
                    await self._changed.wait()

    async def close(self) -> None:
        """Write the last card: the host ends."""
        await self._put(stopped=True, within_s=_LAST_S)

    async def _put(self, *, stopped: bool, within_s: float) -> None:
        """Write the card; what goes wrong is said once, until it goes well again."""
        try:
            async with asyncio.timeout(within_s):
                if self._writing is not None:  # the store may replace the new card by the old one
                    with suppress(StorageError):
                        await asyncio.shield(self._writing)
                future = self._threads.submit(self._write, self.place, await self._make(stopped))
                self._writing = asyncio.wrap_future(future)
                await asyncio.shield(self._writing)
        except TimeoutError:
            self._say(f"{self.place.shown}: has not taken the run's card within {within_s:.0f} s")
        except (StorageError, ValueError) as error:  # a card of values that it has no room for is one of the latter
            self._say(str(error))
        else:
            if self._has_failed:
                log.warning("%s: the run's card is up to date again", self.place.shown)
            self._has_failed = False

    def _say(self, trouble: str) -> None:
        if not self._has_failed:
            log.warning("the run's card is not up to date, and is tried again and again: %s", trouble)
        self._has_failed = True


def write_card(place: Place, data: bytes) -> None:
    """Replace the card at a place, at once for its readers. Blocks. Raises ``StorageError``."""
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
