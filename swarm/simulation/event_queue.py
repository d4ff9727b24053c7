"""Virtual clock: a queue of what happens when, in order of time and then of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """Calls functions at their moments. ``now_s`` jumps from one moment to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, moment_s: float, call: Callable[[], None]) -> None:
        """Call it at that moment; now, after all that is due, if the moment is past."""
        self._number += 1
        heapq.heappush(self._waiting, (max(moment_s, self.now_s), self._number, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, call)

    def run(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Run until nothing is left, ``is_over`` or the moment ``until_s``."""
        while self._waiting and not is_over():
            moment_s, _, call = self._waiting[0]
            if moment_s > until_s:
                self.now_s = until_s
                return
            heapq.heappop(self._waiting)
            self.now_s = moment_s
            self.calls += 1
            call()
