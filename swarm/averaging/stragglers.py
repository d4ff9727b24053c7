"""Whom the others wait for, and too long for how slow it is: they go on without it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.swarm.averaging.pace import Pace

_SLOWEST = 1 / 20
"""Of the middle rate of the others: a link at a tenth of theirs is slow and honest, and has to count in full."""


@dataclass
class _Source:
    """``waited_s``: for how long the others have been waiting for it, since its first chunk."""

    limit_s: float
    pace: Pace = field(default_factory=Pace)
    chunk_bytes: int = 0
    arrived_s: float = 0.0
    asked_s: float | None = None
    waited_s: float = 0.0

    def fastest_bps(self, now_s: float) -> float | None:
        """Bits a second if what we wait for came now; None while nothing shows it."""
        size_bytes, seconds = self.pace.size_bytes, self.pace.seconds
        if self.asked_s is not None and now_s - self.asked_s >= self.asked_s - self.arrived_s:
            size_bytes, seconds = size_bytes + self.chunk_bytes, seconds + now_s - self.arrived_s
        return 8 * size_bytes / seconds if seconds else None

    @property
    def bps(self) -> float | None:
        """Bits a second of what came while we waited for it; None while nothing did."""
        return 8 * self.pace.size_bytes / self.pace.seconds if self.pace.seconds else None


class Stragglers:
    """Sources of chunks that are waited for together. All moments are of one clock, in seconds.

    A stream's first chunk counts in nothing: it depends on everybody's start, and has a deadline of its own."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}

    def begin(self, source: int, limit_s: float) -> None:
        """A stream; the others wait for it for ``limit_s`` in all, or as long as it takes when it is not that slow."""
        self._sources[source] = _Source(limit_s)

    def forget(self, source: int) -> None:
        """It has failed. One that is done stays: its rate is what others are compared with."""
        self._sources.pop(source, None)

    def arrived(self, source: int, size_bytes: int, now_s: float) -> None:
        """A chunk is here, and the next is not asked for yet."""
        one = self._sources[source]
        if one.asked_s is None:
            one.pace.began(now_s)
        else:
            one.pace.arrived(size_bytes, now_s, now_s - one.asked_s, one.asked_s - one.arrived_s)
        one.chunk_bytes, one.arrived_s, one.asked_s = max(one.chunk_bytes, size_bytes), now_s, None

    def asked(self, source: int, now_s: float) -> None:
        """For the next chunk."""
        self._sources[source].asked_s = now_s

    def look(self, now_s: float, since_s: float, behind: Collection[int]) -> list[int]:
        """Whom to go on without. ``behind``: those that have been waited for since ``since_s``, the last look.

        Where most of the others are behind, too, it is not for this one that everybody waits."""
        found = []
        for name, source in self._sources.items():
            others = self._sources.keys() - {name}
            if name not in behind or not source.chunk_bytes or 2 * len(others.intersection(behind)) > len(others):
                continue
            source.waited_s += now_s - since_s
            if source.waited_s > source.limit_s and self._is_slow(source, others, now_s):
                found.append(name)
        return found

    def _is_slow(self, source: _Source, others: Collection[int], now_s: float) -> bool:
        rates, fastest_bps = [self._sources[other].bps for other in others], source.fastest_bps(now_s)
        known = [bps for bps in rates if bps is not None]
        return bool(known) and fastest_bps is not None and fastest_bps < _SLOWEST * statistics.median(known)
