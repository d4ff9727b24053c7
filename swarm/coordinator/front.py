"""Front of a host: the one port on which it serves its runs, each by a service of its own.

Callers name their run in every message, so a run has its own handlers and limits. All runs share the CURVE keys of the
port; each has its own identity, which signs that it speaks with them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.swarm.aio import in_thread
from shoal.swarm.coordinator.host_commands import resumed
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import DeadlineExceeded, ShoalError, UnknownRun
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.transport.node import Node


class CoordinatorFront:
    """The port with its runs; made with ``open``."""

    def __init__(self, node: Node, runs: tuple[str, ...]) -> None:
        self.node = node
        self._runs = dict.fromkeys(runs, "its host looks after it")
        self._services: dict[str, CoordinatorService] = {}
        node.control.guard.is_member = self._is_member
        node.control.without_handlers = self._why_not

    @classmethod
    @asynccontextmanager
    async def open(
        cls, keys: CurveKeys, address: tuple[str, int], runs: tuple[str, ...]
    ) -> AsyncIterator[CoordinatorFront]:
        """Listen on ``address`` until the context ends. ``runs``: the names of those that are served here, also while
        one of them is not running. Raises ``Unreachable``."""

        async def admit(key: bytes) -> bool:
            return True  # strangers may ask to join; every other handler looks the key up

        async with Node.open(keys, address[0], (address[1], None), admit) as node:
            yield cls(node, runs)

    @asynccontextmanager
    async def serving(
        self, run_toml: str, run: RunFile, identity: Identity, journal: Journal, epoch: int
    ) -> AsyncIterator[CoordinatorService]:
        """Serve a run until the context ends. ``epoch``: of the lease on ``journal``."""
        # In a worker thread, as a journal may be long: other runs go on meanwhile.
        machine, trail = await in_thread(resumed, run, identity, journal, time.monotonic(), epoch)
        service = CoordinatorService(run_toml, run, identity, self.node, journal, machine, trail)
        self._services[service.name] = service
        try:
            async with service.running():
                yield service
        finally:
            del self._services[service.name]

    def expect(self, run: str, why: str = "its host looks after it") -> None:
        """Have members of a run wait for it while it is not running here. ``why``: what they are told."""
        self._runs[run] = why

    def forget(self, run: str) -> None:
        """Say of a run from now on that it is not served here."""
        del self._runs[run]

    def _is_member(self, key: bytes) -> bool:
        return any(service.knows_key(key) for service in self._services.values())

    def _why_not(self, run: str) -> ShoalError | None:
        """Say why a run has no handler here: members of one that is away for a moment wait for it."""
        if run in self._services:
            return None
        if run in self._runs:
            return DeadlineExceeded(f"the run {run!r} is not running at the moment: {self._runs[run]}")
        names = f"run{'s' * (len(self._runs) > 1)} {', '.join(map(repr, self._runs))}"
        return UnknownRun(f"this coordinator hosts the {names}, not {run!r}: check the invite")
