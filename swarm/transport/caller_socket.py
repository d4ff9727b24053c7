"""A ROUTER socket on an event loop, for thousands of callers: without a future for each message.

``zmq.asyncio`` asks libzmq several times about each message and schedules callbacks for it, which costs more than
decoding a heartbeat. Here one callback says that something may have come, and a reader takes what there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import zmq
import zmq.asyncio

_SHARED_BYTES = 2**14
"""Size from which a frame is not copied: less is copied faster than libzmq tells that it needs the memory no more."""


class CallerSocket:
    """Reads and writes of one ROUTER socket, by one reader; ``socket`` is for its options and its end."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self._direct: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._direct.copy_threshold = _SHARED_BYTES
        self._descriptor = int(self._direct.get(zmq.FD))
        self._may_read = asyncio.Event()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._may_read.set)

    async def receive(self) -> list[zmq.Frame]:
        """Return the next message's frames, without suspending while there are any; empty once it is closed."""
        while not self._is_closed:
            try:
                return self._direct.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                await self._may_read.wait()
                self._may_read.clear()
        return []

    def send(self, routing: bytes, frames: Iterable[bytes]) -> None:
        """Send at once, each frame as a message, large ones without copies: thousands may wait for the same plan.

        Raises ``zmq.Again`` for a caller that does not read, and other ``zmq.ZMQError``."""
        try:
            for frame in frames:
                is_large = len(frame) >= _SHARED_BYTES
                self._direct.send_multipart([routing, frame], zmq.DONTWAIT, copy=not is_large)
        finally:
            self._may_read.set()  # libzmq tells of arrivals once, and sending may have taken that in

    def close(self, linger_ms: int) -> None:
        """Close the socket; the reader ends."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._descriptor)
            self._may_read.set()
            self.socket.close(linger=linger_ms)
