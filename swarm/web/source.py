"""Source of what a page shows: a run that this process hosts, or one that it only follows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shoal.swarm.aio import in_thread
from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.web.metrics import Reading
from shoal.swarm.web.run_metrics import CommittedRoundFacts, HostFacts, run_readings

_LOOKS_BACK = 64
"""Aborted rounds, at most, behind which the newest committed one is looked for."""


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

    async def readings(self) -> Sequence[Reading]:
        """What a scrape of this moment says of the run. Raises ``ShoalError``."""
        ...

    async def timings(self, first: int) -> Sequence[RoundTiming]:
        """Where the time of rounds from ``first`` on went, as far as that is remembered. Raises ``ShoalError``."""
        ...


class HostedPage:
    """The page of a run that this process hosts. ``folders``: those whose disks are watched, by what they hold."""

    own_peer = ""

    def __init__(self, service: CoordinatorService, folders: Mapping[str, Path]) -> None:
        self._service = service
        self._folders = folders
        self._newest: tuple[int, CommittedRoundFacts | None] = (-1, None)
        """The newest committed round, as found in the round of that number."""

    def run_file(self) -> RunFile:
        return self._service.scope.run

    async def status(self) -> CoordinatorToPeerStatus:
        async with self._service.lock:  # what is not in the journal yet, nobody is told
            return self._service.handlers[0].status(time.monotonic())

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        return [event.verdict for event in await self._read(first, limit)]

    async def _read(self, first: int, limit: int) -> list[VerdictGiven]:
        scope = len(self._service.handlers) - 1 or None  # of a pipeline the last stage, whose rounds have the loss
        return await in_thread(self._service.journal.verdicts, first, limit, scope)

    async def timings(self, first: int) -> Sequence[RoundTiming]:
        async with self._service.lock:
            return self._service.scope.timings.since(first)

    async def readings(self) -> Sequence[Reading]:
        service, free_bytes = self._service, await in_thread(_free_bytes, self._folders)
        async with service.lock:
            status = service.handlers[0].status(time.monotonic())
            scopes = service.run.scopes if isinstance(service.run, PipelineRun) else [service.run.scope]
            facts = HostFacts(
                tokens_undone=scopes[0].tokens_undone if scopes else 0,
                is_disputed=any(scope.is_disputed for scope in scopes),
                banned=len(service.scope.admission.access_list.bans),
                refused=dict(service.scope.admission.refused),
                journal_writes=service.journal_writes,
                journal_write_s=service.journal_write_s,
                backup_behind_s=service.journal.backup_behind_s,
                free_bytes=free_bytes,
            )
            run = service.scope.run
        return run_readings(run, status, replace(facts, newest=await self._newest_committed(status.round)))

    async def _newest_committed(self, open_round: int) -> CommittedRoundFacts | None:
        """Look for it backwards, once a round."""
        known_in, known = self._newest
        if known_in == open_round:
            return known
        last = open_round - 1
        for number in range(last, max(known_in - 1, last - _LOOKS_BACK, -1), -1):
            *before, event = await self._read(max(0, number - 1), 1 if number == 0 else 2)
            if event.verdict.committed:
                known = CommittedRoundFacts.of(event, before[0] if before else None)
                break
        self._newest = open_round, known
        return known


def _free_bytes(folders: Mapping[str, Path]) -> dict[str, int]:
    """Free space on the disk of each folder; without those that cannot be looked at."""
    found: dict[str, int] = {}
    for files, folder in folders.items():
        with suppress(OSError):
            found[files] = shutil.disk_usage(folder).free
    return found
