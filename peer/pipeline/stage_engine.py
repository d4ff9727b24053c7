"""The engine of a pipeline's peer, told by two threads: the event loop tells it most, the training thread what it has
computed, as the next task must not wait for the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable

from shoal.peer.pipeline.tasks import Made
from shoal.swarm.pipeline.engine.effects import (
    Answer,
    Compute,
    ComputeBackward,
    ComputeForward,
    Effect,
    Note,
    Offer,
    Reply,
)
from shoal.swarm.pipeline.engine.stage import StageEngine

Do = Callable[[Iterable[Effect | Made]], None]


class SharedEngine:
    """``do``: has effects done, on the loop and in the engine's order, whoever told it; what was made comes before what
    follows from it. ``begin``: takes the computation that follows, on the training thread itself."""

    def __init__(self, engine: StageEngine, do: Do, begin: Callable[[Compute], None]) -> None:
        self._engine = engine
        self._do, self._begin = do, begin
        self._lock = threading.RLock()
        self._behind: deque[Effect | Made] = deque()
        """What the training thread has handed in, and what follows from it: the loop does it before anything newer."""
        self._is_behind = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    # On the loop ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Before anything is told."""
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """For ever: have done what follows from what was handed in."""
        while True:
            await self._is_behind.wait()
            self._is_behind.clear()
            with self._lock:
                self._catch_up()

    def wake(self) -> None:
        """Something was handed in."""
        self._is_behind.set()

    def tell(self, event: Callable[..., list[Effect]], *arguments: object) -> None:
        """One of the engine's events."""
        with self._lock:
            self._catch_up()
            self._do(event(*arguments, self._loop.time()))

    def offered(self, offer: Offer) -> Answer:
        with self._lock:
            self._catch_up()
            reply, *effects = self._engine.offered(offer, self._loop.time())
            assert isinstance(reply, Reply)
            self._do(effects)
        return reply.answer

    def noted(self, note: Note) -> None:
        self.tell(self._engine.noted, note)

    def _catch_up(self) -> None:
        while self._behind:
            self._do([self._behind.popleft()])

    # On the training thread -----------------------------------------------------------------------------------

    def hand_in(self, made: Made) -> None:
        """Something was computed. The loop has to be woken then (``wake``)."""
        with self._lock:
            self._behind.append(made)
            for effect in self._engine.computed(made.compute, self._loop.time()):
                if isinstance(effect, ComputeForward | ComputeBackward):
                    self._begin(effect)
                else:
                    self._behind.append(effect)
