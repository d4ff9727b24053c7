"""A guest of a run: holds the invite, trains nothing; for `shoal status` and `shoal export`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.swarm.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.identity import CurveKeys, Identity
from shoal.swarm.invite import Invite
from shoal.swarm.messages import (
    CoordinatorToPeerStatus,
    DeviceInfo,
    PeerToCoordinatorGetStatus,
)
from shoal.swarm.transport import Node

_NOBODY = DeviceInfo(kind="none", name="observer", memory_bytes=0)


@asynccontextmanager
async def observe(invite: Invite) -> AsyncIterator[CoordinatorClient]:
    """Join as an observer under a throw-away identity; leaves at the end. Raises the errors of a join.

    Observers are on the roster, so members serve them, and are forgotten after the run's patience.
    """
    keys, identity = CurveKeys.fresh(), Identity.generate()
    me = MemberInfo("observer", "observer", _NOBODY, ports=(1, 1))

    async def admit(key: bytes) -> bool:
        return False  # nobody has reason to call an observer

    async with Node.open(keys, "127.0.0.1", (0, None), admit) as node:
        client = CoordinatorClient(node, identity, keys, invite, me)
        await client.join()
        try:
            yield client
        finally:
            await client.leave("observed")


async def get_status(invite: Invite) -> CoordinatorToPeerStatus:
    """One look at the run. Raises the errors of a join."""
    async with observe(invite) as client:
        return await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
