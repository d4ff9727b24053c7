"""Scopes over real nodes on loopback: what is of one scope is nobody's in another one."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Literal

import pytest
from tests.swarm.network import HOST, LONG_S, STATE, Member, Sink, Source, fetch, swarm
from tests.swarm.transport.test_node import run

from shoal.swarm.errors import BlobUnavailable, Busy, LinkError, MemberGone, WireError
from shoal.swarm.protocol.messages import Acknowledged, PeerToPeerPing, PeerToPeerPong, RequestFailed
from shoal.swarm.protocol.types import Blob, Message
from shoal.swarm.transport import control
from shoal.swarm.transport.bulk.data_connection import PREFIX_BYTES, DataConnection
from shoal.swarm.transport.bulk.frame_crypto import HEADER_BYTES, TAG_BYTES
from shoal.swarm.transport.bulk.link import Frame, Link
from shoal.swarm.transport.node import ScopedEndpoint


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
        with pytest.raises(Busy, match="here"):
            await channel.request(Acknowledged(), Acknowledged, LONG_S, scope=2)


@run
async def test_a_member_is_asked_by_its_name_in_a_scope() -> None:
    async with swarm() as (a, b):

        async def handler(channel: control.Channel, message: Message) -> Message:
            return RequestFailed(code="Busy", message=b.node.peer_with(channel.remote_key) or "a stranger")

        b.node.control.handle(PeerToPeerPing, handler, 2)
        with pytest.raises(Busy, match=a.peer):
            await a.node.ask(b.peer, PeerToPeerPing(), PeerToPeerPong, LONG_S, scope=2)
        await a.node.ask(b.peer, PeerToPeerPing(), PeerToPeerPong, LONG_S)
        with pytest.raises(MemberGone):
            await a.node.ask("nobody", PeerToPeerPing(), PeerToPeerPong, LONG_S)


# Members ------------------------------------------------------------------------------------------------


class Strict(Member):
    """Admits whom its node knows."""

    async def admit(self, key: bytes) -> bool:
        return self.node.knows_key(key)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()


@run
async def test_who_is_on_a_stages_roster_only_is_admitted_and_served_until_that_stage_is_left() -> None:
    a, b = Strict(), Strict()
    async with a.running(), b.running():
        b.node.update_roster((a.entry(),), scope=3)
        a.node.update_roster((b.entry(),), scope=3)

        source, sink = Source(3), Sink()
        b.node.publish(of_scope(3), source)
        assert await fetch(a, b, sink, range(3), blob=of_scope(3)) == [0, 1, 2]
        assert sink.holds(source, range(3))
        assert b.node.trainers() == []
        assert b.node.trainers(3) == [a.peer]
        b.node.leave(3)
        assert not b.node.knows_key(a.keys.public)
        with pytest.raises(LinkError):
            await fetch(a, b, Sink(), range(3), progress_s=0.5, blob=STATE)


@run
async def test_whoever_one_scope_drops_stays_connected_as_long_as_another_knows_it() -> None:
    async with swarm() as (a, b):
        b.node.update_roster((a.entry(), b.entry()), scope=1)
        b.node.publish(STATE, Source(2))
        await fetch(a, b, Sink(), range(2))
        b.node.update_roster((b.entry(),))
        assert b.node._data._links
        await fetch(a, b, Sink(), range(2))
        b.node.update_roster((b.entry(),), scope=1)
        assert not b.node._data._links
        assert b.node.control.incoming(a.keys.public) is None


# Blobs --------------------------------------------------------------------------------------------------


def of_scope(scope: int) -> Blob:
    return STATE.model_copy(update={"scope": scope})


async def lacks(a: Member, b: Member, blob: Blob) -> None:
    with pytest.raises(BlobUnavailable):  # noqa: PT012
        async with aclosing(a.node._attempt(b.peer, blob, range(2), Sink(), LONG_S)) as attempt:
            async for _ in attempt:
                pytest.fail("it is not there")


@run
async def test_blobs_of_the_same_kind_and_number_do_not_mix() -> None:
    async with swarm() as (a, b):
        sources = {scope: Source(12, 1000 + 8 * scope) for scope in (0, 1, 2)}
        for scope, source in sources.items():
            ScopedEndpoint(b.node, scope).publish(STATE, source)
        sinks = {scope: Sink() for scope in sources}

        async def all_of(scope: int) -> None:
            endpoint = ScopedEndpoint(a.node, scope)
            assert [one async for one in endpoint.fetch(b.peer, STATE, range(12), sinks[scope], LONG_S)] == [*range(12)]

        async with asyncio.TaskGroup() as tasks:
            for scope in sources:
                tasks.create_task(all_of(scope))
        for scope, source in sources.items():
            assert sinks[scope].holds(source, range(12))
            assert sinks[scope].chunks[0] != sinks[(scope + 1) % 3].chunks[0]
        assert a.node._data._links.keys() == b.node._data._links.keys()
        assert len(a.node._data._links) == 1, "all over one link"
        for scope in sources:
            frames = 12 * (1000 + 8 * scope + PREFIX_BYTES + TAG_BYTES)
            assert a.node.meter.received_by_scope[scope] == b.node.meter.sent_by_scope[scope] == frames
        assert a.node.meter.totals(1) == (0, a.node.meter.received_by_scope[1])
        assert a.node.meter.totals(0) == (0, sum(a.node.meter.received_by_scope.values()))


@run
async def test_retracting_in_one_scope_leaves_the_others() -> None:
    async with swarm() as (a, b):
        for scope in (0, 1):
            ScopedEndpoint(b.node, scope).publish(STATE, Source(2))
        ScopedEndpoint(b.node, 1).retract(STATE)
        await lacks(a, b, of_scope(1))
        await fetch(a, b, Sink(), range(2))


@run
async def test_leaving_a_scope_retracts_its_blobs_and_no_others() -> None:
    async with swarm() as (a, b):
        for scope in (0, 1, 2):
            ScopedEndpoint(b.node, scope).publish(STATE, Source(2))
        b.node.leave(1)
        await lacks(a, b, of_scope(1))
        await fetch(a, b, Sink(), range(2), blob=of_scope(2))
        await fetch(a, b, Sink(), range(2))


@run
async def test_a_frame_of_another_scope_does_not_reach_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        b.node.publish(of_scope(2), Source(3))
        send = b.node._data._io_thread.send

        def mixed_up(link: Link, frame: Frame, *, urgent: bool) -> None:
            send(link, frame._replace(scope=1))

        monkeypatch.setattr(b.node._data._io_thread, "send", mixed_up)
        sink = Sink()
        with pytest.raises(LinkError):
            await fetch(a, b, sink, range(3), progress_s=0.5, blob=of_scope(2))
        assert not sink.chunks


@run
async def test_the_scope_of_a_frame_cannot_be_changed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        b.node.publish(of_scope(2), Source(3))
        put = DataConnection.seal
        at = PREFIX_BYTES - HEADER_BYTES + 16

        def relabelled(self: DataConnection, link: Link, frame: Frame) -> int:
            size = put(self, link, frame._replace(scope=1 if frame.scope else 0))
            if frame.scope:  # as if it had been sealed for the scope that the other side waits for
                self._unsent[at : at + 2] = frame.scope.to_bytes(2, "big")
            return size

        monkeypatch.setattr(DataConnection, "seal", relabelled)
        with pytest.raises(LinkError):
            await fetch(a, b, Sink(), range(3), progress_s=0.5, blob=of_scope(2))


# The uplink ---------------------------------------------------------------------------------------------


@run
async def test_rounds_of_several_scopes_share_the_uplink() -> None:
    async with swarm(3) as (a, b, c):
        for scope in (1, 2):
            a.node.update_roster((a.entry(), b.entry(), c.entry()), scope)
        told: list[Mapping[bytes, float]] = []
        a.node._data.share_uplink = told.append  # type: ignore[method-assign]
        one, other = (ScopedEndpoint(a.node, scope) for scope in (1, 2))
        one.share_uplink({b.peer: 0.75, c.peer: 0.25})
        other.share_uplink({b.peer: 1.0, "nobody": 1.0})
        one.share_uplink({})
        a.node.leave(2)
        b_key, c_key = b.keys.public, c.keys.public
        assert told == [{b_key: 0.75, c_key: 0.25}, {b_key: 0.875, c_key: 0.125}, {b_key: 1.0}, {}]


@run
async def test_one_stage_after_another_needs_no_new_connections() -> None:
    async with swarm() as (a, b):
        for scope in (1, 2, 1):
            for member, other in ((a, b), (b, a)):
                member.node.update_roster((member.entry(), other.entry()), scope)
                ScopedEndpoint(member.node, scope).publish(STATE, Source(2))
            await fetch(a, b, Sink(), range(2), blob=of_scope(scope))
            await fetch(b, a, Sink(), range(2), blob=of_scope(scope))
            links = [*a.node._data._links.values()]
            if scope == 1:
                a.node.leave(scope)
                b.node.leave(scope)
            assert [*a.node._data._links.values()] == links
        assert len(a.node._data._links) == len(b.node._data._links) == 1
        assert len(a.node.control.channels) + len(b.node.control.channels) <= 4, (
            "each has dialed the other once at most"
        )


@pytest.mark.parametrize(("many", "few"), [("contribution", "activation"), ("activation", "contribution")])
@pytest.mark.parametrize("scopes", [(1, 0), (0, 2)], ids=["averaging first", "averaging second"])
def test_one_stages_averaging_and_anothers_activations_do_not_wait_for_each_other(
    many: Literal["contribution", "activation"], few: Literal["contribution", "activation"], scopes: tuple[int, int]
) -> None:
    """Over one link: what is asked for later, and is short, is here before the end of what is long."""

    @run
    async def test() -> None:
        async with swarm() as (a, b):
            for member, other in ((a, b), (b, a)):
                for scope in (1, 2):
                    member.node.update_roster((member.entry(), other.entry()), scope)
            flood = Blob(kind=many, number=1, scope=scopes[0])
            short = Blob(kind=few, number=2, scope=scopes[1])
            b.node.publish(flood, source := Source(3000, 2**14))
            b.node.publish(short, Source(4, 2**14))
            sink = Sink()
            flooding = asyncio.create_task(fetch(a, b, sink, range(source.chunks), blob=flood))
            while len(sink.chunks) < 100:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await fetch(a, b, Sink(), range(4), blob=short)
            assert len(sink.chunks) < source.chunks
            flooding.cancel()

    test()
