"""Reader of the run's history for members and observers: rounds go before it, and members before observers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from shoal.swarm.aio import in_thread
from shoal.swarm.coordinator.journal import VerdictSource, read_page
from shoal.swarm.errors import TryLater
from shoal.swarm.protocol.messages import CoordinatorToPeerVerdicts

_MOST_WAITING = 2
"""Requests of one peer: one, and another after it has given up waiting for the first."""

_GUESTS_PAUSES, _LONGEST_PAUSE_S = 4.0, 1.0
"""Pause after each observer's page, in multiples of the time that reading it took, and at most."""


class HistoryReader:
    """Reads pages of the journal, one at a time.

    Observers, as which anybody with the invite may join, wait for each other, with a pause after each page: their
    requests cost the run a fraction of a core at most."""

    def __init__(self, journal: VerdictSource) -> None:
        self._journal = journal
        self._members, self._guests = asyncio.Lock(), asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    async def page(self, peer: str, first: int, scope: int | None, *, is_guest: bool) -> CoordinatorToPeerVerdicts:
        """Read a page as ``read_page`` does. Raises ``TryLater`` for a peer with several requests that wait."""
        if self._waiting[peer] >= _MOST_WAITING:
            raise TryLater("earlier requests for the history have not been answered yet")
        self._waiting[peer] += 1
        try:
            if not is_guest:
                async with self._members:
                    return await in_thread(read_page, self._journal, first, scope)
            async with self._guests:
                began_s = time.monotonic()
                page = await in_thread(read_page, self._journal, first, scope)
                await asyncio.sleep(min(_GUESTS_PAUSES * (time.monotonic() - began_s), _LONGEST_PAUSE_S))
                return page
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]
