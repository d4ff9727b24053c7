"""A ``MemoryCoordinator`` behind a real node: real members, sockets and clock, and the machine that tests know."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

from tests.fakes.memory_coordinator import MemoryCoordinator

from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import MESSAGES
from shoal.swarm.protocol.types import Address, Message
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node

HOST = "127.0.0.1"


class _Caller:
    """The part of a member's channel that the coordinator uses."""

    def __init__(self, channel: Channel) -> None:
        self.own_keys = SimpleNamespace(public=channel.remote_key)
        self._channel = channel

    async def push(self, message: Message, scope: int) -> None:
        with suppress(LinkError):
            await self._channel.notify(message, scope)


@asynccontextmanager
async def serve(coordinator: MemoryCoordinator) -> AsyncIterator[Invite]:
    """Answer in all scopes that the coordinator has by now."""

    async def admit(key: bytes) -> bool:
        return True

    async with (
        Node.open(coordinator.keys, HOST, (0, None), admit) as node,
        asyncio.TaskGroup() as tasks,
    ):
        scopes = coordinator.scopes.values()
        node.control.guard.is_member = lambda key: any(one.machine.scope.membership.holder(key) for one in scopes)
        for scope, one in coordinator.scopes.items():

            async def answer(channel: Channel, message: Message, one: MemoryCoordinator = one) -> Message:
                return await one.answer(_Caller(channel), message)  # type: ignore[arg-type]

            for name, kind in MESSAGES.items():
                if name.startswith("PeerToCoordinator"):
                    node.control.handle(kind, answer, scope)
        running = [tasks.create_task(one.serve()) for one in coordinator.scopes.values()]
        try:
            run = coordinator.run
            yield Invite(
                (Address(host=HOST, control_port=node.control_port),), run.run.name, coordinator.keys.public, run.hash
            )
        finally:
            for task in running:
                task.cancel()
