"""Cuts off the streams of stragglers: those of an owner's contributors, or of everybody's results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from shoal.swarm.averaging.seat import HandIn, Seat
from shoal.swarm.averaging.stragglers import Stragglers
from shoal.swarm.errors import LinkError


class Watch:
    """Over streams that are waited for together. ``behind``: the sources that are being waited for."""

    def __init__(self, seat: Seat, behind: Callable[[], Collection[int]]) -> None:
        self._seat = seat
        self._behind = behind
        self._stragglers = Stragglers()
        self._scopes: dict[int, asyncio.Timeout] = {}

    async def run(self) -> None:
        """Until cancelled. What passes while the coordinator is away does not count, as in ``Seat``."""
        while True:
            since_s = _now_s()
            await asyncio.sleep(self._seat.deadlines.heartbeat_s)
            behind = () if self._seat.was_away(since_s) else self._behind()
            for source in self._stragglers.look(_now_s(), since_s, behind):
                if (scope := self._scopes.pop(source, None)) is not None:
                    scope.reschedule(_now_s())

    async def over(
        self,
        source: int,
        limit_s: float,
        chunks: int,
        hand_in: HandIn,
        stream: Callable[[HandIn], Awaitable[None]],
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
