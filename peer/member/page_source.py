"""The page and the metrics of a peer: the run as its coordinator tells it, and the peer as its own process knows it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from shoal.peer.checkpoints.manifest import MANIFEST
from shoal.peer.checkpoints.store import StoredCheckpoint
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.peer_metrics import PeerFacts, peer_readings, share_in
from shoal.peer.terminal.snapshot import Watched
from shoal.swarm.aio import in_thread
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    CoordinatorToPeerTimings,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetTimings,
    PeerToCoordinatorGetVerdicts,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.web.metrics import Reading


class JoinedPage:
    """The page of a run that this process takes part in. In a pipeline its rounds are those of the last stage, which
    have the loss."""

    def __init__(self, connection: RunConnection, peer: Watched) -> None:
        self._connection, self._watched = connection, peer
        self._client = connection.members.run.client
        self.own_peer = connection.peer
        self._share: float | None = None

    def run_file(self) -> RunFile:
        return self._client.run_now

    async def status(self) -> CoordinatorToPeerStatus:
        return await self._client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        pipeline = self._client.view.pipeline
        stage = len(pipeline.boundaries) - 2 if pipeline is not None else None
        ask = PeerToCoordinatorGetVerdicts(first=first, stage=stage)
        page = await self._client.ask(ask, CoordinatorToPeerVerdicts)
        return page.verdicts[:limit]

    async def timings(self, first: int) -> Sequence[RoundTiming]:
        answer = await self._client.ask(PeerToCoordinatorGetTimings(first=first), CoordinatorToPeerTimings)
        return answer.rounds

    async def readings(self) -> Sequence[Reading]:
        """Without asking the coordinator."""
        members, kept = self._connection.members, self._connection.checkpoints()
        first = next(iter(members.stages.values()), members.run)
        share = share_in(first.client.view.verdict, self.own_peer)
        self._share = self._share if share is None else share
        written_s, free_bytes = await in_thread(_look_at_disk, kept[0] if kept else None, self._connection.folder)
        facts = PeerFacts(
            link_bps=members.run.node.bandwidth_bps,
            paths=members.run.node.path_reports(),
            phases=first.clock.times().training,
            share=self._share,
            checkpoints=len(kept),
            checkpoint=(kept[0].round, written_s) if kept and written_s is not None else None,
            allocated_bytes=_allocated_bytes(torch.device(self._connection.device)),
            free_bytes=free_bytes,
            use=members.run.use,
        )
        return peer_readings(self._watched.snapshot(), facts)


def _look_at_disk(newest: StoredCheckpoint | None, folder: Path) -> tuple[float | None, int | None]:
    """Time of the newest checkpoint, and the free bytes where the peer's files are, as far as can be seen."""
    written_s = free_bytes = None
    if newest is not None:
        with suppress(OSError):
            written_s = (newest.folder / MANIFEST).stat().st_mtime
    with suppress(OSError):
        there = next(one for one in (folder, *folder.parents) if one.exists())
        free_bytes = shutil.disk_usage(there).free
    return written_s, free_bytes


def _allocated_bytes(device: torch.device) -> int | None:
    """Memory of tensors on a GPU with a memory of its own."""
    if device.type not in ("cuda", "xpu"):
        return None
    return int(torch.get_device_module(device).memory_allocated(device))


def network_loop(connection: RunConnection) -> asyncio.AbstractEventLoop:
    """The loop of the peer's network thread."""

    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    return connection.network.call(running())
