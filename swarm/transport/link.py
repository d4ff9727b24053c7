"""A link between two members: its streams with their credit, its queue of frames, and its TCP connections.

Frames are received and sent without blocking or copying: a length, a header, a sealed body. Where the two ends share
memory, only the place of the body goes over the connection, and the length says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shoal.swarm.errors import LinkClosed, LinkError, ShoalError, WireError
from shoal.swarm.transport.frame_crypto import CHUNK, HEADER_BYTES, TAG_BYTES, SealedLink
from shoal.swarm.transport.shared_memory import RingReader

if TYPE_CHECKING:
    from shoal.swarm.transport.shared_memory import Offered, SharedMemory


class Frame(NamedTuple):
    """A chunk's bytes that are to be sent in a stream, or what is said of one: see ``sealing`` for the kinds;
    ``scope``: of the blob that they are of."""

    stream: int
    chunk: int
    payload: memoryview
    scope: int = 0
    kind: int = CHUNK


class FrameQueue:
    """What waits to be sent over a link: messages and credit first, then what others wait for to go on, then everything
    else."""

    ORDER, CREDIT, URGENT, USUAL = range(4)

    def __init__(self) -> None:
        self._frames: tuple[deque[Frame], ...] = tuple(deque() for _ in range(4))
        # Each of the two threads counts in one of them.
        self._put_bytes = self._taken_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def put(self, frame: Frame, rank: int) -> None:
        self._put_bytes += frame.payload.nbytes
        self._frames[rank].append(frame)

    def take(self, *, orders: bool = True) -> Frame | None:
        """The next one; without ``orders`` no message: they keep their order on one connection of a link."""
        for frames in self._frames if orders else self._frames[1:]:
            if frames:
                frame = frames.popleft()
                self._taken_bytes += frame.payload.nbytes
                return frame
        return None

    def drop(self, stream: int) -> None:
        """Forget the chunks of that stream; on the data plane's thread, as ``take``."""
        for frames in self._frames[self.URGENT :]:
            for _ in range(len(frames)):
                frame = frames.popleft()
                if frame.stream == stream:
                    self._taken_bytes += frame.payload.nbytes
                else:
                    frames.append(frame)

    def clear(self) -> None:
        while self.take() is not None:
            pass


log = logging.getLogger(__name__)

Sink = Callable[[int, int], memoryview]
"""``sink(chunk, size_bytes)`` gives the writable memory for that chunk, on the data plane's thread; raises
``WireError`` to refuse it."""

MAX_STREAMS_PER_LINK = 128
_MOST_ORDERS = 4 * MAX_STREAMS_PER_LINK
CREDIT, MOST_CREDIT = 8, 64
"""Chunks that may be under way in one stream: more than the first eight if they are small, for long ways."""

_WINDOW_BYTES = 2**22


class Incoming:
    """A stream that we receive: its chunks arrive in any order within our credit, and are taken in order.

    Filled on the data plane's thread, taken on the event loop.
    """

    def __init__(self, chunks: range, sink: Sink, scope: int = 0) -> None:
        """``scope``: the blob's; what comes for another one is not this stream's."""
        self.scope = scope
        self._chunks = chunks
        self._sink = sink
        self._next = chunks.start
        self._granted = chunks.start + CREDIT
        self._arrived: set[int] = set()
        self._chunk_bytes = 1
        self._trouble: ShoalError | None = None
        self.is_announced = False
        self._changed = asyncio.Event()
        # Held while a chunk is written to its sink: whoever closes the stream may use that memory afterwards.
        self._lock = threading.Lock()
        self._closed = False

    def receive(self, chunk: int, size: int, open_into: Callable[[memoryview], None]) -> bool:
        """Decrypt a chunk into its sink; returns whether it was wanted. Raises what ``open_into`` raises."""
        with self._lock:
            if self._closed or self._trouble is not None:
                return False
            if not self._next <= chunk < min(self._granted, self._chunks.stop) or chunk in self._arrived:
                self._trouble = LinkError(f"chunk {chunk} came out of turn")
                return False
            try:
                place = self._sink(chunk, size)
            except LinkError as error:
                self._trouble = error
                return False
            except Exception as error:  # it is this stream's fault, and not the thread's
                log.exception("no place for chunk %d", chunk)
                self._trouble = LinkError(f"no place for chunk {chunk}: {error!r}")
                return False
            open_into(place)
            self._chunk_bytes = max(size, self._chunk_bytes)
            self._arrived.add(chunk)
            return True

    def notify(self) -> None:
        """Something has changed: on the event loop."""
        self.is_announced = False
        self._changed.set()

    def fail(self, trouble: ShoalError) -> None:
        """No more will come: on the event loop."""
        self._trouble = self._trouble or trouble
        self._changed.set()

    async def next(self, wait_s: float) -> int:
        """The next chunk, once it is in its sink. Raises ``LinkError``, the other side's ``ShoalError``, or
        ``TimeoutError`` after ``wait_s``."""
        while self._next not in self._arrived:
            if self._trouble is not None:
                raise self._trouble
            self._changed.clear()
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._arrived.remove(self._next)
        self._next += 1
        return self._next - 1

    def grant(self, in_use: int = 0) -> int:
        """How many chunks more the other side is to be told that it may send; 0 while that is not worth a frame.
        ``in_use``: of those that were taken."""
        window = max(CREDIT, min(MOST_CREDIT, _WINDOW_BYTES // self._chunk_bytes))
        credit = self._next - in_use + window - self._granted
        if credit < window // 2:
            return 0
        self._granted += credit
        return credit

    def close(self) -> None:
        """Nothing is written to the sinks any more."""
        with self._lock:
            self._closed = True


@dataclass(eq=False)
class Outgoing:
    """A stream that we send, and how many chunks of it we may send at the moment."""

    credit: int
    task: asyncio.Task[None] | None = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _received: deque[int] = field(default_factory=lambda: deque(maxlen=2 * CREDIT))

    def receive(self, credit: int) -> bool:
        """On the data plane's thread: more credit has come; returns whether ``notify`` is still to be called."""
        self._received.append(credit)
        return len(self._received) == 1

    def notify(self) -> None:
        """On the event loop: credit was received."""
        while self._received:
            self.add(self._received.popleft())

    def add(self, credit: int) -> None:
        """No honest receiver has more than ``MOST_CREDIT`` chunks open; others do not get to fill our memory."""
        self.credit = min(self.credit + credit, MOST_CREDIT)
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
    """One end of a link: its keys, its connections, and the streams on it."""

    sealed: SealedLink
    remote_key: bytes
    is_ours: bool
    """Whether we opened it."""
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    incoming: dict[int, Incoming] = field(default_factory=dict)
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    last_frame_s: float = field(default_factory=time.monotonic)
    next_stream: int = 0
    memory: SharedMemory | None = None
    """Where frames lie on their way, between processes of one machine."""
    offered: Offered | None = None
    """That memory, until the other side has opened it."""
    was_offered: bool = False
    """Whether the other side has offered memory: once is enough."""
    # The data plane's thread works on these.
    connections: list[Connection] = field(default_factory=list)
    queue: FrameQueue = field(default_factory=FrameQueue)
    is_flushing: bool = False
    _orders: deque[bytes] = field(default_factory=deque)

    def open_incoming(self, chunks: range, sink: Sink, scope: int) -> tuple[int, Incoming]:
        """A place for the chunks of a stream of that scope; returns its number too."""
        number = self.next_stream
        self.next_stream += 1
        incoming = self.incoming[number] = Incoming(chunks, sink, scope)
        return number, incoming

    def close_incoming(self, number: int) -> None:
        """Stop taking what comes for that stream."""
        incoming = self.incoming.pop(number, None)
        if incoming is not None:
            incoming.close()

    def order(self, order: bytes) -> bool:
        """On the data plane's thread: the other side has sent a message; returns whether ``orders`` is still to be
        taken. Raises ``WireError`` when it sends more than anybody has to say."""
        self._orders.append(order)
        if len(self._orders) > _MOST_ORDERS:
            raise WireError("more messages about streams than there can be streams")
        return len(self._orders) == 1

    def orders(self) -> Iterator[bytes]:
        """On the event loop: what was received, each once."""
        while self._orders:
            yield self._orders.popleft()

    def withdraw(self) -> None:
        """Nobody can open our memory by what was said of it any more."""
        if self.offered is not None:
            self.offered.close()
            self.offered = None

    def close_stream(self, number: int) -> None:
        """Stop sending that stream, if we do."""
        stream = self.outgoing.pop(number, None)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """End all streams."""
        self.withdraw()
        self.memory = None
        for number in list(self.outgoing):
            self.close_stream(number)
        for incoming in list(self.incoming.values()):
            incoming.fail(LinkClosed("the link was closed"))


_BUSY_BYTES = 2**18
_BUCKET_S = 0.25
_STILL_TRUE = 0.99
"""Of what a link has shown, after a busy bucket that showed less."""


@dataclass
class Meter:
    """Bytes of bulk frames, headers and tags included, and the bandwidth that they have shown."""

    sent_bytes: int = 0
    received_bytes: int = 0
    bandwidth_bps: float = 0.0
    """Of the busiest quarter seconds lately, both directions together; 0 before anything large has moved."""
    probed_bps: float = 0.0
    """What a probe has shown, before anything large has moved."""
    sent_in: Counter[int] = field(default_factory=Counter)
    received_in: Counter[int] = field(default_factory=Counter)
    """The same bytes by scope."""
    _bucket: int = -1
    _bucket_bytes: int = 0

    def sent(self, size: int, now_s: float, scope: int = 0) -> None:
        self.sent_bytes += size
        self.sent_in[scope] += size
        self._count(size, now_s)

    def received(self, size: int, now_s: float, scope: int = 0) -> None:
        self.received_bytes += size
        self.received_in[scope] += size
        self._count(size, now_s)

    def of(self, scope: int) -> tuple[int, int]:
        """Bytes sent and received, of a stage's scope; for the run all that there were."""
        return (self.sent_in[scope], self.received_in[scope]) if scope else (self.sent_bytes, self.received_bytes)

    def _count(self, size: int, now_s: float) -> None:
        bucket = int(now_s / _BUCKET_S)
        if bucket != self._bucket:
            # Only busy moments say what the link can carry; slowly forgotten, for links that get worse: who has
            # little to do in a round has no slower link.
            if self._bucket_bytes >= _BUSY_BYTES:
                shown = 8 * self._bucket_bytes / _BUCKET_S
                self.bandwidth_bps = max(shown, _STILL_TRUE * self.bandwidth_bps)
            self._bucket, self._bucket_bytes = bucket, 0
        self._bucket_bytes += size


MAX_CHUNK_BYTES = 2**22 + 2**16
"""Of one chunk's payload: 4 MiB (2**20 float32, 2**22 int8 elements) and some room for scales and its header."""

_SIZE_BYTES = 4
PREFIX_BYTES = _SIZE_BYTES + HEADER_BYTES
"""In front of every sealed body: its length, then its header."""

_IS_PLACE = 2**31
"""In a length: what follows the header is where the body begins in shared memory."""

_PLACE_BYTES = 8
_WORTH_A_PLACE_BYTES = 2**14

READ_BYTES = 2**14
"""Of a body as much has to have arrived before we look again: a packet at a time costs more than opening it does. With
more, Linux makes room for it at once and lets the window grow no further."""


class Connection:
    """One data socket, which must not block: the frame that is being received, and the one that is being sent."""

    def __init__(self, socket: sockets.socket, link: Link | None, since_s: float) -> None:
        """``link``: None until the other side has said which one it is."""
        self.socket = socket
        self.link = link
        self.since_s = since_s
        self.is_blocked = False
        self.received_bytes = 0
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._prefix_filled = 0
        self._header = b""
        self._body = memoryview(bytearray(TAG_BYTES))
        self._body_bytes = self._body_left = 0
        self._placed_bytes = 0
        self._lent: RingReader | None = None
        self._awaited_bytes = 1
        self._sealed = bytearray()
        self._unsent = memoryview(b"")

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def receive(self, low_water_bytes: int = READ_BYTES) -> tuple[bytes, memoryview]:
        """The next frame's header and sealed body, good until ``release``, which comes before the next call; until
        there is a frame, the socket is readable when so much more of it has come.

        Raises ``BlockingIOError`` when more has yet to come, ``OSError``, ``WireError`` for a frame of no good size or
        place."""
        if not self._header:
            while self._prefix_filled < PREFIX_BYTES:
                self._prefix_filled += self._read([self._prefix[self._prefix_filled :]])
            size = int.from_bytes(self._prefix[:_SIZE_BYTES], "big")
            is_placed, size = bool(size & _IS_PLACE), size & ~_IS_PLACE
            limit = TAG_BYTES if self.link is None else MAX_CHUNK_BYTES + TAG_BYTES
            if not TAG_BYTES <= size <= limit:
                raise WireError(f"a bulk frame of {size} bytes")
            self._header, self._prefix_filled = bytes(self._prefix[_SIZE_BYTES:]), 0
            self._placed_bytes = size if is_placed else 0
            size = _PLACE_BYTES if is_placed else size
            if len(self._body) < size:
                self._body = memoryview(bytearray(size))
            self._body_bytes = self._body_left = size
        while self._body_left:
            rest = self._body[self._body_bytes - self._body_left : self._body_bytes]
            try:
                got = self._read([rest, self._prefix])
            except BlockingIOError:
                self._await(min(self._body_left, low_water_bytes))
                raise
            self._prefix_filled = max(0, got - self._body_left)
            self._body_left -= min(got, self._body_left)
        self._await(1)
        header, self._header = self._header, b""
        body = self._body[: self._body_bytes]
        return header, self._find(body) if self._placed_bytes else body

    def _find(self, place: memoryview) -> memoryview:
        memory = None if self.link is None else self.link.memory
        if memory is None:
            raise WireError("a place in memory that is not shared")
        self._lent = memory.reader
        return self._lent.find(int.from_bytes(place, "big"), self._placed_bytes)

    def release(self) -> None:
        """The last frame is not needed any more."""
        if self._lent is not None:
            self._lent.free()
            self._lent = None

    def _await(self, size: int) -> None:
        """The socket is readable from so many bytes on."""
        if size != self._awaited_bytes:
            self._awaited_bytes = size
            self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, size)

    def _read(self, places: list[memoryview]) -> int:
        got = self.socket.recvmsg_into(places)[0]
        if got == 0:
            raise ConnectionResetError("closed by the other side")
        self.received_bytes += got
        return got

    def put(self, link: Link, unsealed: Frame) -> int:
        """Seal a frame for sending; returns its bytes. Everything before must have been sent."""
        header = link.sealed.next_header(unsealed.stream, unsealed.chunk, unsealed.scope, unsealed.kind)
        size = unsealed.payload.nbytes + TAG_BYTES
        if size >= _WORTH_A_PLACE_BYTES and self._put_in_memory(link, header, unsealed.payload):
            return PREFIX_BYTES + size
        if len(self._sealed) < PREFIX_BYTES + size:
            self._sealed = bytearray(PREFIX_BYTES + size)
        frame = memoryview(self._sealed)[: PREFIX_BYTES + size]
        frame[:_SIZE_BYTES] = size.to_bytes(_SIZE_BYTES, "big")
        frame[_SIZE_BYTES:PREFIX_BYTES] = header
        link.sealed.seal(header, unsealed.payload, frame[PREFIX_BYTES:])
        self._unsent = frame
        return PREFIX_BYTES + size

    def _put_in_memory(self, link: Link, header: bytes, payload: memoryview) -> bool:
        """Seal it there, if there is room; the places of one direction go over one connection, in their order."""
        memory, size = link.memory, payload.nbytes + TAG_BYTES
        if memory is None or not memory.is_shared or self is not link.connections[0]:
            return False
        place = memory.writer.reserve(size)
        if place is None:
            return False
        link.sealed.seal(header, payload, place.memory)
        length = (_IS_PLACE | size).to_bytes(_SIZE_BYTES, "big")
        self._unsent = memoryview(length + header + place.start.to_bytes(_PLACE_BYTES, "big"))
        return True

    def send(self) -> None:
        """Send what is left of the last frame. Raises ``BlockingIOError``, ``OSError``."""
        while self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
