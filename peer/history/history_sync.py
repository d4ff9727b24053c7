"""Synchronisation of a member's history with the run: verdicts as they come, and those that it missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.peer.history.history_file import HistoryFile, HistoryOrigin
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import FINAL_ERRORS, LinkError, StateFileError, StorageError, WireError
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorShowVerdict,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis

log = logging.getLogger(__name__)

T = TypeVar("T")

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
        self._other_history = f"{path}: the coordinator has another history of the run"

    async def run(self) -> None:
        """Synchronise for as long as the membership lasts. Errors of the disk or the network are warnings, and tried
        again."""
        while True:
            try:
                await self._sync_once()
            except FINAL_ERRORS:
                raise
            except (LinkError, StateFileError, StorageError) as error:
                log.warning("the history of the run cannot be updated now, and is tried again: %s", error)
                await asyncio.sleep(self._client.deadlines.patience_s)

    async def since(self, first: int) -> list[Verdict]:
        """The run's verdicts from round ``first`` on: from disk as far as they are there, the rest from the
        coordinator.

        Raises like ``fetch_verdicts``."""
        try:
            kept = list(await self._call(self._file.verdicts, first)) if self._file is not None else []
        except StorageError as error:
            log.warning("verdicts are fetched again, as the history here cannot be used: %s", error)
            kept = []
        rest = await fetch_verdicts(self._client, first + len(kept))
        follows = rest[0].previous_chain if rest else self._client.view.verdict_chain
        if kept and follows != kept[-1].chain:  # ours is another history than the run's, and will be set aside
            return await fetch_verdicts(self._client, first)
        return kept + rest

    async def _sync_once(self) -> None:
        """Wait for a verdict that the file does not end with, and take the step that it calls for."""
        client = self._client
        if self._file is None:
            origin = HistoryOrigin(run_toml=client.run_toml, coordinator=client.coordinator, scope=client.scope)
            self._file = await in_thread(HistoryFile, self._path, origin)
            client.hold_epoch(self._file.epoch)
        file = self._file
        start = genesis(client.run_file.hash, client.scope)
        view = await client.wait_for(lambda view: (view.verdict.chain if view.verdict else start) != file.chain.chain)
        newest = view.verdict
        if newest is None:
            await self._show(file)
        elif (newest.round, newest.previous_chain) == (file.chain.rounds, file.chain.chain):
            await self._call(file.append, (newest,))
        elif newest.round >= file.chain.rounds:
            await self._fetch_page(file)
        elif await self._call(file.verdicts, newest.round, newest.round + 1) == (newest,):
            await self._show(file)
        else:
            await self._call(file.set_aside, self._other_history)

    async def _fetch_page(self, file: HistoryFile) -> None:
        """Fetch one page of missed verdicts, then pause: a large swarm's pages hold up the event loop, which rounds
        need."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        ask = PeerToCoordinatorGetVerdicts(first=file.chain.rounds)
        page = await self._client.ask(ask, CoordinatorToPeerVerdicts)
        if page.verdicts and page.verdicts[0].previous_chain == file.chain.chain:
            await self._call(file.append, page.verdicts)
            await asyncio.sleep(min(_PAUSES * (loop.time() - started_s), self._client.deadlines.heartbeat_s))
        elif page.verdicts and file.chain.rounds:
            await self._call(file.set_aside, self._other_history)
        else:
            raise StateFileError("the coordinator's first page of verdicts does not start the run's chain")

    async def _show(self, file: HistoryFile) -> None:
        """Show our newest verdict to a coordinator that reports an earlier one, or none: its journal is an old copy.

        A member that has just started knows that only from its history; if all have just started, nobody else shows
        it."""
        client, before = self._client, self._client.view
        (newest,) = await self._call(file.verdicts, file.chain.rounds - 1)
        log.info("the coordinator does not know round %d, so its verdict is shown to it", newest.round)
        await client.ask(PeerToCoordinatorShowVerdict(verdict=newest), Acknowledged)
        await client.wait_for(lambda view: view.verdict_chain != before.verdict_chain, client.deadlines.patience_s)

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        """Call a method of the file in a worker thread, one at a time."""
        async with self._lock:
            return await in_thread(method, *args)


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
