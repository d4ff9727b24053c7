"""How fast this peer steps: smoothed over recent steps, waiting not counted."""

from __future__ import annotations

import time
from collections.abc import Callable

_SMOOTHING = 0.2


class StepClock:
    """``start`` when a batch is handed out, ``stop`` when its step is done."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_s = 0.0
        self.tokens_per_s = 0.0
        self._clock = clock
        self._started_s: float | None = None

    def start(self) -> None:
        self._started_s = self._clock()

    def stop(self, tokens: int) -> None:
        """The step took in ``tokens`` tokens."""
        if self._started_s is None:
            return
        seconds = max(self._clock() - self._started_s, 1e-6)
        self._started_s = None
        share = 1.0 if self.step_s == 0.0 else _SMOOTHING
        self.step_s += share * (seconds - self.step_s)
        self.tokens_per_s += share * (tokens / seconds - self.tokens_per_s)

    def reset(self) -> None:
        """Forget a step that was begun; the averages stay."""
        self._started_s = None
