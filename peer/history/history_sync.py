"""Synchronisation of a member's history with the run: verdicts as they come, and those that it missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from shoal.peer.history.history_file import HistoryFile, HistoryOrigin
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, RunEnded, StateFileError, StorageError, Superseded, WireError
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorShowVerdict,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis

log = logging.getLogger(__name__)

_PAUSES = 4
"""Pause after a page of verdicts, in multiples of the time that it took."""


class HistorySync:
    """Keeps a member's history file up to date; ``run`` it in a task group.

    Nothing waits for it: the run goes on without a history, too."""

    def __init__(self, client: CoordinatorClient, path: Path) -> None:
        self._client = client
        self._path = path
        self._file: HistoryFile | None = None
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Synchronise for as long as the membership lasts. Errors of the disk or the network are warnings, and tried
        again."""
        while True:
            try:
                await self._keep()
            except (Superseded, RunEnded):
                raise
            except (LinkError, StateFileError, StorageError) as error:
                log.warning("the history of the run cannot be updated now, and is tried again: %s", error)
                await asyncio.sleep(self._client.deadlines.patience_s)

    async def since(self, first: int) -> list[Verdict]:
        """The run's verdicts from round ``first`` on: from disk as far as they are there, the rest from the
        coordinator.

        Raises like ``fetch_verdicts``."""
        try:
            kept = list(await self._from_disk(first)) if self._file is not None else []
        except StorageError as error:
            log.warning("verdicts are fetched again, as the history here cannot be used: %s", error)
            kept = []
        rest = await fetch_verdicts(self._client, first + len(kept))
        follows = rest[0].previous_chain if rest else self._client.view.verdict_chain
        if kept and follows != kept[-1].chain:  # ours is another history than the run's, and will be set aside
            return await fetch_verdicts(self._client, first)
        return kept + rest

    async def _keep(self) -> None:
        client = self._client
        if self._file is None:
            origin = HistoryOrigin(run_toml=client.run_toml, coordinator=client.coordinator, scope=client.scope)
            self._file = await in_thread(HistoryFile, self._path, origin)
        file = self._file
        start = genesis(client.run_file.hash, client.scope)
        view = await client.wait_for(lambda view: (view.verdict.chain if view.verdict else start) != file.chain.chain)
        newest = view.verdict
        if newest is None:
            await self._show()
        elif (newest.round, newest.previous_chain) == (file.chain.rounds, file.chain.chain):
            await self._append((newest,))
        elif newest.round >= file.chain.rounds:
            await self._fetch()
        elif await self._from_disk(newest.round, newest.round + 1) == (newest,):
            await self._show()
        else:
            await self._set_aside()

    async def _fetch(self) -> None:
        """Fetch one page of missed verdicts, then pause: a large swarm's pages hold up the event loop, which rounds
        need."""
        file, loop = self._file, asyncio.get_running_loop()
        assert file is not None
        started_s = loop.time()
        ask = PeerToCoordinatorGetVerdicts(first=file.chain.rounds)
        page = await self._client.ask(ask, CoordinatorToPeerVerdicts)
        if page.verdicts and page.verdicts[0].previous_chain == file.chain.chain:
            await self._append(page.verdicts)
            await asyncio.sleep(min(_PAUSES * (loop.time() - started_s), self._client.deadlines.heartbeat_s))
        elif page.verdicts and file.chain.rounds:
            await self._set_aside()
        else:
            raise StateFileError("the coordinator's first page of verdicts does not start the run's chain")

    async def _show(self) -> None:
        """Show our newest verdict to a coordinator that reports an earlier one, or none: its journal is an old copy.

        A coordinator that has just started can tell that only from what members show, and a member that has just
        started knows it only from its history."""
        assert self._file is not None
        client, before = self._client, self._client.view
        (newest,) = await self._from_disk(self._file.chain.rounds - 1)
        log.info("the coordinator does not know round %d, so its verdict is shown to it", newest.round)
        await client.ask(PeerToCoordinatorShowVerdict(verdict=newest), Acknowledged)
        await client.wait_for(lambda view: view.verdict_chain != before.verdict_chain, client.deadlines.patience_s)

    async def _from_disk(self, first: int, stop: int | None = None) -> tuple[Verdict, ...]:
        assert self._file is not None
        async with self._lock:
            return await in_thread(self._file.verdicts, first, stop)

    async def _set_aside(self) -> None:
        assert self._file is not None
        async with self._lock:
            await in_thread(self._file.set_aside, f"{self._path}: the coordinator has another history of the run")

    async def _append(self, verdicts: tuple[Verdict, ...]) -> None:
        assert self._file is not None
        async with self._lock:
            await in_thread(self._file.append, verdicts)


async def fetch_verdicts(client: CoordinatorClient, first: int) -> list[Verdict]:
    """Fetch the run's verdicts from round ``first`` on from the coordinator; signatures are checked.

    Waits while the coordinator is away. Raises ``LinkError`` when it answers with something else."""
    found: list[Verdict] = []
    more = True
    while more:
        ask = PeerToCoordinatorGetVerdicts(first=first + len(found))
        page = await client.ask(ask, CoordinatorToPeerVerdicts)
        await in_thread(_check, page.verdicts, first + len(found), client.coordinator_key)
        found += page.verdicts
        more = page.more and bool(page.verdicts)
    return found


def _check(verdicts: Sequence[Verdict], first: int, coordinator_key: bytes) -> None:
    for number, verdict in enumerate(verdicts, first):
        if verdict.round != number:
            raise WireError(f"a verdict of round {verdict.round} came where that of round {number} was requested")
        check_verdict(verdict, coordinator_key)
