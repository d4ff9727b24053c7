"""The page of a peer: the run as its coordinator tells it, for the person whose machine takes part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.peer.member.connection import RunConnection
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile


class JoinedPage:
    """The page of a run that this process takes part in. In a pipeline its rounds are those of the first stage, which
    have no loss."""

    def __init__(self, connection: RunConnection) -> None:
        self._client = connection.members.run.client
        self.own_peer = connection.peer

    def run_file(self) -> RunFile:
        return self._client.run_now

    async def status(self) -> CoordinatorToPeerStatus:
        return await self._client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        page = await self._client.ask(PeerToCoordinatorGetVerdicts(first=first), CoordinatorToPeerVerdicts)
        return page.verdicts[:limit]


def network_loop(connection: RunConnection) -> asyncio.AbstractEventLoop:
    """The loop of the peer's network thread."""

    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    return connection.network.call(running())
