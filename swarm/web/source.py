"""Source of what a page shows: a run that this process hosts, or one that it only follows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from shoal.swarm.aio import in_thread
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile


class PageSource(Protocol):
    """A run to look at. Its coroutines run in the loop of the run's network, not in that of the page."""

    own_peer: str
    """Id of the peer whose page this is; empty on a host's."""

    def run_file(self) -> RunFile:
        """The run file with the amendments that are in force. Thread-safe."""
        ...

    async def status(self) -> CoordinatorToPeerStatus:
        """Raises ``ShoalError`` while that cannot be known."""
        ...

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        """At most ``limit`` verdicts from round ``first`` on, oldest first. Raises ``ShoalError``."""
        ...


class HostedPage:
    """The page of a run that this process hosts."""

    own_peer = ""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def run_file(self) -> RunFile:
        return self._service.scope.run

    async def status(self) -> CoordinatorToPeerStatus:
        async with self._service.lock:  # what is not in the journal yet, nobody is told
            return self._service.handlers[0].status(time.monotonic())

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        scope = len(self._service.handlers) - 1 or None  # of a pipeline the last stage, whose rounds have the loss
        read = await in_thread(self._service.journal.verdicts, first, limit, scope)
        return [event.verdict for event in read]
