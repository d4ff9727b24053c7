"""Decision when a peer reports its capability again, and estimate of its real speed under load."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from shoal.swarm.pipeline.planner.model import PeerCapability

_CLEAR_RATIO = 1.5
"""Ratio from which two figures clearly differ."""
_INTERVAL_S = 180.0
"""Least time between reports, since other peers may have to move for each."""
_STEADY_S = 60.0
"""Time for which a difference has to last, since a passing one is not worth a new plan."""
_LEAST_TRIP_S = 0.005
"""Differences of round trips below this are negligible beside a micro-batch."""

_WINDOW, _FEWEST = 32, 8
"""Micro-batches that the speed is estimated from, and the fewest that give an estimate."""


class CapabilityUpdates:
    """Decision whether the present capability differs enough from the reported one."""

    def __init__(self) -> None:
        self._reported: PeerCapability | None = None
        self._is_guess = False
        self._reported_s = 0.0
        self._differs_since_s: float | None = None

    def note_report(self, one: PeerCapability, now_s: float, *, is_guess: bool) -> None:
        """Note that ``one`` is reported. ``is_guess``: its bandwidth was not measured yet."""
        self._reported, self._reported_s, self._is_guess = one, now_s, is_guess
        self._differs_since_s = None

    def is_due(self, now: PeerCapability, now_s: float, *, is_guess: bool) -> bool:
        """Return whether to report ``now``: it has clearly differed from the reported one at every call for a while,
        or its bandwidth is measured for the first time and clearly differs from the guess."""
        reported = self._reported
        if reported is None:
            return True
        if self._is_guess and not is_guess and _is_clear(reported.bandwidth_bps, now.bandwidth_bps):
            return True
        if not _differ(reported, now):
            self._differs_since_s = None
            return False
        if self._differs_since_s is None:
            self._differs_since_s = now_s
        return now_s >= max(self._differs_since_s + _STEADY_S, self._reported_s + _INTERVAL_S)


def _differ(one: PeerCapability, other: PeerCapability) -> bool:
    trips_differ = abs(one.rtt_s - other.rtt_s) >= _LEAST_TRIP_S and _is_clear(one.rtt_s, other.rtt_s)
    return (
        trips_differ
        or _is_clear(one.bandwidth_bps, other.bandwidth_bps)
        or _is_clear(sum(one.layer_s), sum(other.layer_s))
    )


def _is_clear(one: float, other: float) -> bool:
    return max(one, other) >= _CLEAR_RATIO * min(one, other) > 0 or (min(one, other) == 0 < max(one, other))


class SpeedEstimate:
    """Ratio of real to profiled seconds of a micro-batch; other programs may slow the machine down.

    ``expected_s``: returns the profiled seconds of a micro-batch that enters at a stage, through the rest of the span.
    """

    def __init__(self, expected_s: Callable[[int], float]) -> None:
        self._expected_s = expected_s
        self._factors: deque[float] = deque(maxlen=_WINDOW)

    def add(self, from_stage: int, seconds: float) -> None:
        """Add a micro-batch's real seconds, forward and backward."""
        if (expected_s := self._expected_s(from_stage)) > 0:
            self._factors.append(seconds / expected_s)

    @property
    def factor(self) -> float | None:
        """Median ratio of real to profiled seconds; None after too few micro-batches."""
        return statistics.median(self._factors) if len(self._factors) >= _FEWEST else None
