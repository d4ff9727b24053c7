"""Waiting on the event loop until something holds that others change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """What ``asyncio.Condition`` is for, on one loop and without its lock: chunks come and go by the hundred, and
    hardly any of them is waited for."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def announce(self) -> None:
        """Something has changed: whoever waits looks again."""
        if self._next is not None:
            self._next.set()
            self._next = None

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns at once when it holds already; else looks again after every change."""
        while not holds():
            if self._next is None:
                self._next = asyncio.Event()
            await self._next.wait()
