"""Steady speeds of counters that grow in bursts: what was added over wall time, in a sliding window."""

from __future__ import annotations

from collections import deque

_EVERY_S = 1.0
"""Least time between two kept values, so that a window costs little memory."""


class SpeedMeter:
    """Measures how fast a counter grows, over the last ``window_s`` seconds. Moments are arguments."""

    def __init__(self, window_s: float = 180.0) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._newest: tuple[float, int] | None = None

    def note(self, count: int, now_s: float) -> None:
        """Take a value of the counter. One that has gone back, as after a round was undone, begins anew."""
        if self._newest is not None and count < self._newest[1]:
            self._seen.clear()
        self._newest = (now_s, count)
        if not self._seen or now_s - self._seen[-1][0] >= _EVERY_S:
            self._seen.append(self._newest)
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        """The speed; 0 before the counter was seen over some time."""
        if self._newest is None or not self._seen:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._newest
        return (last - first) / (last_s - first_s) if last_s - first_s >= _EVERY_S else 0.0
