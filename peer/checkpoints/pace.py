"""After which rounds a peer writes a checkpoint, so that writing takes no more than its share of the time. Pure."""

from __future__ import annotations

import math
from collections import deque

_SHARE = 20
"""Writing takes at most one part in so many of the time."""

_ROUNDS = 8
"""So many of the last ones say how long rounds take."""

_MOST = 2**20


class Pace:
    """``in_step``: where others write other parts of the same states, each as fast as its disk, rounds are left out by
    powers of two: those of the slowest one are rounds of all."""

    def __init__(self, *, in_step: bool) -> None:
        self._in_step = in_step
        self._ended: deque[tuple[int, float]] = deque(maxlen=_ROUNDS + 1)
        self._wrote_s = 0.0
        self._next_s = -math.inf

    def is_due(self, number: int, now_s: float) -> bool:
        """Whether the state of that round, which has just ended, is to be written."""
        self._ended.append((number, now_s))
        return number % self.spacing == 0 if self._in_step else now_s >= self._next_s

    def wrote(self, began_s: float, now_s: float) -> None:
        """A checkpoint, or as much of one as the disk took."""
        self._wrote_s = now_s - began_s
        self._next_s = now_s + _SHARE * self._wrote_s

    @property
    def spacing(self) -> int:
        """In step: of so many rounds one is written."""
        (first, first_s), (last, last_s) = (self._ended[0], self._ended[-1]) if self._ended else ((0, 0.0), (0, 0.0))
        if last <= first or last_s <= first_s:
            return 1
        rounds = _SHARE * self._wrote_s * (last - first) / (last_s - first_s)
        return min(_MOST, 1 << max(0, math.ceil(math.log2(rounds)))) if rounds > 0 else 1
