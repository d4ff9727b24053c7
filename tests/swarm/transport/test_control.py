"""Connections whose other end has vanished are given up, though libzmq's heartbeats are off; and nothing leaks."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from contextlib import suppress

import pytest
import zmq
from tests.swarm.network import HOST, LONG_S, run, swarm, until

from shoal.swarm.errors import Unreachable
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.messages import PeerToPeerPing, PeerToPeerPong
from shoal.swarm.protocol.types import Message
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.tcp.sockets import PROBES, SILENCE_S

SILENT_S = 0.6
"""Short: the tests wait for it."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a connection has received")


class Proxy:
    """A middlebox that can forget its connections: it acknowledges what comes over them, and passes nothing on."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.connections = 0
        self._to = port
        self._epoch = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *about: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    def forget(self) -> None:
        self._epoch += 1

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection(HOST, self._to)
        self._writers += [writer, there_writer]
        await asyncio.gather(
            self._pass_on(reader, there_writer, self._epoch), self._pass_on(there_reader, writer, self._epoch)
        )

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, epoch: int) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                if epoch == self._epoch:
                    writer.write(data)
            if epoch == self._epoch:
                writer.close()


def ping(channel: Channel, deadline_s: float = LONG_S) -> asyncio.Future[PeerToPeerPong]:
    return asyncio.ensure_future(channel.request(PeerToPeerPing(), PeerToPeerPong, deadline_s))


@run
async def test_a_request_over_a_dead_connection_fails_in_time_and_the_next_one_is_answered() -> None:
    async with swarm() as (a, b), Proxy(b.ports[0]) as proxy:
        a.node.control.silence_s = SILENT_S
        channel = a.node.control.dial(HOST, proxy.port, b.keys.public)
        await ping(channel)
        proxy.forget()
        began_s = time.monotonic()
        with pytest.raises(Unreachable, match="was lost"):
            await ping(channel)
        assert time.monotonic() - began_s < LONG_S / 2
        await ping(channel)
        assert proxy.connections == 2


@run
async def test_whoever_cannot_be_called_is_there_again_for_those_that_ask_it() -> None:
    """Nothing is under way when the connection dies, and only the one that had called can call again."""
    async with swarm() as (a, b), Proxy(b.ports[0]) as proxy:
        a.node.control.silence_s = SILENT_S
        await ping(a.node.control.dial(HOST, proxy.port, b.keys.public))
        before = b.node.control.incoming(a.keys.public)
        assert before is not None
        proxy.forget()
        await until(lambda: b.node.control.incoming(a.keys.public) is not before)
        after = b.node.control.incoming(a.keys.public)
        assert after is not None
        await ping(after)
        assert before.is_broken


@run
async def test_an_answer_that_takes_long_is_no_silence() -> None:
    async with swarm() as (a, b), Proxy(b.ports[0]) as proxy:
        a.node.control.silence_s = SILENT_S

        async def slow(channel: Channel, message: Message) -> Message:
            await asyncio.sleep(4 * SILENT_S)
            return PeerToPeerPong()

        channel = a.node.control.dial(HOST, proxy.port, b.keys.public)
        await ping(channel)
        b.node.control.handle(PeerToPeerPing, slow, scope=1)
        await channel.request(PeerToPeerPing(), PeerToPeerPong, LONG_S, scope=1)
        assert proxy.connections == 1


@run
async def test_who_stood_still_itself_blames_nobody() -> None:
    async with swarm() as (a, b):
        a.node.control.silence_s = SILENT_S
        channel = a.node.control.dial(HOST, b.ports[0], b.keys.public)
        await ping(channel)
        first = b.node.control.incoming(a.keys.public)
        for _ in range(3):
            time.sleep(2 * SILENT_S)  # noqa: ASYNC251 - it stands still
            await asyncio.sleep(SILENT_S / PROBES)
        await ping(channel)
        assert b.node.control.incoming(a.keys.public) is first


@linux
@run
async def test_what_the_kernel_and_libzmq_do_about_dead_connections() -> None:
    async with swarm() as (a, b):
        await ping(a.node.control.dial(HOST, b.ports[0], b.keys.public))
        for descriptors in (
            list(a.node.control._backlog._connections),
            list(b.node.control.guard._callers._by_descriptor),
        ):
            assert len(descriptors) == 1
            with socket.socket(fileno=os.dup(descriptors[0])) as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle_s, every_s, times = (
                    connection.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle_s + every_s * times == SILENCE_S
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE_S
        sockets = [b.node.control._router, *(channel.socket for channel in a.node.control._dialed.values())]
        # Either of the two lets whoever is connected end the process (tests/attacks/test_receive_queue.py).
        assert [(one.heartbeat_ivl, one.rcvhwm) for one in sockets] == [(0, 0)] * 2


# Dialing ------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("fails", ["socket", "monitor", "options", "address"])
@run
async def test_a_call_that_cannot_be_made_leaves_nothing_behind(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(1) as (a,):
        control, context = a.node.control, a.node.control._context
        make, made = context.socket, []
        host = "no such address" if fails == "address" else HOST

        def refuse(*about: object) -> None:
            raise zmq.ZMQError(errno.EMFILE)

        def socket(kind: int) -> object:
            if (fails, kind) in (("socket", zmq.DEALER), ("monitor", zmq.PAIR)):
                refuse()
            made.append(make(kind))  # and kept, or collecting garbage would close it
            return made[-1]

        monkeypatch.setattr(context, "socket", socket)
        if fails == "options":
            monkeypatch.setattr(control, "_configure", refuse)

        def call() -> None:
            for _ in range(10):
                with pytest.raises(Unreachable, match="cannot connect to"):
                    control.dial(host, 1, CurveKeys.fresh().public)

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = descriptors()
        call()
        await until(lambda: descriptors() <= before)  # closed on libzmq's thread
        assert all(one.closed for one in made)
        assert control._dialed == {}


# What waits to be read ----------------------------------------------------------------------------------


@run
async def test_who_leaves_the_network_dials_nobody() -> None:
    async with swarm() as (a, b):
        a.node.control.stop()
        with pytest.raises(Unreachable, match="closing down"):
            a.node.control.dial(HOST, b.node.control_port, b.keys.public)
