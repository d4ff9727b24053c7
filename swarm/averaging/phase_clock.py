"""Clock of a member's rounds: what its training thread and its exchange spend their time on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from shoal.swarm.protocol.timing import MAX_SPANS, MemberTimes, PhaseSpan
from shoal.swarm.protocol.types import WORK_PHASES, PhaseTimes, WorkPhase

_KEPT_ROUNDS = 4
_SHORTEST_S = 0.001

Track = Literal["training", "exchange"]


class _SpanLog:
    """Spans of one track in a round, at most half of ``MAX_SPANS``: of more, the shortest are merged into others."""

    def __init__(self) -> None:
        self._spans: list[tuple[WorkPhase, float, float]] = []
        self._shortest_s = _SHORTEST_S

    def add(self, phase: WorkPhase, start_s: float, stop_s: float) -> None:
        spans = self._spans
        if spans and spans[-1][0] == phase and spans[-1][2] == start_s:
            spans[-1] = phase, spans[-1][1], stop_s
            return
        spans.append((phase, start_s, stop_s))
        while len(self._spans) > MAX_SPANS // 2:
            self._coarsen()

    def _coarsen(self) -> None:
        """Let each short span be part of the one before it, and twice as long ones the next time."""
        kept: list[tuple[WorkPhase, float, float]] = []
        for phase, start_s, stop_s in self._spans:
            follows = bool(kept) and kept[-1][2] == start_s
            if follows and (stop_s - start_s < self._shortest_s or kept[-1][0] == phase):
                kept[-1] = kept[-1][0], kept[-1][1], stop_s
            else:
                kept.append((phase, start_s, stop_s))
        self._spans, self._shortest_s = kept, 2 * self._shortest_s

    def told(self, track: Track) -> tuple[PhaseSpan, ...]:
        """Return the spans as they are sent."""
        return tuple(
            PhaseSpan(track=track, phase=phase, start_s=max(0.0, start_s), seconds=max(0.0, stop_s - start_s))
            for phase, start_s, stop_s in self._spans
        )


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
        self._spans = _SpanLog(), _SpanLog()
        self._rounds: dict[int, tuple[_SpanLog, _SpanLog]] = {}

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

    def end_round(self, number: int | None = None) -> MemberTimes:
        """Return the times of the round that ends now; those of the next one begin. The spans of the last rounds are
        kept by ``number``, if it is known."""
        with self._lock:
            self._advance()
            ended = MemberTimes(training=PhaseTimes(**self._trained), exchange=PhaseTimes(**self._exchanged))
            self._trained, self._exchanged = _zeros(), _zeros()
            if number is not None:
                self._rounds[number] = self._spans
                for old in sorted(self._rounds)[:-_KEPT_ROUNDS]:
                    del self._rounds[old]
            self._spans = _SpanLog(), _SpanLog()
            return ended

    def spans(self, number: int) -> tuple[tuple[PhaseSpan, ...], float]:
        """Return the spans of a round, if it is one of the last, and the time now on the same clock."""
        with self._lock:
            training, exchange = self._rounds.get(number, (_SpanLog(), _SpanLog()))
            return (*training.told("training"), *exchange.told("exchange")), max(0.0, self._clock())

    def _advance(self) -> None:
        before_s, now_s = self._since_s, self._clock()
        passed_s, self._since_s = now_s - before_s, now_s
        if passed_s <= 0.0:
            return
        training, exchange = self._spans
        if self._exchange is not None:
            self._exchanged[self._exchange] += passed_s
            exchange.add(self._exchange, before_s, now_s)
        self._trained[self.phase] += passed_s
        training.add(self.phase, before_s, now_s)


def _zeros() -> dict[WorkPhase, float]:
    return dict.fromkeys(WORK_PHASES, 0.0)
