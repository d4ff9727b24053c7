"""Observer: reads a run without training: its run file before a join, its status, its members for exports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from shoal.swarm.aio import task_scope
from shoal.swarm.client.coordinator_client import (
    CoordinatorClient,
    CoordinatorConnector,
    MemberInfo,
    PublishedRun,
    fetch_run,
)
from shoal.swarm.client.relay_access import RelayAccess
from shoal.swarm.errors import FINAL_ERRORS, DeadlineExceeded, LinkError
from shoal.swarm.protocol.evaluations import check_evaluations
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorHeartbeat,
)
from shoal.swarm.protocol.types import DeviceInfo
from shoal.swarm.transport.node import Node

_NOBODY = DeviceInfo(kind="none", name="observer", memory_bytes=0)


@asynccontextmanager
async def observe(invite: Invite) -> AsyncIterator[CoordinatorClient]:
    """Join as an observer under a temporary identity, and leave at the end. Raises the errors of a join.

    Observers are on the roster, so that members serve them, but they are neither journaled nor counted."""
    keys, identity = CurveKeys.fresh(), Identity.generate()
    me = MemberInfo("observer", "observer", _NOBODY, ports=(1, 1))
    async with stranger(keys) as node:
        client = CoordinatorClient(node, identity, keys, invite, me)
        await client.join()
        node.relays.credentials = RelayAccess(client).credentials
        async with task_scope() as tasks:
            beats = tasks.create_task(keep_place(client))
            try:
                yield client
            finally:
                beats.cancel()
                await client.leave("observed")


@asynccontextmanager
async def stranger(keys: CurveKeys) -> AsyncIterator[Node]:
    """A node that only connects to others and admits no caller."""

    async def admit(key: bytes) -> bool:
        return False

    async with Node.open(keys, "127.0.0.1", (0, None), admit) as node:
        yield node


async def look_up_run(invite: Invite) -> PublishedRun:
    """Fetch the run file of an invite without joining. Raises the errors of ``fetch_run``."""
    async with stranger(CurveKeys.fresh()) as node:
        return await fetch_run(CoordinatorConnector(node.control, node.relays, invite), invite)


@asynccontextmanager
async def observe_stages(client: CoordinatorClient, stages: int) -> AsyncIterator[tuple[CoordinatorClient, ...]]:
    """Observe each stage of a pipeline, with a client for each. Raises the errors of a join."""
    clients = [client.in_scope(stage + 1) for stage in range(stages)]
    for one in clients:
        await one.join()
    async with task_scope() as tasks:
        beats = [tasks.create_task(keep_place(one)) for one in clients]
        try:
            yield tuple(clients)
        finally:
            for beat in beats:
                beat.cancel()
            for one in clients:
                await one.leave("observed")


async def keep_place(client: CoordinatorClient) -> None:
    """Send empty heartbeats, as fetching a large model takes longer than the run's patience."""
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
    """Fetch the run's status once. Raises the errors of a join, and ``WireError`` for a held-out figure that nobody has
    signed."""
    async with observe(invite) as client:
        return await _ask_status(client)


async def _ask_status(client: CoordinatorClient) -> CoordinatorToPeerStatus:
    status = await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
    check_evaluations(status.evaluation, client.run_file.hash)
    return status


_LOAD = 20.0
"""An answer's time, so many times over, passes before the next one is asked for: a big run is looked at less often."""


def pause_s(every_s: float, took_s: float) -> float:
    """Time until the status is asked for again, after an answer that took ``took_s``."""
    return max(every_s, _LOAD * took_s)


async def follow_status(
    invite: Invite, every_s: float, take: Callable[[CoordinatorToPeerStatus | LinkError], None]
) -> None:
    """Call ``take`` with the run's status again and again, and with the error while the coordinator is away.

    One membership as an observer serves all looks. Raises the errors that waiting does not mend, and those of
    ``take``."""
    clock = asyncio.get_running_loop().time
    while True:
        try:
            async with observe(invite) as client:
                while True:
                    asked_s = clock()
                    limit_s = client.deadlines.request_s
                    try:
                        async with asyncio.timeout(limit_s):  # it would ask for as long as the coordinator is away
                            found = await _ask_status(client)
                    except TimeoutError:
                        take(DeadlineExceeded(f"no answer within {limit_s:.0f} s"))
                        continue
                    take(found)
                    await asyncio.sleep(pause_s(every_s, clock() - asked_s))
        except FINAL_ERRORS:
            raise
        except LinkError as error:
            take(error)
            await asyncio.sleep(every_s)
