"""Timings of the last rounds, as a coordinator remembers and shows them. They are not in the journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_low

from shoal.swarm.coordinator.critical_path import ScopeSeen, critical_path
from shoal.swarm.protocol.timing import MAX_TIMINGS, MemberTimes, RoundTiming
from shoal.swarm.protocol.types import WORK_PHASES, PhaseTimes

_WINDOW = 16
"""Rounds over which utilisation and the usual length of an exchange are taken."""


def timing_of(number: int, committed: bool, scopes: Sequence[ScopeSeen]) -> RoundTiming:
    """Return where the time of a round went that was seen so in its scopes; they begin and end together."""
    first = scopes[0]
    planned_s = first.planned_s if first.planned_s is not None else first.ended_s
    closes_s = min(max(first.closes_s, first.began_s), planned_s)
    times = [one.times for scope in scopes for one in scope.members.values() if one.times is not None]
    mean = _mean([one.training for one in times])
    return RoundTiming(
        round=number,
        committed=committed,
        wall_s=first.wall_s,
        work_s=max(0.0, closes_s - first.began_s),
        gather_s=max(0.0, planned_s - closes_s),
        exchange_s=max(0.0, first.ended_s - planned_s),
        members=len({peer for scope in scopes for peer in scope.reported_s}),
        utilisation=_utilisation(times),
        mean=mean,
        path=critical_path(number, scopes),
        ended_s=max(0.0, first.ended_s),
    )


class TimingHistory:
    """Timings of the last rounds, and how much of the work since the coordinator's start was of use."""

    def __init__(self) -> None:
        self._rounds: deque[RoundTiming] = deque(maxlen=MAX_TIMINGS)
        self._committed_tokens = self._wasted_tokens = 0

    def add(self, timing: RoundTiming) -> None:
        """Remember a round that has ended."""
        self._rounds.append(timing)

    def committed(self, tokens: int) -> None:
        """Note tokens in a committed round; fewer than none of rounds that were undone."""
        self._committed_tokens += tokens

    def wasted(self, tokens: int) -> None:
        """Note tokens that were trained, and are in no committed round."""
        self._wasted_tokens += tokens

    @property
    def newest(self) -> RoundTiming | None:
        """Timing of the last round; None before one has ended."""
        return self._rounds[-1] if self._rounds else None

    def since(self, first: int) -> tuple[RoundTiming, ...]:
        """Return the timings of rounds from ``first`` on, oldest first."""
        return tuple(one for one in self._rounds if one.round >= first)

    @property
    def usual_exchange_s(self) -> float:
        """Length of a usual exchange of the last rounds, without those in which somebody was waited for."""
        recent = [one.exchange_s for one in list(self._rounds)[-_WINDOW:] if one.committed and one.path is None]
        return median_low(recent) if recent else 0.0

    @property
    def utilisation(self) -> float | None:
        """Share of the members' time that went into compute over the last rounds; None while nobody has said."""
        recent = [one for one in list(self._rounds)[-_WINDOW:] if one.utilisation is not None]
        whole_s = sum(one.wall_s * one.members for one in recent)
        used_s = sum((one.utilisation or 0.0) * one.wall_s * one.members for one in recent)
        return min(1.0, used_s / whole_s) if whole_s > 0.0 else None

    @property
    def goodput(self) -> float | None:
        """Share of the trained tokens that is in committed rounds; None before any."""
        trained = self._committed_tokens + self._wasted_tokens
        return min(1.0, max(0.0, self._committed_tokens / trained)) if trained > 0 else None


def _utilisation(times: Iterable[MemberTimes]) -> float | None:
    whole_s = compute_s = 0.0
    for one in times:
        whole_s += one.training.total_s
        compute_s += one.training.compute
    return min(1.0, compute_s / whole_s) if whole_s > 0.0 else None


def _mean(times: Sequence[PhaseTimes]) -> PhaseTimes | None:
    if not times:
        return None
    return PhaseTimes(**{phase: sum(one.of(phase) for one in times) / len(times) for phase in WORK_PHASES})
