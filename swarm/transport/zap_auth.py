"""Admission of control connections: answers libzmq's request for each handshake (ZAP, ZeroMQ RFC 27).

Callers prove that they hold a CURVE key. Data connections do not use ZeroMQ (``io_thread.py``). pyzmq's own
``AsyncioAuthenticator`` handles one caller after the other, and ends when a callback raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.addresses import network_of
from shoal.swarm.transport.limits.caller_guard import CallerGuard
from shoal.swarm.transport.tcp.sockets import CURVE_DOMAIN

log = logging.getLogger(__name__)

Admit = Callable[[bytes], Awaitable[bool]]
"""Decides whether the holder of a raw CURVE key may connect, within ``_ADMIT_S``."""

_ADMIT_S = 10.0
_MAX_UNDECIDED, _MAX_UNDECIDED_PER_NETWORK = 256, 64


class ZapAuthenticator:
    """The authenticator of one ZeroMQ context; its task lives in ``tasks``."""

    def __init__(
        self, context: zmq.asyncio.Context, tasks: asyncio.TaskGroup, admit: Admit, guard: CallerGuard
    ) -> None:
        """``guard``: knows which keys are members', and which strangers have sent too much."""
        self._socket = context.socket(zmq.ROUTER)
        self._tasks = tasks
        self._admit = admit
        self._guard = guard
        self._undecided: Counter[str] = Counter()

    def start(self) -> None:
        """Start to answer; must precede the binding of any other socket of the context."""
        self._socket.bind("inproc://zeromq.zap.01")
        self._tasks.create_task(self._receive())

    def stop(self) -> None:
        self._socket.close(linger=0)

    async def _receive(self) -> None:
        while not self._socket.closed:
            frames = await self._socket.recv_multipart()
            match frames[4], frames[7:]:
                case (domain, [b"CURVE", key]) if domain == CURVE_DOMAIN:
                    await self._admit_or_refuse(frames, key, self._network_of(frames[5]))
                case _:
                    await self._reply(frames, b"")

    def _network_of(self, address: bytes) -> str:
        return network_of(self._guard.origins.of(address.decode("ascii", "replace")))

    async def _admit_or_refuse(self, frames: list[bytes], key: bytes, network: str) -> None:
        """Refuse strangers that are too many or sent too much; members never wait because of strangers."""
        too_many = self._undecided.total() >= _MAX_UNDECIDED or self._undecided[network] >= _MAX_UNDECIDED_PER_NETWORK
        if not self._guard.is_member(key) and (too_many or self._guard.refuses_handshake(key)):
            await self._reply(frames, b"")
        else:
            self._undecided[network] += 1
            self._tasks.create_task(self._decide(frames, key, network))

    async def _decide(self, frames: list[bytes], key: bytes, network: str) -> None:
        user = b""
        try:
            async with asyncio.timeout(_ADMIT_S):
                user = key.hex().encode() if await self._admit(key) else b""
        except (LinkError, TimeoutError) as error:
            log.info("refused a caller: %s", error or "whether it is a member was not known in time")
        finally:
            self._undecided[network] -= 1
            if not self._undecided[network]:
                del self._undecided[network]
        await self._reply(frames, user)

    async def _reply(self, frames: list[bytes], user: bytes) -> None:
        """Answer libzmq. ``user`` becomes the User-Id of the connection's messages; empty refuses the connection."""
        if self._socket.closed:
            return
        back, empty, version, request = frames[:4]
        status, text = (b"200", b"OK") if user else (b"400", b"not admitted")
        await self._socket.send_multipart([back, empty, version, request, status, text, user, b""])
