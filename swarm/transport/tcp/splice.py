"""Splicing of two TCP connections: each direction's bytes are passed on, and nothing is kept but what the kernel holds.

On Linux the bytes never enter this process (``splice(2)``). A direction that the receiver does not drain stops being
read, so a slow receiver costs one pipe's bytes, and the sender feels it as it would on a direct connection.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket as sockets
from collections.abc import Callable
from contextlib import suppress

from shoal.swarm.system import fcntl

CHUNK_BYTES = 2**20
"""Most bytes of one direction that are under way in this process."""

_SET_PIPE_SIZE = 1031
"""F_SETPIPE_SZ, which Python does not name on all systems."""

_MAX_IDLE_PIPES = 16

_FEW_BYTES, _REST_S, DATA_REST_S = 2**17, 0.001, 0.008
"""A direction that passes on fewer bytes rests until about so many will be there, at least for the first time and at
most for the second, on the data plane: a call costs as much as the copying of 100 kB. After a pause nothing rests."""

_HALF_OPEN_S = 10.0
"""Once one end has sent its last byte, the other has so long to do the same. Both planes close connections as a whole:
a stranger whose connection was ended must not go on holding a relay's by not closing its own end."""

Meter = Callable[[int, int], float]
"""``meter(direction, size_bytes)``: called with what was passed on, returns for how long to pause that direction.
Direction 0 is from the first connection to the second."""


class _Buffer:
    """Bytes of one direction that the receiver has not taken yet: a pipe, so that they need not be copied."""

    def __init__(self) -> None:
        assert fcntl is not None
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # it stays at 64 KiB for a user with many pipes
            fcntl.fcntl(self._in, _SET_PIPE_SIZE, CHUNK_BYTES)
        self.held = 0

    def fill(self, source: sockets.socket) -> int:
        """Take what has arrived; 0 at the end. Raises ``BlockingIOError``, ``OSError``."""
        got = os.splice(source.fileno(), self._in, CHUNK_BYTES, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)
        self.held += got
        return got

    def drain(self, to: sockets.socket) -> None:
        """Pass on what the receiver takes. Raises ``BlockingIOError``, ``OSError``."""
        while self.held:
            self.held -= os.splice(self._out, to.fileno(), self.held, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


class _CopyingBuffer:
    """The same where there is no ``splice``: a buffer of this process."""

    def __init__(self) -> None:
        self._buffer = bytearray(2**18)
        self._rest = memoryview(b"")

    @property
    def held(self) -> int:
        return len(self._rest)

    def fill(self, source: sockets.socket) -> int:
        got = source.recv_into(self._buffer)
        self._rest = memoryview(self._buffer)[:got]
        return got

    def drain(self, to: sockets.socket) -> None:
        while self._rest:
            self._rest = self._rest[to.send(self._rest) :]

    def close(self) -> None:
        pass


class _Buffers:
    """Buffers that nobody uses at the moment. A direction has one only while it holds bytes."""

    def __init__(self) -> None:
        self._idle: list[_Buffer | _CopyingBuffer] = []

    def take(self) -> _Buffer | _CopyingBuffer:
        if self._idle:
            return self._idle.pop()
        if hasattr(os, "splice") and fcntl is not None:
            with suppress(OSError):  # no descriptor is left for a pipe
                return _Buffer()
        return _CopyingBuffer()

    def give_back(self, buffer: _Buffer | _CopyingBuffer) -> None:
        if buffer.held or len(self._idle) >= _MAX_IDLE_PIPES:
            buffer.close()
        else:
            self._idle.append(buffer)


_buffers = _Buffers()


class Splice:
    """Two connected, non-blocking sockets whose bytes are passed on until both end, or one of them fails.

    ``await ended`` waits for that; both sockets are closed then. Use on the event loop alone."""

    def __init__(
        self,
        first: sockets.socket,
        second: sockets.socket,
        meter: Meter = lambda direction, size: 0.0,
        longest_rest_s: float = _REST_S,
    ) -> None:
        """``longest_rest_s``: the longest time for which bytes may lie here so that more of them go at once."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.last_s = self._loop.time()
        """When bytes were passed on last, on the event loop's clock."""
        self._passed_s = [-math.inf, -math.inf]
        self._sockets = first, second
        self._meter, self._longest_rest_s = meter, longest_rest_s
        self._open = 2
        self._held: list[_Buffer | _CopyingBuffer | None] = [None, None]
        self._pauses: list[asyncio.TimerHandle | None] = [None, None]
        # Not the sockets: of those the event loop makes texts, with two system calls, for errors that it expects.
        self._descriptors = first.fileno(), second.fileno()
        self._listens = [False, False]
        for direction in (0, 1):
            self._listen(direction)

    def close(self) -> None:
        """Close both connections at once."""
        if self.ended.done():
            return
        for direction, buffer in enumerate(self._held):
            self._loop.remove_reader(self._descriptors[direction])
            self._loop.remove_writer(self._descriptors[direction])
            if (pause := self._pauses[direction]) is not None:
                pause.cancel()
            if buffer is not None:
                buffer.close()
        for socket in self._sockets:
            socket.close()
        self.ended.set_result(None)

    def _listen(self, direction: int) -> None:
        if not self._listens[direction]:
            self._listens[direction] = True
            self._loop.add_reader(self._descriptors[direction], self._pass_on, direction)

    def _stop_listening(self, direction: int) -> None:
        if self._listens[direction]:
            self._listens[direction] = False
            self._loop.remove_reader(self._descriptors[direction])

    def _go_on(self, direction: int) -> None:
        """Look at once what has come during a pause, without asking the event loop whether anything has."""
        self._pauses[direction] = None
        self._pass_on(direction)

    def _pass_on(self, direction: int) -> None:
        try:
            self._pass_some_on(direction)
        except Exception:  # a fault of ours: the event loop says it, once, as nothing is read here any more
            self.close()
            raise

    def _pass_some_on(self, direction: int) -> None:
        source, to = self._sockets[direction], self._sockets[1 - direction]
        buffer = _buffers.take()
        try:
            got = buffer.fill(source)
        except BlockingIOError:
            _buffers.give_back(buffer)
            self._listen(direction)
            return
        except OSError:
            _buffers.give_back(buffer)
            self.close()
            return
        if not got:
            _buffers.give_back(buffer)
            self._stop_listening(direction)
            self._end(direction)
            return
        now_s = self._loop.time()
        pause_s = self._meter(direction, got) or self._rest_s(direction, got, now_s)
        self.last_s = self._passed_s[direction] = now_s
        try:
            buffer.drain(to)
        except BlockingIOError:
            self._held[direction] = buffer
            self._stop_listening(direction)
            self._loop.add_writer(self._descriptors[1 - direction], self._drain, direction, pause_s)
            return
        except OSError:
            buffer.close()
            self.close()
            return
        _buffers.give_back(buffer)
        if pause_s:
            self._stop_listening(direction)
            self._pause(direction, pause_s)
        else:
            self._listen(direction)

    def _rest_s(self, direction: int, got: int, now_s: float) -> float:
        since_s = now_s - self._passed_s[direction]
        if got >= _FEW_BYTES or since_s > 2 * self._longest_rest_s:
            return 0.0
        return min(max(since_s * _FEW_BYTES / got, _REST_S), self._longest_rest_s)

    def _pause(self, direction: int, pause_s: float) -> None:
        self._pauses[direction] = self._loop.call_later(pause_s, self._go_on, direction)

    def _drain(self, direction: int, pause_s: float) -> None:
        to, buffer = self._sockets[1 - direction], self._held[direction]
        assert buffer is not None
        try:
            buffer.drain(to)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self.last_s = self._loop.time()
        self._held[direction] = None
        _buffers.give_back(buffer)
        self._loop.remove_writer(self._descriptors[1 - direction])
        if pause_s:
            self._pause(direction, pause_s)
        else:
            self._listen(direction)

    def _end(self, direction: int) -> None:
        """One end sends no more: tell the other one, and close when both have said so, or after a while."""
        self._open -= 1
        if not self._open:
            self.close()
            return
        self._pauses[direction] = self._loop.call_later(_HALF_OPEN_S, self.close)
        try:
            self._sockets[1 - direction].shutdown(sockets.SHUT_WR)
        except OSError:
            self.close()
