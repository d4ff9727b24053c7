"""A guest of a run: holds the invite, trains nothing; for `shoal status` and `shoal export`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shoal.swarm.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import CurveKeys, Identity
from shoal.swarm.invite import Invite
from shoal.swarm.messages import (
    CoordinatorToPeerStatus,
    DeviceInfo,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorHeartbeat,
)
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport import Node

_NOBODY = DeviceInfo(kind="none", name="observer", memory_bytes=0)


@asynccontextmanager
async def observe(invite: Invite) -> AsyncIterator[CoordinatorClient]:
    """Join as an observer under a throw-away identity; leaves at the end. Raises the errors of a join.

    Observers are on the roster, so members serve them; nobody journals or counts them.
    """
    keys, identity = CurveKeys.fresh(), Identity.generate()
    me = MemberInfo("observer", "observer", _NOBODY, ports=(1, 1))

    async def admit(key: bytes) -> bool:
        return False  # nobody has reason to call an observer

    async with Node.open(keys, "127.0.0.1", (0, None), admit) as node:
        client = CoordinatorClient(node, identity, keys, invite, me)
        await client.join()
        async with task_scope() as tasks:
            beats = tasks.create_task(_stay(client))
            try:
                yield client
            finally:
                beats.cancel()
                await client.leave("observed")


@asynccontextmanager
async def observe_stages(client: CoordinatorClient, stages: int) -> AsyncIterator[tuple[CoordinatorClient, ...]]:
    """The same in each stage of a pipeline, for a guest of the run: a client for each. Raises the errors of a join."""
    clients = [client.in_scope(stage + 1) for stage in range(stages)]
    for one in clients:
        await one.join()
    async with task_scope() as tasks:
        beats = [tasks.create_task(_stay(one)) for one in clients]
        try:
            yield tuple(clients)
        finally:
            for beat in beats:
                beat.cancel()
            for one in clients:
                await one.leave("observed")


async def _stay(client: CoordinatorClient) -> None:
    """Heartbeats with nothing in them: fetching a large model takes longer than the run's patience."""
    nothing = PeerToCoordinatorHeartbeat(
        round=0,
        activity="observing",
        anchor_version=None,
        state_digest=None,
        tokens_done=0,
        tokens_per_s=0.0,
        step_s=0.0,
        loss=None,
        chunks_moved=0,
        bytes_sent=0,
        bytes_received=0,
        bandwidth_bps=0.0,
        roster_version=0,
    )
    while True:
        await asyncio.sleep(client.deadlines.heartbeat_s)
        with suppress(LinkError):
            await client.heartbeat(nothing)


async def get_status(invite: Invite) -> CoordinatorToPeerStatus:
    """One look at the run. Raises the errors of a join."""
    async with observe(invite) as client:
        return await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
