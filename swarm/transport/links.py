"""What a link consists of: its two ends' streams, their credit, and what has gone over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.swarm.errors import LinkClosed, LinkError, ShoalError, WireError
from shoal.swarm.transport.frame_crypto import SealedLink
from shoal.swarm.transport.frames import FrameQueue

if TYPE_CHECKING:
    from shoal.swarm.transport.framing import Connection
    from shoal.swarm.transport.shared_memory import Offered, SharedMemory

log = logging.getLogger(__name__)

T = TypeVar("T")

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
