"""A stranger that speaks the wire itself, and joins under one new identity after the other.

    joiner.py INVITE SOURCE SECONDS          as fast as it can; prints a JSON line every second
    joiner.py INVITE SOURCE once HOST PORT   once, naming that address; prints the answer's class or error code
    joiner.py INVITE SOURCE as FILE          once, with the identity in that file

``SOURCE``: the address that it calls from. All that were let in stay, and ask for the whole roster time and again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils import z85

from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerJoinAccepted,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToPeerPong,
    RequestFailed,
)
from shoal.swarm.protocol.types import Address, DeviceInfo, Message
from shoal.swarm.protocol.wire import Envelope, decode, encode

AT_ONCE = 24
ANSWER_S = 8.0
BEAT_S = 0.2
HEARTBEAT = PeerToCoordinatorHeartbeat(
    round=0,
    activity="here",
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


class Joiner:
    """Joins again and again. ``admitted``, ``refused``: number of joins; ``received_bytes``: all that was received."""

    def __init__(self, invite: Invite, source: str) -> None:
        self.admitted = self.refused = self.received_bytes = 0
        self._invite, self._source = invite, source
        self._staying: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = 20_000

    async def flood(self, seconds: float) -> None:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._join_on_and_on(tasks)) for _ in range(AT_ONCE)]
            while time.monotonic() < began_s + seconds:
                await asyncio.sleep(1.0)
                said = {"admitted": self.admitted, "refused": self.refused, "bytes": self.received_bytes}
                print(json.dumps(said | {"seconds": time.monotonic() - began_s}), flush=True)
            for task in [*running, *self._staying]:
                task.cancel()
        self._context.destroy(linger=0)

    async def _join_on_and_on(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            socket, keys = self._open(), CurveKeys.fresh()
            self._connect(socket, keys)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    answer = await self._join(socket, keys, "", None)
                    if isinstance(answer, CoordinatorToPeerJoinAccepted):
                        self.admitted += 1
                        self._staying.append(tasks.create_task(self._stay(socket)))
                        continue
                    self.refused += 1
            socket.close(linger=0)

    async def _stay(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    while True:
                        self.received_bytes += len(await socket.recv())
            await socket.send(encode(Envelope("request", 7, HEARTBEAT, run=self._invite.run)))

    async def once(self, host: str, port: int | None, identity: Identity | None = None) -> str:
        """Join once with that address; return the answer's class, or the error's code and message."""
        socket, keys = self._open(), CurveKeys.fresh()
        self._connect(socket, keys)
        async with asyncio.timeout(4 * ANSWER_S):
            answer = await self._join(socket, keys, host, port, identity)
        self._context.destroy(linger=0)
        return answer.code + ": " + answer.message if isinstance(answer, RequestFailed) else type(answer).__name__

    async def _join(
        self,
        socket: zmq.asyncio.Socket,
        keys: CurveKeys,
        host: str,
        port: int | None,
        identity: Identity | None = None,
    ) -> Message:
        listening = self._open(zmq.ROUTER)
        listening.curve_server = True
        self._show(listening, keys)
        own_port = listening.bind_to_random_port(f"tcp://{self._source}")
        pings = asyncio.create_task(_answer_pings(listening))
        ask = PeerToCoordinatorJoinRun(
            run=self._invite.run,
            certificate=(identity or Identity.generate()).certify(keys),
            name="stranger",
            role="trainer",
            device=DeviceInfo(kind="cpu", name="none", memory_bytes=0),
            addresses=(Address(host=host, control_port=port or own_port, data_port=port or own_port),),
            token=self._invite.token,
        )
        try:
            await socket.send(encode(Envelope("request", 1, ask, run=self._invite.run)))
            while True:
                data = await socket.recv()
                self.received_bytes += len(data)
                envelope = decode(data)
                if envelope.kind == "reply":
                    return envelope.message
        finally:
            pings.cancel()
            listening.close(linger=0)

    def _open(self, kind: int = zmq.DEALER) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    def _connect(self, socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
        self._show(socket, keys)
        socket.curve_serverkey = z85.encode(self._invite.key)
        socket.connect(f"tcp://{self._source}:0;{self._invite.addresses[0]}")

    def _show(self, socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
        socket.curve_publickey, socket.curve_secretkey = z85.encode(keys.public), z85.encode(keys.secret)


async def _answer_pings(listening: zmq.asyncio.Socket) -> None:
    while True:
        routing, data = await listening.recv_multipart()
        await listening.send_multipart([routing, encode(Envelope("reply", decode(data).number, PeerToPeerPong()))])


if __name__ == "__main__":
    _, invite, source, what, *named = sys.argv
    joiner = Joiner(Invite.parse(invite), source)
    if what == "once":
        print(asyncio.run(joiner.once(named[0], int(named[1]))), flush=True)
    elif what == "as":
        print(asyncio.run(joiner.once("", None, Identity.load_or_create(Path(named[0])))), flush=True)
    else:
        asyncio.run(joiner.flood(float(what)))
