import asyncio
import errno
import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from tests.swarm.coordinator.world import entry
from tests.swarm.network import HOST, LONG_S, STATE, Member, Sink, Source, fetch, introduce, run, swarm, until
from zmq.utils import z85

from shoal.swarm.aio import in_thread
from shoal.swarm.errors import (
    FINAL_ERRORS,
    BlobUnavailable,
    CorpusError,
    DeadlineExceeded,
    LinkError,
    ModelMismatch,
    NotAdmitted,
    ProtocolMismatch,
    Removed,
    RunEnded,
    ShoalError,
    StaleWork,
    StorageError,
    Unreachable,
    UserError,
    WireError,
    WrongKey,
)
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.messages import (
    EVIDENCE_PIECE_BYTES,
    PROTOCOL_VERSION,
    Acknowledged,
    CoordinatorToPeerTrial,
    PeerToCoordinatorShowEvidence,
    PeerToPeerCloseStream,
    PeerToPeerOpenLink,
    PeerToPeerOpenStream,
    PeerToPeerPing,
    PeerToPeerPong,
)
from shoal.swarm.protocol.types import Blob, Message
from shoal.swarm.protocol.wire import MAX_FRAME_BYTES, Envelope, encode
from shoal.swarm.transport import control
from shoal.swarm.transport.bulk import io_thread
from shoal.swarm.transport.bulk.data_connection import MAX_CHUNK_BYTES, PREFIX_BYTES, DataConnection
from shoal.swarm.transport.bulk.data_plane import Dial
from shoal.swarm.transport.bulk.frame_crypto import CREDIT as CREDIT_FRAME
from shoal.swarm.transport.bulk.frame_crypto import HELLO, STREAM_CONTROL, TAG_BYTES, SealedLink
from shoal.swarm.transport.bulk.io_thread import IoThread
from shoal.swarm.transport.bulk.link import (
    CREDIT,
    MAX_CREDIT,
    MAX_STREAMS_PER_LINK,
    Frame,
    FrameQueue,
    IncomingStream,
    Link,
    OutgoingStream,
)
from shoal.swarm.transport.limits.traffic_meter import TrafficMeter
from shoal.swarm.transport.node import Node

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def dial(caller: Member, called: Member) -> control.Channel:
    return caller.node.control.dial(HOST, called.ports[0], called.keys.public)


async def ping(caller: Member, called: Member) -> None:
    await dial(caller, called).request(PeerToPeerPing(), PeerToPeerPong, LONG_S)


# Requests -----------------------------------------------------------------------------------------------


@run
async def test_requests_both_ways_over_one_connection() -> None:
    async with swarm() as (a, b):
        await ping(a, b)
        back = b.node.control.incoming(a.keys.public)
        assert back is not None
        assert back.remote_host.endswith(HOST)
        await back.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)
        assert b.node.control.incoming(CurveKeys.fresh().public) is None


@run
async def test_round_trips_are_those_of_requests_over_connections_that_were_there() -> None:
    async with swarm() as (a, b):
        assert a.node.round_trip_s == 0.0
        began_s = asyncio.get_running_loop().time()
        await ping(a, b)
        assert a.node.round_trip_s == 0.0, "connecting is not the way there and back"
        await ping(a, b)
        assert 0.0 < a.node.round_trip_s <= asyncio.get_running_loop().time() - began_s
        a.node.update_roster(())
        assert a.node.round_trip_s == 0.0, "only members count"


@run
async def test_notices_are_handled() -> None:
    async with swarm() as (a, b):
        got = asyncio.Event()

        async def handler(channel: control.Channel, message: Message) -> None:
            got.set()

        b.node.control.handle(PeerToPeerPing, handler)
        channel = dial(a, b)
        await channel.connected(LONG_S)
        await channel.notify(PeerToPeerPing())
        async with asyncio.timeout(LONG_S):
            await got.wait()


@run
async def test_both_sides_of_a_connection_are_linked() -> None:
    async with swarm() as (a, b):
        assert not a.node.is_linked(b.peer)
        await ping(a, b)
        assert b.node.is_linked(a.peer), "whoever has opened it"
        assert not b.node.is_linked("nobody")
        b.node.publish(STATE, Source(1, 2**10))
        await fetch(a, b, Sink(), range(1))
        assert a.node.is_linked(b.peer)


@run
async def test_large_notices_to_callers_are_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libzmq enciphers for a caller that reads slowly is one frame, not a whole plan."""
    async with swarm() as (a, b):
        got, sizes = list[Message](), list[int]()
        arrived = asyncio.Event()

        async def handler(channel: control.Channel, message: Message) -> None:
            got.append(message)
            if len(got) == 3:
                arrived.set()

        a.node.control.handle(CoordinatorToPeerTrial, handler)
        await ping(a, b)
        back = b.node.control.incoming(a.keys.public)
        assert back is not None
        assert back.callers is not None
        send = back.callers.send

        def counting(routing: bytes, frames: Iterable[bytes]) -> None:
            frames = list(frames)
            sizes.extend(map(len, frames))
            send(routing, frames)

        monkeypatch.setattr(back.callers, "send", counting)
        named = entry(0).certificate
        sent = [CoordinatorToPeerTrial(study=size * "a", coordinator=named) for size in (399_000, 9, 70_000)]
        for one in sent:
            await back.notify(one)
        async with asyncio.timeout(LONG_S):
            await arrived.wait()
        assert got == sent
        assert max(sizes) == MAX_FRAME_BYTES


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES - 300, MAX_FRAME_BYTES, 40_000, EVIDENCE_PIECE_BYTES])
@run
async def test_requests_of_any_size_arrive(size: int) -> None:
    """Such as evidence: its frames are as large as a frame may be, and grow when they are enciphered."""
    async with swarm() as (a, b):
        got = list[Message]()

        async def handler(channel: control.Channel, message: Message) -> Message:
            got.append(message)
            return Acknowledged()

        b.node.control.handle(PeerToCoordinatorShowEvidence, handler)
        await ping(a, b)
        channel = dial(a, b)
        await channel.connected(LONG_S)
        shown = PeerToCoordinatorShowEvidence(evidence=bytes(32), size_bytes=size, start=0, data=bytes(size))
        assert isinstance(await channel.request(shown, Acknowledged, LONG_S), Acknowledged)
        assert got == [shown]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (StaleWork("too late"), StaleWork),
        (Unreachable("a third machine"), LinkError),
        (UserError("not for travelling"), LinkError),
        (ValueError("a library's"), LinkError),
        (zmq.ZMQError(zmq.EAGAIN), LinkError),
        (OSError("disk"), LinkError),
    ],
)
@run
async def test_errors_travel_and_leave_the_node_alive(
    raised: Exception, expected: type[LinkError], caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm() as (a, b):

        async def handler(channel: control.Channel, message: Message) -> Message:
            raise raised

        a_handler = b.node.control._handlers["", 0, PeerToPeerPing]
        b.node.control.handle(PeerToPeerPing, handler)
        with pytest.raises(LinkError) as caught:
            await ping(a, b)
        assert type(caught.value) is expected
        b.node.control.handle(PeerToPeerPing, a_handler)
        await ping(a, b)


@pytest.mark.parametrize("raised", [StorageError("/home/me/state: no space"), UserError("--data /home/me/diary")])
@run
async def test_errors_about_a_machines_files_stay_there(raised: ShoalError) -> None:
    async with swarm() as (a, b):

        async def handler(channel: control.Channel, message: Message) -> Message:
            raise raised

        async def no_chunk(index: int) -> memoryview:
            raise raised

        b.node.control.handle(PeerToPeerPing, handler)
        with pytest.raises(ShoalError) as caught:
            await ping(a, b)
        assert "home" not in str(caught.value)
        source = Source(1)
        source.chunk = no_chunk  # type: ignore[method-assign]
        b.node.publish(STATE, source)
        with pytest.raises(ShoalError) as caught:  # noqa: PT012
            async with aclosing(a.node.fetch(b.peer, STATE, range(1), Sink(), 0.3)) as stream:
                async for _ in stream:
                    raise AssertionError("there is no chunk")
        assert "home" not in str(caught.value)


@pytest.mark.parametrize("named", [StorageError, CorpusError, ModelMismatch, RunEnded, Removed])
@run
async def test_a_members_word_ends_no_other_process(named: type[ShoalError]) -> None:
    async with swarm() as (a, b):

        async def handler(channel: control.Channel, message: Message) -> Message:
            raise named("so says another member")

        async def no_chunk(index: int) -> memoryview:
            raise named("so says another member")

        b.node.control.handle(PeerToPeerPing, handler)
        with pytest.raises(LinkError) as caught:
            await a.node.ask(b.peer, PeerToPeerPing(), PeerToPeerPong, LONG_S)
        assert not isinstance(caught.value, FINAL_ERRORS)
        source = Source(1)
        source.chunk = no_chunk  # type: ignore[method-assign]
        b.node.publish(STATE, source)
        with pytest.raises(LinkError) as caught:
            await fetch(a, b, Sink(), range(1), 0.3)
        assert not isinstance(caught.value, FINAL_ERRORS)


@run
async def test_wrong_replies_and_unknown_requests() -> None:
    async with swarm() as (a, b):
        with pytest.raises(WireError, match="instead of"):
            await dial(a, b).request(PeerToPeerPing(), Acknowledged, LONG_S)
        with pytest.raises(WireError, match="not for this side"):
            await dial(a, b).request(PeerToPeerPong(), PeerToPeerPong, LONG_S)


@run
async def test_deadline_and_late_replies() -> None:
    async with swarm() as (a, b):
        release = asyncio.Event()

        async def handler(channel: control.Channel, message: Message) -> Message:
            await release.wait()
            return PeerToPeerPong()

        honest = b.node.control._handlers["", 0, PeerToPeerPing]
        b.node.control.handle(PeerToPeerPing, handler)
        channel = dial(a, b)
        await channel.connected(LONG_S)
        with pytest.raises(DeadlineExceeded):
            await channel.request(PeerToPeerPing(), PeerToPeerPong, 0.05)
        assert channel.is_idle
        release.set()
        b.node.control.handle(PeerToPeerPing, honest)
        await ping(a, b)


@run
async def test_requests_without_an_answer_fail_when_the_connection_is_lost() -> None:
    async with swarm() as (a, b):
        arrived = asyncio.Event()

        async def handler(channel: control.Channel, message: Message) -> Message:
            arrived.set()
            await asyncio.Event().wait()
            return PeerToPeerPong()

        b.node.control.handle(PeerToPeerPing, handler)
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(outcome(dial(a, b).request(PeerToPeerPing(), PeerToPeerPong, 1000)))
            await arrived.wait()
            await b.stop()
        assert isinstance(waiting.result(), Unreachable)


async def outcome(work: Coroutine[Any, Any, Any]) -> object:
    try:
        return await work
    except LinkError as error:
        return error


@run
async def test_hanging_up_fails_what_waits_instead_of_cancelling_it() -> None:
    async with swarm(1) as (a,):
        channel = a.node.control.dial(HOST, 1, CurveKeys.fresh().public)
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(outcome(channel.request(PeerToPeerPing(), PeerToPeerPong, 1000)))
            await asyncio.sleep(0)
            a.node.control.hang_up(channel)
        assert isinstance(waiting.result(), Unreachable)


# Connecting ---------------------------------------------------------------------------------------------


@run
async def test_wrong_key_unknown_key_and_nobody() -> None:
    async with swarm() as (a, b):
        start = time.monotonic()
        channel = a.node.control.dial(HOST, b.ports[0], CurveKeys.fresh().public)
        with pytest.raises(WrongKey):
            await channel.connected(LONG_S)
        with pytest.raises(WrongKey):
            await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)

        b.allowed.clear()
        with pytest.raises(NotAdmitted):
            await dial(a, b).connected(LONG_S)
        assert time.monotonic() - start < LONG_S / 2

        b.allowed.add(a.keys.public)
        await ping(a, b)  # a new channel: the refused one is gone

        nobody = a.node.control.dial(HOST, 1, b.keys.public)
        with pytest.raises(Unreachable):
            await nobody.connected(0.3)
        with pytest.raises(Unreachable):
            await nobody.request(PeerToPeerPing(), PeerToPeerPong, 0.1)
        with pytest.raises(Unreachable):
            a.node.control.dial("no host\n", 1, b.keys.public)
        with pytest.raises(Unreachable):
            a.node.control.dial("no host\n", 1, b.keys.public)


@pytest.mark.parametrize("refuses", [True, False])
@run
async def test_the_gate_goes_on_when_admit_raises_or_takes_long(refuses: bool) -> None:
    async with swarm() as (a, stranger):
        asked, decide = asyncio.Event(), asyncio.Event()
        keys = CurveKeys.fresh()

        async def admit(key: bytes) -> bool:
            if key == a.keys.public:
                asked.set()
                if refuses:
                    raise Unreachable("the coordinator, who would know")
                await decide.wait()
            return True

        async with Node.open(keys, HOST, (0, 0), admit) as node:
            channel = a.node.control.dial(HOST, node.control_port, keys.public)
            async with asyncio.timeout(LONG_S):
                await asked.wait()
            other = stranger.node.control.dial(HOST, node.control_port, keys.public)
            await other.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)
            if refuses:
                with pytest.raises(NotAdmitted):
                    await channel.connected(LONG_S)
            else:
                decide.set()
                await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)


@run
async def test_restart_with_the_same_keys() -> None:
    async with swarm() as (a, b):
        await ping(a, b)
        channel = dial(a, b)
        await b.stop()
        with pytest.raises(LinkError):
            await channel.request(PeerToPeerPing(), PeerToPeerPong, 0.2)
        await until(lambda: not channel.is_connected)
        with pytest.raises(Unreachable):
            await channel.notify(PeerToPeerPing())
        await b.start()
        await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)
        assert dial(a, b) is channel


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), GREETING + READY, b""], ids=["http", "zmtp", "none"]
)
@run
async def test_comes_back_though_something_else_answered_meanwhile(answer: bytes) -> None:
    async with swarm() as (a, b):
        await ping(a, b)
        channel = dial(a, b)
        await b.stop()
        called = asyncio.Event()

        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set()
            writer.write(answer)
            with suppress(ConnectionError):
                await reader.read(1 if answer else 0)
            writer.close()

        async with await asyncio.start_server(other, HOST, b.ports[0]):
            async with asyncio.timeout(LONG_S):
                await called.wait()
        await b.start()
        await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)


@run
async def test_restart_with_new_keys() -> None:
    async with swarm() as (a, b):
        source, sink = Source(3), Sink()
        b.node.publish(STATE, source)
        assert await fetch(a, b, sink, range(3)) == [0, 1, 2]
        old = dial(a, b)
        await b.stop()
        b.keys = CurveKeys.fresh()
        await b.start()
        introduce(a, b)
        b.node.publish(STATE, source)
        assert old.is_broken
        assert old.socket.closed
        assert await fetch(a, b, sink, range(3)) == [0, 1, 2]


@run
async def test_a_caller_that_connects_anew_replaces_its_earlier_channel() -> None:
    async with swarm() as (a, b):
        await ping(a, b)
        first = b.node.control.incoming(a.keys.public)
        assert first is not None
        a.node.control.hang_up(dial(a, b))
        await ping(a, b)
        second = b.node.control.incoming(a.keys.public)
        assert second is not None
        assert second is not first
        assert first.is_broken
        await second.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)


def test_what_a_link_has_shown_outlasts_a_round_with_little_to_do() -> None:
    """Or whoever was given a small part, and so had less to send and to receive, would claim less for the next one."""
    meter, now_s = TrafficMeter(), 0.0
    for seconds, bps in ((4.0, 1.5e8), (6.0, 5e7), (600.0, 5e7)):
        shown_bps, until_s = meter.bandwidth_bps, now_s + seconds
        while now_s < until_s:
            now_s += 0.01
            meter.count_received(int(bps * 0.01 / 8), now_s)
        if seconds == 6.0:
            assert meter.bandwidth_bps > 0.75 * shown_bps > 1e8
    assert meter.bandwidth_bps == pytest.approx(5e7, rel=0.1), "a link that has become worse shows at last"


@run
async def test_callers_are_forgotten_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CHANNELS", 2)
    async with swarm(4) as (a, b, c, d):
        for caller in (b, c, d):
            await ping(caller, a)
            assert len(a.node.control._incoming) <= 2
        await ping(b, a)  # and who was forgotten is simply known again


@run
async def test_port_taken_and_errors_of_the_body_come_out_bare() -> None:
    async with swarm(1) as (a,):
        with pytest.raises(Unreachable, match="--bind"):
            async with Node.open(a.keys, HOST, (a.ports[0], 0), a.admit):
                pass
    with pytest.raises(StaleWork):  # noqa: PT012
        async with Node.open(a.keys, HOST, (0, None), a.admit) as node:
            assert node.data_port == 0
            raise StaleWork("mine")
    with pytest.raises(asyncio.CancelledError):
        async with Node.open(a.keys, HOST, (0, 0), a.admit):
            raise asyncio.CancelledError


@run
async def test_nothing_is_left_behind() -> None:
    async with swarm() as (a, b):
        await ping(a, b)
        before = len(asyncio.all_tasks())
        for _ in range(20):
            a.node.control.hang_up(a.node.control.dial(HOST, 1, b.keys.public))
            channel = a.node.control.dial(HOST, b.ports[0], CurveKeys.fresh().public)
            with pytest.raises(WrongKey):
                await channel.connected(LONG_S)
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert len(a.node.control._dialed) == 1
    assert len(asyncio.all_tasks()) == 1


# Other versions and bad bytes ---------------------------------------------------------------------------


def raw_dealer(context: zmq.asyncio.Context, me: CurveKeys, called: Member) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = z85.encode(me.public), z85.encode(me.secret)
    socket.curve_serverkey = z85.encode(called.keys.public)
    socket.connect(f"tcp://{HOST}:{called.ports[0]}")
    return socket


async def stop_with_an_answer_ready() -> None:
    async with swarm() as (one, two), asyncio.TaskGroup() as tasks:
        asked, go = asyncio.Event(), asyncio.Event()

        async def answer(channel: control.Channel, message: Message) -> Message:
            asked.set()
            await go.wait()
            return PeerToPeerPong()

        async def ask() -> None:
            channel = two.node.control.dial(HOST, one.ports[0], one.keys.public)
            with pytest.raises(LinkError):
                await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S)

        one.node.control.handle(PeerToPeerPing, answer)
        tasks.create_task(ask())
        await asked.wait()
        go.set()  # the handler goes on when the sockets are closed already, and before it is cancelled
        await one.stop()


@run
async def test_an_answer_that_is_ready_when_the_node_stops_is_dropped_in_silence() -> None:
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: noise.append(about))
    await stop_with_an_answer_ready()
    gc.collect()  # a future that nobody looked at complains when it is destroyed
    assert noise == []


@run
async def test_a_caller_of_another_version() -> None:
    async with swarm() as (a, b):
        with zmq.asyncio.Context() as context:
            socket = raw_dealer(context, a.keys, b)
            await socket.send(msgpack.packb([PROTOCOL_VERSION + 1, "the future"]))
            async with asyncio.timeout(LONG_S):
                answer = msgpack.unpackb(await socket.recv())
            assert answer[0] == PROTOCOL_VERSION
            socket.close()

        # And what that answer does to the one who called, when it is we.
        with zmq.asyncio.Context() as context:
            server = context.socket(zmq.ROUTER)
            server.linger = 0
            server.curve_secretkey, server.curve_server = z85.encode(b.keys.secret), True
            port = server.bind_to_random_port(f"tcp://{HOST}")
            async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
                channel = a.node.control.dial(HOST, port, b.keys.public)
                waiting = tasks.create_task(outcome(channel.request(PeerToPeerPing(), PeerToPeerPong, 1000)))
                routing, _ = await server.recv_multipart()
                await server.send_multipart([routing, msgpack.packb([PROTOCOL_VERSION + 1])])
            assert isinstance(waiting.result(), ProtocolMismatch)
            server.close()


@run
async def test_who_sends_nonsense_is_dropped_and_nobody_else() -> None:
    async with swarm(3) as (a, b, c):
        with zmq.asyncio.Context() as context:
            socket = raw_dealer(context, a.keys, b)
            await socket.send(b"nonsense")
            callers = b.node.control._incoming
            await until(lambda: a.keys.public in callers and callers[a.keys.public].is_broken)
            assert b.node.control.incoming(a.keys.public) is None
            await ping(c, b)
            socket.close()
        await ping(a, b)  # a new connection starts afresh


@run
async def test_one_member_cannot_take_all_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_HANDLERS_PER_KEY", 4)
    async with swarm(3) as (a, b, c):
        running = 0
        full, end = asyncio.Event(), asyncio.Event()

        async def handler(channel: control.Channel, message: Message) -> Message:
            nonlocal running
            if channel.remote_key == a.keys.public:
                running += 1
                full.set() if running == 4 else None
                await end.wait()
            return PeerToPeerPong()

        b.node.control.handle(PeerToPeerPing, handler)
        channel = dial(a, b)
        await channel.connected(LONG_S)
        for _ in range(200):
            await channel.notify(PeerToPeerPing())
        async with asyncio.timeout(LONG_S):
            await full.wait()
        await ping(c, b)
        assert running == 4
        # Nor by connecting again and again.
        a.node.control.hang_up(channel)
        channel = dial(a, b)
        await channel.connected(LONG_S)
        for _ in range(200):
            await channel.notify(PeerToPeerPing())
        await ping(c, b)
        assert running == 4
        end.set()


# Streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("size", [0, 8, 100_000, 2**20])
@run
async def test_chunks_arrive_intact_and_in_order(size: int, connections: int) -> None:
    async with swarm() as (a, b):
        a.node.connections_per_link = connections
        source, sink = Source(50, size), Sink()
        b.node.publish(STATE, source)
        assert await fetch(a, b, sink, range(3, 47)) == list(range(3, 47))
        assert sink.holds(source, range(3, 47))
        assert sorted(sink.chunks) == list(range(3, 47))
        assert a.node.meter.received_bytes == b.node.meter.sent_bytes == 44 * (size + PREFIX_BYTES + TAG_BYTES)
        assert await fetch(a, b, sink, range(0)) == []


@run
async def test_several_streams_share_a_link() -> None:
    async with swarm() as (a, b):
        source = Source(30, 10_000)
        sinks = [Sink() for _ in range(5)]
        b.node.publish(STATE, source)
        async with asyncio.TaskGroup() as tasks:
            for sink in sinks:
                tasks.create_task(fetch(a, b, sink, range(30)))
        assert all(sink.holds(source, range(30)) for sink in sinks)
        assert len(a.node._data._links) == len(b.node._data._links) == 1


@pytest.mark.parametrize(("size_bytes", "most"), [(2**19, CREDIT), (2**17, 4 * CREDIT), (100, MAX_CREDIT)])
@run
async def test_sender_is_never_further_ahead_than_its_credit(size_bytes: int, most: int) -> None:
    async with swarm() as (a, b):
        consumed, ahead = 0, []

        class Counting(Source):
            async def chunk(self, index: int) -> memoryview:
                ahead.append(index + 1 - consumed)
                return await super().chunk(index)

        source, sink, chunks = Counting(3 * most, size_bytes), Sink(), range(3 * most)
        b.node.publish(STATE, source)
        async with aclosing(a.node.fetch(b.peer, STATE, chunks, sink, LONG_S)) as stream:
            async for index in stream:
                consumed = index + 1
                # Let the sender run as far as it may: until it has nothing to do, requests go back and forth.
                for _ in range(10):
                    await ping(a, b)
        assert consumed == chunks.stop
        assert max(ahead) <= most
        assert max(ahead) > most // 2


@pytest.mark.parametrize(("size_bytes", "most"), [(2**19, CREDIT), (2**17, 4 * CREDIT), (100, MAX_CREDIT)])
@run
async def test_who_is_long_about_the_first_chunk_is_sent_a_window_of_its_size(size_bytes: int, most: int) -> None:
    """A long way would stand still else: what comes ahead of a round's plan is not taken before it is there."""
    async with swarm() as (a, b):
        source, sink = Source(3 * most, size_bytes), Sink()
        b.node.publish(STATE, source)
        async with aclosing(a.node.fetch(b.peer, STATE, range(3 * most), sink, LONG_S)) as stream:
            await anext(stream)
            await until(lambda: len(sink.chunks) == most)
            for _ in range(10):
                await ping(a, b)
            assert len(source.asked) == most


def test_credit_does_not_pile_up() -> None:
    stream = OutgoingStream(CREDIT, 0)
    for _ in range(100):
        stream.receive_credit(1024)
        stream.notify()
    assert stream.credit == MAX_CREDIT


@pytest.mark.parametrize("lost", [0, 5, 19])
@run
async def test_resumes_when_a_chunk_never_comes(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        source, sink = Source(20), Sink()
        b.node.publish(STATE, source)
        send, sent = b.node._data._io_thread.send, []

        def lossy(link: Link, frame: Frame, *, urgent: bool) -> None:
            sent.append(frame.chunk)
            if sent.count(lost) == 1 and frame.chunk == lost:
                return
            send(link, frame)

        monkeypatch.setattr(b.node._data._io_thread, "send", lossy)
        assert await fetch(a, b, sink, range(20), progress_s=3) == list(range(20))
        assert sink.holds(source, range(20))
        assert sent.count(lost) == 2


@run
async def test_resumes_after_a_damaged_frame_without_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        source, sink = Source(20), Sink()
        b.node.publish(STATE, source)
        put, damaged = DataConnection.seal, False

        def damage(self: DataConnection, link: Link, frame: Frame) -> int:
            nonlocal damaged
            size = put(self, link, frame)
            if not damaged and frame.chunk == 5:
                damaged = True
                self._unsent[PREFIX_BYTES + 3] ^= 1
            return size

        monkeypatch.setattr(DataConnection, "seal", damage)
        assert await fetch(a, b, sink, range(20)) == list(range(20))
        assert damaged
        assert sink.holds(source, range(20))


@run
async def test_resumes_when_one_of_several_connections_breaks() -> None:
    async with swarm() as (a, b):
        a.node.connections_per_link = 4
        source, sink = Source(40, 50_000, held_at=11), Sink()
        b.node.publish(STATE, source)
        got = []
        async with aclosing(a.node.fetch(b.peer, STATE, range(40), sink, LONG_S)) as stream:
            async for index in stream:
                got.append(index)
                if index == 10:
                    (link,) = b.node._data._links.values()
                    connections = link.connections
                    await until(lambda: len(connections) == 4)  # noqa: B023
                    connections[2].socket.shutdown(socket.SHUT_RDWR)
                    source.go.set()
        assert got == list(range(40))
        assert sink.holds(source, range(40))


@run
async def test_chunks_without_credit_end_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):

        async def at_once(self: OutgoingStream) -> None:
            return

        monkeypatch.setattr(OutgoingStream, "use_credit", at_once)
        b.node.publish(STATE, Source(40, 2**19))
        sink = Sink()
        with pytest.raises(LinkError, match="without credit"):  # noqa: PT012
            async with aclosing(a.node._attempt(b.peer, STATE, range(40), sink, LONG_S)) as attempt:
                async for _ in attempt:
                    await until(lambda: not b.node._data._links or len(sink.chunks) >= CREDIT)
                    await asyncio.sleep(0.2)
        assert len(sink.chunks) <= 2 * CREDIT


@run
async def test_a_closed_stream_writes_to_no_sink_any_more() -> None:
    begun, proceed = threading.Event(), threading.Event()
    incoming = IncomingStream(range(5), Sink())
    written = bytearray(8)

    def slowly(place: memoryview) -> None:
        begun.set()
        proceed.wait(LONG_S)
        place[:] = written[:] = b"12345678"

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(incoming.receive, 0, 8, slowly))
        await asyncio.to_thread(begun.wait, LONG_S)
        closing = tasks.create_task(asyncio.to_thread(incoming.close))
        await asyncio.sleep(0.05)
        assert not closing.done()
        proceed.set()
        await closing
        assert written == b"12345678"
    assert not incoming.receive(1, 8, slowly)


@pytest.mark.parametrize("opener", ["fetcher", "server"])
@run
async def test_resumes_when_the_serving_node_restarts(opener: str) -> None:
    async with swarm() as (a, b):
        source, sink = Source(40), Sink()
        b.node.publish(STATE, source)
        if opener == "server":
            await call(b, a)
            links = a.node._data._links
            await until(lambda: all(link.attached.is_set() for link in links.values()))
        got = []
        async with aclosing(a.node.fetch(b.peer, STATE, range(40), sink, 6)) as stream:
            async for index in stream:
                got.append(index)
                if index == 10:
                    await b.stop()
                    await b.start()
                    introduce(a, b)
                    b.node.publish(STATE, source)
        assert got == list(range(40))
        assert sink.holds(source, range(40))


@run
async def test_a_link_of_a_caller_that_vanished_is_not_used_for_ever() -> None:
    async with swarm() as (a, b):
        source, sink = Source(5), Sink()
        await call(b, a)
        await b.stop()
        await b.start()
        introduce(a, b)
        b.node.publish(STATE, source)
        assert await fetch(a, b, sink, range(5)) == list(range(5))


@run
async def test_an_absent_blob_may_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        start = time.monotonic()
        with pytest.raises(BlobUnavailable):
            await fetch(a, b, Sink(), range(5), progress_s=2.0)
        assert time.monotonic() - start >= 2.0
        source, sink = Source(5), Sink()
        requests: list[PeerToPeerOpenStream] = []
        serve = b.node._data._begin_stream

        def counting(link: Link, ask: PeerToPeerOpenStream) -> None:
            requests.append(ask)
            serve(link, ask)

        monkeypatch.setattr(b.node._data, "_begin_stream", counting)
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(fetch(a, b, sink, range(5)))
            await asyncio.sleep(0.1)
            b.node.publish(STATE, source)
        assert fetching.result() == list(range(5))
        assert len(requests) == 1, "the other side waits a moment for what will be there"
        b.node.retract(STATE)
        for blob, chunks in ((STATE, range(5)), (Blob(kind="state", number=2), range(1))):
            with pytest.raises(BlobUnavailable):
                await fetch(a, b, Sink(), chunks, 2.0, blob)
        b.node.publish(STATE, source)
        with pytest.raises(BlobUnavailable, match="only 5 chunks"):
            await fetch(a, b, Sink(), range(6), 2.0)


@run
async def test_a_source_that_fails_ends_its_stream_only() -> None:
    async with swarm() as (a, b):

        class Failing(Source):
            async def chunk(self, index: int) -> memoryview:
                if index == 3:
                    raise StaleWork("gone")
                return await super().chunk(index)

        b.node.publish(STATE, Failing(5))
        with pytest.raises(LinkError):
            await fetch(a, b, Sink(), range(5), 0.3)
        b.node.publish(STATE, Source(5))
        assert await fetch(a, b, Sink(), range(5)) == list(range(5))


@run
async def test_the_time_that_the_consumer_takes_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(20))
        clock = time.monotonic
        skipped = 0.0
        monkeypatch.setattr("shoal.swarm.transport.node.time.monotonic", lambda: clock() + skipped)
        got = []
        async for index in a.node.fetch(b.peer, STATE, range(20), Sink(), 20):
            got.append(index)
            if index == 10:
                skipped += 1000  # the consumer was busy, and meanwhile the link was lost
                for link in list(a.node._data._links.values()):
                    a.node._data.close_link(link)
        assert got == list(range(20))


@run
async def test_a_fetch_that_is_given_up_frees_both_sides() -> None:
    async with swarm() as (a, b):
        source = Source(20, held_at=5)
        b.node.publish(STATE, source)
        async with aclosing(a.node.fetch(b.peer, STATE, range(20), Sink(), LONG_S)) as stream:
            async for index in stream:
                if index == 4:
                    break
            (ours,), (theirs,) = a.node._data._links.values(), b.node._data._links.values()
            (serving,) = (stream.task for stream in theirs.outgoing.values())
        assert not ours.incoming
        await until(lambda: not theirs.outgoing)
        assert serving is not None
        await until(serving.done)  # though its source would have held it for ever
        assert await fetch(a, b, Sink(), range(5)) == list(range(5))


@run
async def test_a_silent_link_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        source, sink = Source(5), Sink()
        b.node.publish(STATE, source)
        await fetch(a, b, Sink(), range(1))
        (link,) = b.node._data._links.values()
        send = b.node._data._io_thread.send

        def mute(which: Link, frame: Frame, *, urgent: bool) -> None:
            if which is not link:  # nothing will ever come over it
                send(which, frame)

        monkeypatch.setattr(b.node._data._io_thread, "send", mute)
        assert await fetch(a, b, sink, range(5), progress_s=1.5) == list(range(5))
        assert sink.holds(source, range(5))
        assert not link.connections


# Who cannot be reached ----------------------------------------------------------------------------------


@run
async def test_served_over_the_link_that_it_opened_itself() -> None:
    async with swarm() as (a, b):
        b.reachable = False
        introduce(a, b)
        source, sink = Source(20), Sink()
        b.node.publish(STATE, source)
        with pytest.raises(Unreachable):
            await fetch(a, b, sink, range(20), 0.2)
        await call(b, a)
        assert await fetch(a, b, sink, range(20)) == list(range(20))
        assert sink.holds(source, range(20))
        (link,) = a.node._data._links.values()
        assert not link.is_ours

        # The other side closes the link: the next one replaces it.
        a.node._data.close_link(link)
        await until(lambda: not b.node._data._links)
        await call(b, a)
        assert await fetch(a, b, sink, range(20)) == list(range(20))
        assert len(a.node._data._links) == len(b.node._data._links) == 1


@run
async def test_a_silent_link_that_only_they_can_open_is_kept() -> None:
    async with swarm() as (a, b):
        b.reachable = False
        introduce(a, b)
        source, sink = Source(5, held_at=2), Sink()
        b.node.publish(STATE, source)
        await call(b, a)
        got = []
        with pytest.raises(LinkError):  # noqa: PT012
            async for index in a.node.fetch(b.peer, STATE, range(5), sink, 0.3):
                got.append(index)
        assert got == [0, 1]
        source.go.set()
        assert await fetch(a, b, sink, range(2, 5)) == [2, 3, 4]


# Hostile ------------------------------------------------------------------------------------------------


def open_link(name: bytes = b"\x011234567") -> PeerToPeerOpenLink:
    return PeerToPeerOpenLink(link=name, secret=bytes(32), cipher="aes-256-gcm")


@run
async def test_only_members_open_links_and_use_their_own() -> None:
    async with swarm(3) as (a, b, c):
        b.node.publish(STATE, Source(5))
        await fetch(a, b, Sink(), range(5))
        with pytest.raises(WireError, match="not for this side"):  # streams are for who has the keys of a link
            await dial(a, b).request(PeerToPeerCloseStream(stream=0), Acknowledged, LONG_S)

        introduce(a, b)  # c's key still gets in, but it is no member any more
        with pytest.raises(NotAdmitted):
            await dial(c, b).request(open_link(), Acknowledged, LONG_S)


@run
async def test_links_end_with_membership() -> None:
    async with swarm() as (a, b):
        source = Source(20, held_at=5)
        b.node.publish(STATE, source)
        async with aclosing(a.node.fetch(b.peer, STATE, range(20), Sink(), LONG_S)) as stream:
            async for index in stream:
                if index == 4:
                    break
            b.node.update_roster((b.entry(),))
            assert not b.node._data._links


@run
async def test_a_member_has_one_link_and_few_streams() -> None:
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(5))
        channel = dial(a, b)
        for number in range(10):
            await channel.request(open_link(b"\x01%07d" % number), Message, LONG_S)
        assert list(b.node._data._links) == [b"\x010000009"]
        with pytest.raises(WireError):
            await channel.request(open_link(b"\x010000009"), Message, LONG_S)
        link = await linked(a, b)
        (theirs,) = b.node._data._links.values()
        b.node.publish(STATE, Source(5, held_at=0))
        opened = [a.node._data.open_stream(link, STATE, range(5), Sink()) for _ in range(1 + MAX_STREAMS_PER_LINK)]
        with pytest.raises(BlobUnavailable, match="too many"):
            await opened[-1][1].next_chunk(LONG_S)
        assert theirs.outgoing.keys() == {number for number, _ in opened[:-1]}
        for number, _ in opened:
            a.node._data.close_stream(link, number, finished=False)
        await until(lambda: not theirs.outgoing)


async def linked(a: Member, b: Member) -> Link:
    """The link over which a fetches from b."""
    blob = Blob(kind="state", number=2)
    b.node.publish(blob, Source(1))
    await fetch(a, b, Sink(), range(1), blob=blob)
    b.node.retract(blob)
    return a.node._data.links_with(b.keys.public)[0]


async def call(a: Member, b: Member) -> None:
    """Have a open a link to b, as a fetch would."""
    entry, channel = await a.node._channel_to(b.peer, 0, LONG_S)
    await a.node._link(entry, channel, LONG_S)


def said(message: Message) -> bytes:
    return encode(Envelope("notice", 0, message))


OPEN = PeerToPeerOpenStream(stream=7, blob=STATE, first=0, stop=5, credit=1024)


@pytest.mark.parametrize(
    "messages",
    [
        [b"\x00"],
        [said(OPEN)[:-1]],
        [said(PeerToPeerPing())],
        [said(OPEN), said(OPEN)],
        [said(PeerToPeerPing()), said(OPEN)],
        [said(PeerToPeerCloseStream(stream=7))] * 600,
        [bytes(2**12 + 1)],
    ],
)
@run
async def test_nonsense_about_streams_costs_the_link(monkeypatch: pytest.MonkeyPatch, messages: list[bytes]) -> None:
    """Malformed, about something else, a number that is taken, more than anybody has to say, too long; what comes after
    it is not heard."""
    async with swarm() as (a, b):
        link = await linked(a, b)
        (theirs,) = b.node._data._links.values()
        b.node.publish(STATE, Source(5, held_at=0))
        hear = b.node._data._handle_stream_control
        monkeypatch.setattr(b.node._data._io_thread._receiver, "_on_stream_control", lambda link: None)
        for message in messages:
            link.queue.put(
                Frame(0, 0, memoryview(message), kind=STREAM_CONTROL), FrameQueue.STREAM_CONTROL
            )  # without the sender's check
        a.node._data._io_thread._flush_soon(link)
        if len(messages) == 600 or len(messages[0]) > 2**12:  # before anybody has listened
            await until(lambda: not b.node._data._links)
        else:
            await until(lambda: len(theirs._controls) == len(messages))
            hear(theirs)
            assert not b.node._data._links
            assert not theirs.outgoing
        await until(lambda: not a.node._data._links)
        assert not theirs.outgoing
        b.node.publish(STATE, Source(5))
        monkeypatch.setattr(b.node._data._io_thread._receiver, "_on_stream_control", hear)
        assert await fetch(a, b, Sink(), range(5)) == [0, 1, 2, 3, 4]


@run
async def test_what_is_said_about_streams_keeps_its_order() -> None:
    """Also over several connections: a stream that is closed at once is closed."""
    async with swarm() as (a, b):
        a.node.connections_per_link = 4
        link = await linked(a, b)
        (theirs,) = b.node._data._links.values()
        large, number = Blob(kind="state", number=3), 0
        b.node.publish(STATE, Source(5, held_at=0))
        b.node.publish(large, Source(40, 2**20))
        async with aclosing(a.node.fetch(b.peer, large, range(40), Sink(), LONG_S)) as stream:
            async for _ in stream:
                for _ in range(20):
                    number, _ = a.node._data.open_stream(link, STATE, range(5), Sink())
                    a.node._data.close_stream(link, number, finished=False)
        assert await fetch(a, b, Sink(), range(1), blob=large) == [0]  # asked for after all that
        assert theirs.outgoing.keys() <= {number + 1}
        assert not link.incoming


@run
async def test_both_ways_go_over_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opened it, and also when both have opened one: receipts travel with what goes the other way."""
    async with swarm() as (a, b):
        for member in (a, b):
            member.node.publish(STATE, Source(5))
        ours, theirs = asyncio.Event(), asyncio.Event()

        async def open_both(member: Member, other: Member, mine: asyncio.Event, its: asyncio.Event) -> None:
            real = member.node._data._connect

            async def connect(dial: Dial, number: int) -> list[socket.socket]:
                mine.set()
                await its.wait()
                return await real(dial, number)

            member.node._data._connect = connect  # type: ignore[method-assign]
            await fetch(member, other, Sink(), range(5))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(open_both(a, b, ours, theirs))
            tasks.create_task(open_both(b, a, theirs, ours))
        assert len(a.node._data._links) == 2
        assert a.node._data._links.keys() == b.node._data._links.keys()
        used = []
        for member, other in ((a, b), (b, a)):
            say = member.node._data._send_stream_control

            def saying(link: Link, message: Message, say: Callable[[Link, Message], None] = say) -> None:
                used.append(link.sealed.link)
                say(link, message)

            monkeypatch.setattr(member.node._data, "_send_stream_control", saying)
            await fetch(member, other, Sink(), range(5))
        assert used == [min(a.node._data._links)] * 2


async def speak(port: int, data: bytes) -> bytes:
    """Raw TCP; what came back until the other side hung up."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(data)
        async with asyncio.timeout(LONG_S):
            await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@run
async def test_strangers_do_not_disturb_a_stream() -> None:
    async with swarm() as (a, b):
        source, sink = Source(30, held_at=10), Sink()
        b.node.publish(STATE, source)
        got = []
        async with aclosing(a.node.fetch(b.peer, STATE, range(30), sink, LONG_S)) as stream:
            async for index in stream:
                got.append(index)
                if index != 9:
                    continue
                (name,) = b.node._data._links
                for port in b.ports:
                    # No greeting that is not ours gets further than the handshake: the connection is closed.
                    await speak(port, b"GET / HTTP/1.1\r\n\r\n" + bytes(10_000))
                    await speak(port, GREETING + READY + b"\x03" + (2**62).to_bytes(8, "big") + bytes(10_000))
                    with zmq.asyncio.Context() as context:
                        socket = context.socket(zmq.DEALER)
                        socket.linger, socket.routing_id = 0, name
                        socket.connect(f"tcp://{HOST}:{port}")
                        for frames in ([b""], [bytes(24), bytes(16)], [name + bytes(16), bytes(2**22)]):
                            # libzmq gives a connection up for good when the other side speaks otherwise.
                            with suppress(zmq.Again):
                                await socket.send_multipart(frames, zmq.DONTWAIT)
                        await ping(a, b)
                        socket.close()
                source.go.set()
        assert got == list(range(30))
        assert sink.holds(source, range(30))
        assert source.asked == list(range(30))  # not even a retry


def hello(link: Link, kind: int = HELLO) -> bytes:
    """What the opener of a link says first on a data connection."""
    header, tag = link.sealed.next_header(0, 0, kind=kind), bytearray(TAG_BYTES)
    link.sealed.seal(header, memoryview(b""), memoryview(tag))
    return TAG_BYTES.to_bytes(4, "big") + header + tag


@run
async def test_a_data_connection_has_to_prove_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        source = Source(3)
        b.node.publish(STATE, source)
        await fetch(a, b, Sink(), range(1))
        (link,), (theirs,) = a.node._data._links.values(), b.node._data._links.values()
        good = hello(link)
        flipped = good[:-1] + bytes([good[-1] ^ 1])
        unknown = good[:4] + bytes(8) + good[12:]
        backwards = hello(theirs)  # under the key of the other direction
        for bad in (
            flipped,
            unknown,
            backwards,
            hello(link, STREAM_CONTROL),
            b"\0\0\0\x11" + good[4:],
            b"\xff" * 45,
            bytes(45),
        ):
            assert await speak(b.ports[1], bad) == b""  # and they hung up
        assert len(theirs.connections) == 1

        replayed = hello(link)
        first = await asyncio.open_connection(HOST, b.ports[1])
        first[1].write(replayed)
        await until(lambda: len(theirs.connections) == 2)
        assert await speak(b.ports[1], replayed) == b""
        assert len(theirs.connections) == 2
        assert await fetch(a, b, Sink(), range(1)) == [0]
        first[1].close()


@run
async def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_thread, "_HELLO_S", 0.0)
    async with swarm(1) as (a,):
        assert await speak(a.ports[1], b"\0\0") == b""


@run
async def test_many_strangers_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_thread, "strangers_allowed", lambda descriptors: 6)
    async with swarm() as (a, b):
        strangers = [await asyncio.open_connection(HOST, b.ports[1]) for _ in range(10)]
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in strangers]
        await until(lambda: sum(end.done() for end in ends) == 7)
        b.node.publish(STATE, Source(3))
        assert await fetch(a, b, Sink(), range(3)) == [0, 1, 2]
        assert len(b.node._data._io_thread._strangers) <= 3
        for _, writer in strangers:
            writer.close()


@run
async def test_a_link_has_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_thread, "MAX_CONNECTIONS_PER_LINK", 2)
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(3))
        await fetch(a, b, Sink(), range(1))
        (link,), (theirs,) = a.node._data._links.values(), b.node._data._links.values()
        one = await asyncio.open_connection(HOST, b.ports[1])
        one[1].write(hello(link))
        await until(lambda: len(theirs.connections) == 2)
        assert await speak(b.ports[1], hello(link)) == b""
        one[1].close()


@run
async def test_a_thread_that_fails_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: IoThread) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(IoThread, "_turn", broken)
    member = Member()
    with pytest.raises(MemoryError):
        async with asyncio.timeout(LONG_S), Node.open(member.keys, HOST, (0, 0), member.admit):
            await asyncio.Event().wait()


@run
async def test_an_oversized_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        largest = Blob(kind="state", number=2)
        b.node.publish(largest, Source(2, MAX_CHUNK_BYTES))
        sink = Sink(limit=2**30)
        assert await fetch(a, b, sink, range(2), blob=largest) == [0, 1]
        honest = MAX_CHUNK_BYTES

        def careless(self: IoThread, link: Link, frame: Frame, *, urgent: bool) -> None:
            link.queue.put(frame, FrameQueue.USUAL)
            self._flush_soon(link)

        monkeypatch.setattr(IoThread, "send", careless)
        b.node.publish(STATE, Source(2, honest + 8))
        sink = Sink(limit=2**30)
        with pytest.raises(LinkError):  # noqa: PT012
            async with aclosing(a.node._attempt(b.peer, STATE, range(2), sink, 0.5)) as attempt:
                async for _ in attempt:
                    pass
        assert not sink.chunks


@run
async def test_a_chunk_that_the_sink_refuses() -> None:
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(3, 800))
        with pytest.raises(WireError, match="chunk of 800 bytes"):
            await fetch(a, b, Sink(limit=799), range(3), 0.2)
        assert await fetch(a, b, Sink(limit=800), range(3)) == [0, 1, 2]


# Parts --------------------------------------------------------------------------------------------------


@run
async def test_a_cancelled_thread_has_left_the_memory_alone() -> None:
    begun, proceed, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        proceed.wait(LONG_S)
        done.set()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(in_thread(work))
        await asyncio.to_thread(begun.wait, LONG_S)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done.is_set()


def test_frames_are_put_together_from_whatever_pieces() -> None:
    secrets = bytes(64)
    opener = Link(SealedLink(bytes(8), secrets, "aes-256-gcm", opener=True), b"", is_ours=True)
    acceptor = Link(SealedLink(bytes(8), secrets, "aes-256-gcm", opener=False), b"", is_ours=False)
    sizes = [0, 1, 1000, 0, 70_000, 16, 5]
    recorder, other = socket.socketpair()
    with recorder, other:
        writer, frames = DataConnection(recorder, opener, 0.0), bytearray()
        for chunk, size in enumerate(sizes):
            writer.seal(opener, Frame(3, chunk, memoryview(bytes([chunk]) * size)))
            frames += writer._unsent
    rng = random.Random(1)
    for most in (1, 7, 50, 5000, 10**6):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            acceptor.sealed = SealedLink(bytes(8), secrets, "aes-256-gcm", opener=False)
            theirs.setblocking(False)
            reader, got, at = DataConnection(theirs, acceptor, 0.0), [], 0
            while len(got) < len(sizes):
                size = rng.randint(1, most)
                ours.sendall(frames[at : at + size])
                at += size
                with suppress(BlockingIOError):
                    while True:
                        header, body = reader.receive()
                        plain = bytearray(len(body) - TAG_BYTES)
                        acceptor.sealed.open(header, body, memoryview(plain))
                        got.append(plain)
            assert got == [bytes([chunk]) * size for chunk, size in enumerate(sizes)]


# What must not end the thread ---------------------------------------------------------------------------


@run
async def test_connections_that_break_together_while_they_are_blocked() -> None:
    async with swarm() as (a, b):
        a.node.connections_per_link = 4
        b.node.publish(STATE, Source(1000, 2**21))
        hold = threading.Event()

        def sink(chunk: int, size: int) -> memoryview:
            hold.wait(LONG_S)
            raise WireError("not wanted")

        streams = [asyncio.create_task(outcome(fetch(a, b, sink, range(1000), 100))) for _ in range(8)]  # type: ignore[arg-type]
        await until(lambda: any(link.connections for link in b.node._data._links.values()))
        (ours,), (theirs,) = a.node._data._links.values(), b.node._data._links.values()
        await until(lambda: len(theirs.connections) == 4 and all(one.is_blocked for one in theirs.connections))
        serving = b.node._data._io_thread
        serving._post(lambda: time.sleep(0.2))  # so that it hears of all of them at once
        for connection in ours.connections:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(connection.socket.detach())
        await until(lambda: not theirs.connections)
        assert serving._thread.is_alive()
        hold.set()
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)


@run
async def test_no_descriptor_left_for_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        first = await asyncio.open_connection(HOST, b.ports[1])
        await until(lambda: len(b.node._data._io_thread._strangers) == 1)
        accept, failed = socket.socket.accept, threading.Event()

        def exhausted(self: socket.socket) -> Any:
            if not failed.is_set():
                failed.set()
                raise OSError(errno.EMFILE, "too many open files")
            return accept(self)

        monkeypatch.setattr(socket.socket, "accept", exhausted)
        b.node._data._io_thread._post(lambda: time.sleep(0.2))
        first[1].write(b"\0")  # and it has something to say in the same turn
        second = await asyncio.open_connection(HOST, b.ports[1])
        async with asyncio.timeout(LONG_S):
            await asyncio.to_thread(failed.wait, LONG_S)
            assert await first[0].read() == b""
        b.node.publish(STATE, Source(3))
        assert await fetch(a, b, Sink(), range(3)) == [0, 1, 2]
        for _, writer in (first, second):
            writer.close()


@run
async def test_who_opens_a_link_of_the_name_that_we_are_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(3))
        squatted: list[bytes] = []
        opening = a.node._data.open_link

        async def open_link_twice(remote_key: bytes, dial: Dial, agree: Any) -> Link:
            async def agree_and_squat(ask: PeerToPeerOpenLink) -> Any:
                if not squatted:
                    squatted.append(ask.link)
                    a.node._data.accept_link(remote_key, ask)
                return await agree(ask)

            return await opening(remote_key, dial, agree_and_squat)

        monkeypatch.setattr(a.node._data, "open_link", open_link_twice)
        assert await fetch(a, b, Sink(), range(3), progress_s=6) == [0, 1, 2]
        assert squatted
        links = list(a.node._data._links.values())
        connected = [key.data for key in a.node._data._io_thread._selector.get_map().values() if key.data is not None]
        assert sum(isinstance(one, DataConnection) for one in connected) == sum(len(one.connections) for one in links)


@run
async def test_who_asks_for_ever_more_and_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_thread, "_MAX_WAITING_BYTES", 2**24)
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(10_000, 2**20))
        hold = threading.Event()

        def sink(chunk: int, size: int) -> memoryview:
            hold.wait(LONG_S)
            raise WireError("not wanted")

        stream = asyncio.create_task(outcome(fetch(a, b, sink, range(10_000), 100)))  # type: ignore[arg-type]
        await until(lambda: any(link.connections for link in b.node._data._links.values()))
        (theirs,) = b.node._data._links.values()
        await until(lambda: bool(theirs.outgoing))
        while theirs.connections:
            for outgoing in list(theirs.outgoing.values()):
                outgoing.receive_credit(CREDIT)
                outgoing.notify()
            await asyncio.sleep(0.001)
        assert theirs.queue.waiting_bytes <= 2**24
        hold.set()
        stream.cancel()
        await asyncio.wait([stream])


@run
async def test_stopping_in_the_middle_leaves_no_socket() -> None:
    for _ in range(5):
        async with swarm() as (a, b):
            b.node.publish(STATE, Source(1000, 2**18))
            stream = asyncio.create_task(outcome(fetch(a, b, Sink(), range(1000))))
            await until(lambda: any(link.connections for link in b.node._data._links.values()))
            await b.stop()
            await b.start()  # on the same ports
            stream.cancel()
            await asyncio.wait([stream])


@run
async def test_a_sink_that_fails_ends_its_stream_only() -> None:
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(3))

        def sink(chunk: int, size: int) -> memoryview:
            raise ValueError("a fault of ours")

        with pytest.raises(LinkError, match="a fault of ours"):
            await fetch(a, b, sink, range(3), progress_s=0.3)  # type: ignore[arg-type]
        assert await fetch(a, b, Sink(), range(3)) == [0, 1, 2]


def test_dropped_frames_count_no_more() -> None:
    queue = FrameQueue()
    for chunk in range(4):
        queue.put(Frame(chunk % 2, chunk, memoryview(bytes(10))), FrameQueue.USUAL)
    queue.put(Frame(1, 9, memoryview(bytes(5))), FrameQueue.URGENT)
    queue.put(Frame(1, 2, memoryview(b""), kind=CREDIT_FRAME), FrameQueue.CREDIT)
    queue.put(Frame(0, 0, memoryview(bytes(3)), kind=STREAM_CONTROL), FrameQueue.STREAM_CONTROL)
    queue.drop(1)
    assert queue.waiting_bytes == 23
    assert [frame and frame.kind for frame in (queue.pop(with_stream_control=False), queue.pop())] == [
        CREDIT_FRAME,
        STREAM_CONTROL,
    ]
    assert [queue.pop(), queue.pop(), queue.pop()][2] is None
    assert queue.waiting_bytes == 0


@run
async def test_who_accepts_no_links_can_fetch_all_the_same() -> None:
    async with swarm() as (a, b):
        b.node.publish(STATE, Source(3))
        await a.stop()
        async with Node.open(a.keys, HOST, (0, None), a.admit) as guest:
            guest.update_roster((b.entry(),))
            sink = Sink()
            assert [index async for index in guest.fetch(b.peer, STATE, range(3), sink, LONG_S)] == [0, 1, 2]
        await a.start()
