"""The gate: who may connect at all. Answers libzmq's question for every handshake (ZAP, ZeroMQ RFC 27).

Callers prove a CURVE key; data connections are no ZeroMQ sockets (``pump.py``). (pyzmq's ``AsyncioAuthenticator``
asks one caller after the other, and dies when a callback raises.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from shoal.swarm.errors import LinkError
from shoal.swarm.sockets import CURVE_DOMAIN

log = logging.getLogger(__name__)

Admit = Callable[[bytes], Awaitable[bool]]
"""May the holder of this raw CURVE key come in? It may ask others; it has ``_ADMIT_S``."""

_ADMIT_S = 10.0
_MAX_UNDECIDED = 256


class Gate:
    """One for each ZeroMQ context; its task lives in ``tasks``."""

    def __init__(self, context: zmq.asyncio.Context, tasks: asyncio.TaskGroup, admit: Admit) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._tasks = tasks
        self._admit = admit
        self._undecided = 0

    def start(self) -> None:
        """Must come before any socket of the context is bound."""
        self._socket.bind("inproc://zeromq.zap.01")
        self._tasks.create_task(self._receive())

    def stop(self) -> None:
        self._socket.close(linger=0)

    async def _receive(self) -> None:
        while not self._socket.closed:
            frames = await self._socket.recv_multipart()
            if self._undecided >= _MAX_UNDECIDED:
                await self._reply(frames, b"")
            else:
                self._undecided += 1
                self._tasks.create_task(self._decide(frames))

    async def _decide(self, frames: list[bytes]) -> None:
        user = b""
        try:
            match frames[4], frames[7:]:
                case (domain, [b"CURVE", key]) if domain == CURVE_DOMAIN:
                    async with asyncio.timeout(_ADMIT_S):
                        user = key.hex().encode() if await self._admit(key) else b""
        except (LinkError, TimeoutError) as error:
            log.info("refused a caller: %s", error or "nobody could say in time whether to let it in")
        finally:
            self._undecided -= 1
        await self._reply(frames, user)

    async def _reply(self, frames: list[bytes], user: bytes) -> None:
        """``user`` becomes the User-Id of every message of the connection; empty refuses it."""
        if self._socket.closed:
            return
        back, empty, version, request = frames[:4]
        status, text = (b"200", b"OK") if user else (b"400", b"not admitted")
        await self._socket.send_multipart([back, empty, version, request, status, text, user, b""])
