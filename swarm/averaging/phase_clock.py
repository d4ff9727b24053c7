"""Clock of a member's rounds: what its training thread and its exchange spend their time on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.swarm.protocol.timing import MemberTimes
from shoal.swarm.protocol.types import WORK_PHASES, PhaseTimes, WorkPhase


class PhaseClock:
    """Time by phase since the last round ended, on two tracks: the training thread's and the exchange's.

    The training track is always in a phase, so that its phases add up to the whole time. It may follow the exchange
    (``train(None)``), as while a thread waits for its round: then it does what that does, and waits where it does
    nothing. One switch costs about a microsecond; from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._training: WorkPhase | None = "waiting"
        self._exchange: WorkPhase | None = None
        self._since_s = clock()
        self._trained, self._exchanged = _zeros(), _zeros()

    def train(self, phase: WorkPhase | None) -> None:
        """Note what the training thread does from now on; None: what the exchange does."""
        with self._lock:
            self._advance()
            self._training = phase

    def exchange(self, phase: WorkPhase | None) -> None:
        """Note what the exchange does from now on; None: nothing."""
        with self._lock:
            self._advance()
            self._exchange = phase

    @contextmanager
    def training(self, phase: WorkPhase | None) -> Iterator[None]:
        """Have the training thread in a phase inside of the context, and in the one before after it."""
        before = self._training
        self.train(phase)
        try:
            yield
        finally:
            self.train(before)

    @property
    def phase(self) -> WorkPhase:
        """Phase that the training thread is in."""
        return self._training or self._exchange or "waiting"

    def times(self) -> MemberTimes:
        """Return the times since the last round ended."""
        with self._lock:
            self._advance()
            return MemberTimes(training=PhaseTimes(**self._trained), exchange=PhaseTimes(**self._exchanged))

    def end_round(self) -> MemberTimes:
        """Return the times of the round that ends now; those of the next one begin."""
        with self._lock:
            self._advance()
            ended = MemberTimes(training=PhaseTimes(**self._trained), exchange=PhaseTimes(**self._exchanged))
            self._trained, self._exchanged = _zeros(), _zeros()
            return ended

    def _advance(self) -> None:
        now_s = self._clock()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._exchange is not None:
            self._exchanged[self._exchange] += passed_s
        self._trained[self.phase] += passed_s


def _zeros() -> dict[WorkPhase, float]:
    return dict.fromkeys(WORK_PHASES, 0.0)
