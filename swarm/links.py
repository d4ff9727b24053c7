"""What a link consists of: its two ends' streams, their credit, and the buffers that frames are sealed in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from shoal.swarm.sealing import SealedLink

T = TypeVar("T")

MAX_STREAMS_PER_LINK = 64
CREDIT = 8
"""Chunks that may be under way in one stream."""


@dataclass(eq=False)
class Incoming:
    """A stream that we receive: frames in order, at most as many as we gave credit for."""

    next_chunk: int
    frames: asyncio.Queue[tuple[bytes, zmq.Frame] | None] = field(default_factory=lambda: asyncio.Queue(CREDIT))
    gap: bool = False

    def spoil(self) -> None:
        """A frame is missing: whoever waits for it should know now, not at its deadline."""
        self.gap = True
        if self.frames.empty():
            self.frames.put_nowait(None)


@dataclass(eq=False)
class Outgoing:
    """A stream that we send, and how many chunks of it we may send at the moment."""

    credit: int
    task: asyncio.Task[None] | None = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, credit: int) -> None:
        """No honest receiver has more than ``CREDIT`` chunks open; others do not get to fill our memory."""
        self.credit = min(self.credit + credit, 2 * CREDIT)
        self._more.set()

    async def take(self) -> None:
        """Wait until one chunk may be sent."""
        while self.credit == 0:
            self._more.clear()
            await self._more.wait()
        self.credit -= 1

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(eq=False)
class Link:
    """One end of a link: its keys, the socket that it uses, and the streams on it."""

    sealed: SealedLink
    remote_key: bytes
    socket: zmq.asyncio.Socket
    routing: bytes | None
    """The routing id of a link that the other side opened; None for one of ours, with a socket of its own."""
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    incoming: dict[int, Incoming] = field(default_factory=dict)
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    last_frame_s: float = field(default_factory=time.monotonic)
    next_stream: int = 0

    def open_incoming(self, first: int) -> tuple[int, Incoming]:
        """A place for a stream's frames; returns its number too."""
        number = self.next_stream
        self.next_stream += 1
        incoming = self.incoming[number] = Incoming(first)
        return number, incoming

    def close_stream(self, number: int) -> None:
        """Stop sending that stream, if we do."""
        stream = self.outgoing.pop(number, None)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """End all streams, and the socket when it is only ours."""
        for number in list(self.outgoing):
            self.close_stream(number)
        for incoming in self.incoming.values():
            incoming.spoil()
        if self.routing is None:
            self.socket.close(linger=0)


_BUSY_BYTES = 2**18
_BUCKET_S = 0.25


@dataclass
class Meter:
    """Bytes of bulk frames, headers and tags included, and the bandwidth that they have shown."""

    sent_bytes: int = 0
    received_bytes: int = 0
    bandwidth_bps: float = 0.0
    """Of the busiest quarter seconds lately, both directions together; 0 before anything large has moved."""
    _bucket: int = -1
    _bucket_bytes: int = 0

    def sent(self, size: int, now_s: float) -> None:
        self.sent_bytes += size
        self._count(size, now_s)

    def received(self, size: int, now_s: float) -> None:
        self.received_bytes += size
        self._count(size, now_s)

    def _count(self, size: int, now_s: float) -> None:
        bucket = int(now_s / _BUCKET_S)
        if bucket != self._bucket:
            # Only busy moments say what the link can carry; slowly forgotten, for links that get worse.
            if self._bucket_bytes >= _BUSY_BYTES:
                shown = 8 * self._bucket_bytes / _BUCKET_S
                self.bandwidth_bps = max(shown, 0.9 * self.bandwidth_bps)
            self._bucket, self._bucket_bytes = bucket, 0
        self._bucket_bytes += size


class BufferPool:
    """Reuses buffers for sealed frames: allocating per frame costs more than the cipher."""

    def __init__(self) -> None:
        self._busy: list[tuple[bytearray, zmq.MessageTracker]] = []
        self._free: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """A buffer of at least ``size`` bytes that ZeroMQ has finished with."""
        done = [buffer for buffer, tracker in self._busy if tracker.done]
        self._busy = [entry for entry in self._busy if not entry[1].done]
        self._free = (self._free + done)[:16]
        for index, buffer in enumerate(self._free):
            if size <= len(buffer) <= 4 * size:
                return self._free.pop(index)
        del self._free[:1]  # of another size than what is sent now
        return bytearray(size)

    def give_back(self, buffer: bytearray, tracker: zmq.MessageTracker) -> None:
        """Free again once ``tracker`` is done."""
        self._busy.append((buffer, tracker))


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """``asyncio.to_thread`` that, when cancelled, first waits until the thread has left the memory alone.

    The caller of a cancelled fetch may use its buffers for something else at once.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work, *args)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()
        raise
    return future.result()
