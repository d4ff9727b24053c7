"""A link between two members: its keys, its streams with their credit, and its queue of frames."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shoal.swarm.errors import LinkClosed, LinkError, ShoalError, WireError
from shoal.swarm.transport.bulk.frame_crypto import CHUNK, SealedLink

if TYPE_CHECKING:
    from shoal.swarm.protocol.types import PathKind
    from shoal.swarm.transport.bulk.data_connection import DataConnection
    from shoal.swarm.transport.bulk.shared_memory import OfferedMemory, SharedMemory

log = logging.getLogger(__name__)

ChunkSink = Callable[[int, int], memoryview]
"""``sink(chunk, size_bytes)`` returns the writable memory for a chunk, on the I/O thread; raises ``WireError`` to
refuse the chunk."""

MAX_STREAMS_PER_LINK = 128
_MAX_WAITING_CONTROLS = 4 * MAX_STREAMS_PER_LINK
CREDIT, MAX_CREDIT = 8, 64
"""Chunks of one stream that may be in flight: at first, and at most. Small chunks over long distances need more than
the first eight."""

_WINDOW_BYTES = 2**22


class Frame(NamedTuple):
    """A frame that waits to be sent: a chunk, or one of the other kinds of ``frame_crypto``.

    ``scope``: of the blob that the stream belongs to."""

    stream: int
    chunk: int
    payload: memoryview
    scope: int = 0
    kind: int = CHUNK


class FrameQueue:
    """Queue of frames to send over a link, by rank: stream control, credit, urgent chunks, usual chunks.

    Urgent chunks are those that another member waits for before it can continue."""

    STREAM_CONTROL, CREDIT, URGENT, USUAL = range(4)

    def __init__(self) -> None:
        self._frames: tuple[deque[Frame], ...] = tuple(deque() for _ in range(4))
        # Two counters, as the event loop writes only the first and the I/O thread only the second.
        self._put_bytes = self._popped_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._popped_bytes

    def put(self, frame: Frame, rank: int) -> None:
        self._put_bytes += frame.payload.nbytes
        self._frames[rank].append(frame)

    def pop(self, *, with_stream_control: bool = True) -> Frame | None:
        """Remove and return the next frame. Stream control messages keep their order by using one connection only."""
        for frames in self._frames if with_stream_control else self._frames[1:]:
            if frames:
                frame = frames.popleft()
                self._popped_bytes += frame.payload.nbytes
                return frame
        return None

    def drop(self, stream: int) -> None:
        """Remove the chunks of a stream; on the I/O thread, like ``pop``."""
        for frames in self._frames[self.URGENT :]:
            for _ in range(len(frames)):
                frame = frames.popleft()
                if frame.stream == stream:
                    self._popped_bytes += frame.payload.nbytes
                else:
                    frames.append(frame)

    def clear(self) -> None:
        while self.pop() is not None:
            pass


class IncomingStream:
    """A stream that this side receives: chunks arrive in any order within the credit and are consumed in order.

    The I/O thread fills it and the event loop consumes it."""

    def __init__(self, chunks: range, sink: ChunkSink, scope: int = 0) -> None:
        """``scope``: of the blob; chunks of other scopes do not belong to this stream."""
        self.scope = scope
        self._chunks = chunks
        self._sink = sink
        self._next = chunks.start
        self._granted = chunks.start + CREDIT
        self._arrived: set[int] = set()
        self._chunk_bytes = 1
        self._trouble: ShoalError | None = None
        self._ends_before = chunks.stop
        self._end: ShoalError | None = None
        self.is_announced = False
        self._changed = asyncio.Event()
        # Held while a chunk is written to its sink: after `close` the receiver may use that memory for something else.
        self._lock = threading.Lock()
        self._closed = False

    def receive(self, chunk: int, size: int, open_into: Callable[[memoryview], None]) -> bool:
        """Decrypt a chunk into its sink; returns whether it was accepted. Raises what ``open_into`` raises."""
        with self._lock:
            if self._closed or self._trouble is not None:
                return False
            if not self._next <= chunk < min(self._granted, self._ends_before) or chunk in self._arrived:
                self._trouble = LinkError(f"chunk {chunk} came without credit or twice")
                return False
            try:
                place = self._sink(chunk, size)
            except LinkError as error:
                self._trouble = error
                return False
            except Exception as error:  # fails this stream, not the I/O thread
                log.exception("no memory for chunk %d", chunk)
                self._trouble = LinkError(f"no memory for chunk {chunk}: {error!r}")
                return False
            open_into(place)
            self._chunk_bytes = max(size, self._chunk_bytes)
            self._arrived.add(chunk)
            return True

    def notify(self) -> None:
        """Wake up the consumer; on the event loop."""
        self.is_announced = False
        self._changed.set()

    def fail(self, trouble: ShoalError) -> None:
        """End the stream with an error; on the event loop."""
        self._trouble = self._trouble or trouble
        self._changed.set()

    def end(self, following: int, why: ShoalError) -> None:
        """End the stream with the other side's error once the chunks before ``following`` are consumed, which are on
        their way; on the event loop."""
        self._ends_before, self._end = min(following, self._chunks.stop), why
        self._changed.set()

    async def next_chunk(self, wait_s: float) -> int:
        """Wait until the next chunk lies in its sink. Raises ``LinkError``, the other side's ``ShoalError``, or
        ``TimeoutError`` after ``wait_s``."""
        while self._next not in self._arrived:
            if self._trouble is not None:
                raise self._trouble
            if self._end is not None and self._next >= self._ends_before:
                raise self._end
            self._changed.clear()
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._arrived.remove(self._next)
        self._next += 1
        return self._next - 1

    def new_credit(self, in_use: int = 0) -> int:
        """Credit to grant to the sender now, in chunks; 0 while it is too little to be worth a frame.

        ``in_use``: how many of the consumed chunks still occupy their memory."""
        window = max(CREDIT, min(MAX_CREDIT, _WINDOW_BYTES // self._chunk_bytes))
        credit = self._next - in_use + window - self._granted
        if credit < window // 2:
            return 0
        self._granted += credit
        return credit

    def close(self) -> None:
        """Guarantee that nothing is written to the sinks any more."""
        with self._lock:
            self._closed = True


@dataclass(eq=False)
class OutgoingStream:
    """A stream that this side sends, with the credit that is left for it, in chunks, and the first one not sent."""

    credit: int
    following: int
    task: asyncio.Task[None] | None = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _received: deque[int] = field(default_factory=lambda: deque(maxlen=2 * CREDIT))

    def receive_credit(self, credit: int) -> bool:
        """On the I/O thread: store received credit; returns whether the event loop has to call ``notify``."""
        self._received.append(credit)
        return len(self._received) == 1

    def notify(self) -> None:
        """On the event loop: add the received credit.

        No honest receiver has more than ``MAX_CREDIT`` chunks in flight. Others must not fill our memory."""
        while self._received:
            self.credit = min(self.credit + self._received.popleft(), MAX_CREDIT)
            self._more.set()

    async def use_credit(self) -> None:
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
    """One end of a link: its keys, its connections, and the streams on it."""

    sealed: SealedLink
    remote_key: bytes
    is_ours: bool
    """Whether this side opened it."""
    path: PathKind = "direct"
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    incoming: dict[int, IncomingStream] = field(default_factory=dict)
    outgoing: dict[int, OutgoingStream] = field(default_factory=dict)
    last_frame_s: float = field(default_factory=time.monotonic)
    next_stream: int = 0
    memory: SharedMemory | None = None
    """Memory in which large frames are passed, between processes of one machine."""
    offered: OfferedMemory | None = None
    """That memory, until the other side has opened it."""
    was_offered: bool = False
    """Whether the other side has offered memory; it may do so once."""
    # The I/O thread uses these.
    connections: list[DataConnection] = field(default_factory=list)
    queue: FrameQueue = field(default_factory=FrameQueue)
    is_flushing: bool = False
    _controls: deque[bytes] = field(default_factory=deque)

    @property
    def remote_host(self) -> str:
        """Address of the other end; empty where no connection is left."""
        for connection in list(self.connections):
            if connection.host:
                return connection.host
            with suppress(OSError):
                return str(connection.socket.getpeername()[0])
        return ""

    def open_incoming(self, chunks: range, sink: ChunkSink, scope: int) -> tuple[int, IncomingStream]:
        """Open a stream to receive on; returns its number and the stream."""
        number = self.next_stream
        self.next_stream += 1
        incoming = self.incoming[number] = IncomingStream(chunks, sink, scope)
        return number, incoming

    def close_incoming(self, number: int) -> None:
        """Discard everything that still arrives for a stream."""
        incoming = self.incoming.pop(number, None)
        if incoming is not None:
            incoming.close()

    def receive_stream_control(self, control: bytes) -> bool:
        """On the I/O thread: store a stream control message; returns whether the event loop has to fetch it.

        Raises ``WireError`` when more messages wait than the streams of a link can need."""
        self._controls.append(control)
        if len(self._controls) > _MAX_WAITING_CONTROLS:
            raise WireError("more stream control messages than there can be streams")
        return len(self._controls) == 1

    def pop_stream_controls(self) -> Iterator[bytes]:
        """On the event loop: remove and yield the received stream control messages."""
        while self._controls:
            yield self._controls.popleft()

    def withdraw_memory(self) -> None:
        """Close the descriptor of the offered memory, so that no other process can open it any more."""
        if self.offered is not None:
            self.offered.close()
            self.offered = None

    def close_outgoing(self, number: int) -> None:
        """Stop sending a stream, if it is being sent."""
        stream = self.outgoing.pop(number, None)
        if stream is not None:
            stream.close()

    @property
    def is_idle(self) -> bool:
        """Whether no stream uses the link."""
        return not self.incoming and not self.outgoing

    def close(self) -> None:
        """End all streams."""
        self.withdraw_memory()
        self.memory = None
        for number in list(self.outgoing):
            self.close_outgoing(number)
        for incoming in list(self.incoming.values()):
            incoming.fail(LinkClosed("the link was closed"))
