"""Detection of stragglers: sources so slow that the round should continue without them.

``StragglerDetector`` decides, ``StragglerGuard`` cuts their streams off.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamMeter
from shoal.swarm.errors import LinkError, MemberGone

_SLOWEST = 20
"""Longest time that a source may take, as a multiple of the others' median. A link at a tenth of their rate is slow and
honest, and has to count in full, also where it serves another owner first."""


@dataclass
class _Source:
    """A stream of ``chunks`` chunks; ``waited_s``: for how long the others have waited for it, from its first chunk
    on."""

    limit_s: float
    chunks: int
    meter: StreamMeter
    waited_s: float = 0.0


class StragglerDetector:
    """Finds stragglers among sources of chunks that are waited for together. All moments are of one clock, in
    seconds."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}

    def begin(self, source: int, limit_s: float, chunks: int, meter: StreamMeter) -> None:
        """Add a stream; the others wait for it in all for ``limit_s``, and what a slow link may need beside."""
        self._sources[source] = _Source(limit_s, chunks, meter)

    def forget(self, source: int) -> None:
        """Remove a source that has failed. One that is done stays: its rate is what others are compared with."""
        self._sources.pop(source, None)

    def look(self, now_s: float, since_s: float, behind: Collection[int]) -> list[int]:
        """Return the sources to continue without. ``behind``: those that have been waited for since ``since_s``, the
        last look.

        While most of the others are behind, too, this source is not the one that everybody waits for."""
        found = []
        for name, source in self._sources.items():
            others = self._sources.keys() - {name}
            if name not in behind or not source.meter.chunk_bytes:
                continue
            if 2 * len(others.intersection(behind)) > len(others):
                continue
            source.waited_s += now_s - since_s
            if source.waited_s > source.limit_s + self._slow_link_s(source, others):
                found.append(name)
        return found

    def _slow_link_s(self, source: _Source, others: Collection[int]) -> float:
        """Return what a link at the lowest tolerated rate needs for the whole stream; without others, infinity.

        The rate that the source has shown does not matter: a slow link may give others more than us, and us more
        later."""
        times_s = [chunk_s for other in others if (chunk_s := self._sources[other].meter.chunk_s) is not None]
        return _SLOWEST * source.chunks * statistics.median_low(times_s) if times_s else math.inf


class StragglerGuard:
    """Runs streams that are waited for together: an owner's contributions, or the results of all parts.

    Repeats those that fail while the coordinator is away, and cuts stragglers off. What passes while the coordinator is
    away counts against nobody."""

    def __init__(self, context: ExchangeContext, behind: Callable[[], Collection[int]]) -> None:
        """``behind``: returns the sources that are being waited for."""
        self._deadlines = context.deadlines
        self._was_away = context.was_away
        self._behind = behind
        self._detector = StragglerDetector()
        self._cut_offs: dict[int, asyncio.Timeout] = {}

    async def watch(self) -> None:
        """Cut stragglers off, until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            since_s = now_s()
            await asyncio.sleep(self._deadlines.heartbeat_s)
            behind = () if self._was_away(since_s) else self._behind()
            for source in self._detector.look(now_s(), since_s, behind):
                if (cut_off := self._cut_offs.pop(source, None)) is not None:
                    cut_off.reschedule(now_s())

    async def fetch(
        self, source: int, limit_s: float, chunks: int, meter: StreamMeter, attempt: Callable[[], Awaitable[None]]
    ) -> None:
        """Run a stream of so many chunks to its end. Raises ``LinkError`` when it is cut off, else as ``attempt``.

        ``attempt`` fetches what is still missing, measured by ``meter``."""
        self._detector.begin(source, limit_s, chunks, meter)
        cut_off, is_done = asyncio.timeout(None), False
        try:
            async with cut_off:
                self._cut_offs[source] = cut_off
                await self._repeat(attempt)
            is_done = True
        except TimeoutError as error:
            if not cut_off.expired():
                raise
            raise LinkError(f"the others waited for its chunks for much more than {limit_s:.1f} s") from error
        finally:
            self._cut_offs.pop(source, None)
            if not is_done:
                self._detector.forget(source)

    async def _repeat(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeat an attempt that failed while the coordinator was away."""
        now_s = asyncio.get_running_loop().time
        while True:
            start_s = now_s()
            try:
                return await attempt()
            except MemberGone:
                raise
            except LinkError:
                if not self._was_away(start_s):
                    raise
            await asyncio.sleep(self._deadlines.heartbeat_s)  # an unreachable source fails at once, every time
