"""Scopes over real nodes on loopback: what is of one scope is nobody's in another one."""

import asyncio

import pytest
from tests.swarm.network import HOST, LONG_S, Member, swarm
from tests.swarm.test_transport import run

from shoal.swarm import control
from shoal.swarm.errors import WireError
from shoal.swarm.messages import Acknowledged, Message, PeerToPeerPing, PeerToPeerPong, RequestFailed


def dial(caller: Member, called: Member) -> control.Channel:
    return caller.node.control.dial(HOST, called.ports[0], called.keys.public)


# Messages -----------------------------------------------------------------------------------------------


@run
async def test_each_scope_has_its_own_handlers_on_one_channel() -> None:
    async with swarm() as (a, b):

        async def of_the_stage(channel: control.Channel, message: Message) -> Message:
            return Acknowledged()

        b.node.control.handle(PeerToPeerPing, of_the_stage, scope=3)
        channel = dial(a, b)
        await channel.request(PeerToPeerPing(), Acknowledged, LONG_S, scope=3)
        await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)
        await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S, scope=0)


@run
async def test_what_nobody_handles_in_a_scope_is_a_typed_error_for_the_caller() -> None:
    async with swarm() as (a, b):
        with pytest.raises(WireError, match=r"PeerToPeerPing is not for this side \(in scope 2\)"):
            await dial(a, b).request(PeerToPeerPing(), PeerToPeerPong, LONG_S, scope=2)
        await dial(a, b).request(PeerToPeerPing(), PeerToPeerPong, LONG_S)


@run
async def test_notices_go_to_their_scope() -> None:
    async with swarm() as (a, b):
        got: list[int] = []
        arrived = asyncio.Event()

        def handler_of(scope: int) -> control.Handler:
            async def handler(channel: control.Channel, message: Message) -> None:
                got.append(scope)
                if len(got) == 3:
                    arrived.set()

            return handler

        for scope in (0, 1, 2):
            b.node.control.handle(Acknowledged, handler_of(scope), scope)
        channel = dial(a, b)
        await channel.connected(LONG_S)
        for scope in (2, 0, 1):
            await channel.notify(Acknowledged(), scope)
        async with asyncio.timeout(LONG_S):
            await arrived.wait()
        assert got == [2, 0, 1]


@run
async def test_who_has_left_a_scope_hears_the_others_still() -> None:
    async with swarm() as (a, b):

        async def handler(channel: control.Channel, message: Message) -> Message:
            return RequestFailed(code="Busy", message="here")

        for scope in (1, 2):
            b.node.control.handle(Acknowledged, handler, scope)
        b.node.control.leave(1)
        channel = dial(a, b)
        with pytest.raises(WireError, match="scope 1"):
            await channel.request(Acknowledged(), Acknowledged, LONG_S, scope=1)
        with pytest.raises(Exception, match="here"):
            await channel.request(Acknowledged(), Acknowledged, LONG_S, scope=2)
