"""Keeps a member's history complete, beside everything else: what it hears, and from the coordinator what it missed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from shoal.peer.history import Origin
from shoal.peer.history_file import HistoryFile
from shoal.swarm.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, RunEnded, StateFileError, StorageError, Superseded
from shoal.swarm.links import in_thread
from shoal.swarm.messages import CoordinatorToPeerVerdicts, PeerToCoordinatorGetVerdicts, Verdict

log = logging.getLogger(__name__)

_PAUSES = 4
"""Times as long as fetching a page took."""


class HistoryKeeper:
    """``run`` it in a task group. Nothing waits for it: the run goes on without a history, too."""

    def __init__(self, client: CoordinatorClient, path: Path) -> None:
        self._client = client
        self._path = path
        self._file: HistoryFile | None = None
        self._lock = asyncio.Lock()
        self._has_grown = asyncio.Event()

    async def run(self) -> None:
        """For as long as the membership lasts. A disk that refuses is a warning, and tried again."""
        while True:
            try:
                await self._keep()
            except (Superseded, RunEnded):
                raise
            except (LinkError, StateFileError, StorageError) as error:
                log.warning("the history of the run has to wait: %s", error)
                await asyncio.sleep(self._client.deadlines.patience_s)

    async def up_to(self, round_number: int, timeout_s: float) -> tuple[Verdict, ...]:
        """The verdicts of all rounds up to and with this one; none when they are not there in time.

        Raises ``StorageError``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._file is None or self._file.chain.rounds <= round_number:
                    self._has_grown.clear()
                    await self._has_grown.wait()
        except TimeoutError:
            return ()
        async with self._lock:
            return await in_thread(self._file.verdicts, 0, round_number + 1)

    async def _keep(self) -> None:
        client = self._client
        if self._file is None:
            origin = Origin(run_toml=client.run_toml, coordinator=client.coordinator)
            self._file = await in_thread(HistoryFile, self._path, origin)
            self._has_grown.set()
        file = self._file
        await client.wait_for(lambda view: view.verdict is not None and view.verdict.chain != file.chain.chain)
        newest = client.view.verdict
        assert newest is not None
        if (newest.round, newest.previous_chain) == (file.chain.rounds, file.chain.chain):
            await self._append((newest,))
        elif newest.round >= file.chain.rounds:
            await self._fetch()
        else:
            await self._compare(newest)

    async def _fetch(self) -> None:
        """One page of what we missed, then a pause: those of a large swarm hold up the loop, which rounds need."""
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
            raise StateFileError("the coordinator's history does not go on from its own beginning")

    async def _compare(self, newest: Verdict) -> None:
        """The coordinator's newest verdict is older than ours: it goes on from an old copy of its files, or is
        another one's."""
        assert self._file is not None
        async with self._lock:
            ours = await in_thread(self._file.verdicts, newest.round, newest.round + 1)
        if ours == (newest,):
            log.warning("the coordinator has lost the rounds after %d, which are in the history here", newest.round)
            await asyncio.sleep(self._client.deadlines.patience_s)
        else:
            await self._set_aside()

    async def _set_aside(self) -> None:
        assert self._file is not None
        async with self._lock:
            await in_thread(self._file.set_aside, f"{self._path}: the coordinator has another history of the run")

    async def _append(self, verdicts: tuple[Verdict, ...]) -> None:
        assert self._file is not None
        async with self._lock:
            await in_thread(self._file.append, verdicts)
        self._has_grown.set()
