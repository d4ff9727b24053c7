"""Detection of stragglers: sources so slow that the round should continue without them."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from shoal.swarm.averaging.chunk_streams import ChunkConsumer, DeliveryMeter, ExchangeContext
from shoal.swarm.errors import LinkError

_SLOWEST = 20
"""Times as long as the middle one of the others would need: a link at a tenth of their rate is slow and honest, and has
to count in full, also where it serves another owner first."""


@dataclass
class _Source:
    """``chunks``: that it is to deliver. ``waited_s``: for how long the others have been waiting for it, from its first
    chunk on."""

    limit_s: float
    chunks: int
    pace: DeliveryMeter = field(default_factory=DeliveryMeter)
    chunk_bytes: int = 0
    arrived_s: float = 0.0
    asked_s: float | None = None
    waited_s: float = 0.0

    @property
    def chunk_s(self) -> float | None:
        """Seconds for a chunk that we waited for; None while there was none."""
        return self.pace.seconds * self.chunk_bytes / self.pace.size_bytes if self.pace.size_bytes else None


class StragglerDetector:
    """Sources of chunks that are waited for together. All moments are of one clock, in seconds.

    A stream's first chunk counts in nothing: it depends on everybody's start, and has a deadline of its own."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}

    def begin(self, source: int, limit_s: float, chunks: int) -> None:
        """A stream; the others wait for it in all for ``limit_s``, and what a slow link may need beside."""
        self._sources[source] = _Source(limit_s, chunks)

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
            if source.waited_s > source.limit_s + self._slow_link_s(source, others):
                found.append(name)
        return found

    def _slow_link_s(self, source: _Source, others: Collection[int]) -> float:
        """What a link at the lowest rate that we bear with needs for all of the stream; without others, any time.

        The rate that it has shown is not asked for: a slow link may give others more than us, and us more later."""
        times_s = [chunk_s for other in others if (chunk_s := self._sources[other].chunk_s) is not None]
        return _SLOWEST * source.chunks * statistics.median_low(times_s) if times_s else math.inf


class StragglerGuard:
    """Over streams that are waited for together. ``behind``: the sources that are being waited for."""

    def __init__(self, context: ExchangeContext, behind: Callable[[], Collection[int]]) -> None:
        self._context = context
        self._behind = behind
        self._stragglers = StragglerDetector()
        self._scopes: dict[int, asyncio.Timeout] = {}

    async def run(self) -> None:
        """Until cancelled. What passes while the coordinator is away does not count, as in ``ExchangeContext``."""
        while True:
            since_s = _now_s()
            await asyncio.sleep(self._context.deadlines.heartbeat_s)
            behind = () if self._context.was_away(since_s) else self._behind()
            for source in self._stragglers.look(_now_s(), since_s, behind):
                if (scope := self._scopes.pop(source, None)) is not None:
                    scope.reschedule(_now_s())

    async def over(
        self,
        source: int,
        limit_s: float,
        chunks: int,
        hand_in: ChunkConsumer,
        stream: Callable[[ChunkConsumer], Awaitable[None]],
    ) -> None:
        """Run a stream of so many chunks to its end. Raises ``LinkError`` when it is cut off, else as the stream."""
        self._stragglers.begin(source, limit_s, chunks)
        scope, done, now_s = asyncio.timeout(None), False, asyncio.get_running_loop().time

        async def measured(chunk: int, data: memoryview) -> None:
            self._stragglers.arrived(source, data.nbytes, now_s())
            await hand_in(chunk, data)
            self._stragglers.asked(source, now_s())

        try:
            async with scope:
                self._scopes[source] = scope
                await stream(measured)
            done = True
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise LinkError(f"the others waited for its chunks for much more than {limit_s:.1f} s") from error
        finally:
            self._scopes.pop(source, None)
            if not done:
                self._stragglers.forget(source)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
