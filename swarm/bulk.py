"""The data plane: streams of sealed chunks over plain sockets, with credit, resumption and no copies.

The receiver pulls: it opens a stream of a blob's chunks over the control channel, gives credit as it consumes,
and decrypts straight into the memory where the chunk belongs. Frames of unknown links, without credit or out of
order are dropped before any work is done on them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq
import zmq.asyncio

from shoal.swarm.control import bind, tune
from shoal.swarm.errors import BlobUnavailable, LinkClosed, Unreachable, WireError
from shoal.swarm.messages import (
    Blob,
    PeerToPeerLinkOpened,
    PeerToPeerOpenLink,
    PeerToPeerOpenStream,
)
from shoal.swarm.sealing import HEADER_BYTES, HELLO_STREAM, TAG_BYTES, Header, SealedLink, preferred_cipher

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 2**21 + 2**16
"""Of one chunk's payload: 2 MiB (2**19 float32 elements) and some room for its header."""

MAX_STREAMS_PER_LINK = 64
CREDIT = 8
"""Chunks that may be under way in one stream."""


class ChunkSource(Protocol):
    """Chunked bytes that a member offers; ``chunk`` waits until that one exists."""

    @property
    def chunks(self) -> int: ...

    async def chunk(self, index: int) -> memoryview: ...


@dataclass(eq=False)
class Incoming:
    """A stream that we receive: frames in order, at most as many as we gave credit for."""

    next_chunk: int
    frames: asyncio.Queue[tuple[bytes, zmq.Frame] | None]
    gap: bool = False

    def spoil(self) -> None:
        """A frame is missing: whoever waits for it should know now, not at its deadline."""
        self.gap = True
        if not self.frames.full():
            self.frames.put_nowait(None)


@dataclass(eq=False)
class Outgoing:
    """A stream that we send."""

    credit: asyncio.Semaphore
    closed: bool = False

    def add(self, credit: int) -> None:
        """More than twice the usual credit at once is no honest receiver's."""
        for _ in range(min(credit, 2 * CREDIT)):
            self.credit.release()

    def close(self) -> None:
        self.closed = True
        self.credit.release()


@dataclass(eq=False)
class Link:
    """One end of a link: its keys, the socket that it uses, and the streams on it."""

    sealed: SealedLink
    remote_key: bytes
    socket: zmq.asyncio.Socket
    routing: bytes | None
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    incoming: dict[int, Incoming] = field(default_factory=dict)
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    last_frame_s: float = field(default_factory=time.monotonic)
    next_stream: int = 0


@dataclass
class Meter:
    """Bytes of bulk frames, headers and tags included."""

    sent_bytes: int = 0
    received_bytes: int = 0


class BufferPool:
    """Reuses buffers for sealed frames: allocating per frame costs more than the cipher."""

    def __init__(self) -> None:
        self._busy: list[tuple[bytearray, zmq.MessageTracker]] = []
        self._free: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """A buffer of at least ``size`` bytes that ZeroMQ has finished with."""
        done = [buffer for buffer, tracker in self._busy if tracker.done]
        self._busy = [entry for entry in self._busy if not entry[1].done]
        self._free += done
        for index, buffer in enumerate(self._free):
            if size <= len(buffer) <= 4 * size:
                return self._free.pop(index)
        del self._free[16:]
        return bytearray(size)

    def give_back(self, buffer: bytearray, tracker: zmq.MessageTracker) -> None:
        """Free again once ``tracker`` is done."""
        self._busy.append((buffer, tracker))


class DataPlane:
    """All links of one process; ``transport.py`` connects it with the control plane."""

    def __init__(self, context: zmq.asyncio.Context, tasks: asyncio.TaskGroup) -> None:
        self.meter = Meter()
        self._context = context
        self._tasks = tasks
        self._router = context.socket(zmq.ROUTER)
        self._links: dict[bytes, Link] = {}
        self._pool = BufferPool()
        self._sources: dict[Blob, ChunkSource] = {}

    def start(self, host: str, port: int) -> int:
        tune(self._router)
        self._router.maxmsgsize = MAX_CHUNK_BYTES + TAG_BYTES
        self._router.router_mandatory = True
        bound = bind(self._router, host, port)
        self._tasks.create_task(self._receive(self._router))
        return bound

    def stop(self) -> None:
        self._router.close(linger=0)
        for link in self._links.values():
            if link.routing is None:
                link.socket.close(linger=0)

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        """Offer a blob to every member of the roster until it is retracted."""
        self._sources[blob] = source

    def retract(self, blob: Blob) -> None:
        """Stop offering a blob; streams of it that are under way still finish."""
        self._sources.pop(blob, None)

    # Links ----------------------------------------------------------------------------------------------

    async def open_link(
        self,
        remote_key: bytes,
        host: str,
        port: int,
        agree: Callable[[PeerToPeerOpenLink], Awaitable[PeerToPeerLinkOpened]],
    ) -> Link:
        """Agree on keys through ``agree`` (the control channel), then attach a data connection."""
        # ZeroMQ reserves routing ids that begin with a zero byte.
        name = bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(7)
        ask = PeerToPeerOpenLink(link=name, secret=secrets.token_bytes(32), cipher=preferred_cipher())
        answer = await agree(ask)
        socket = self._context.socket(zmq.DEALER)
        tune(socket)
        socket.maxmsgsize = MAX_CHUNK_BYTES + TAG_BYTES
        socket.routing_id = name
        sealed = SealedLink(name, ask.secret + answer.secret, answer.cipher, opener=True)
        link = Link(sealed, remote_key, socket, None)
        link.attached.set()
        try:
            socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise Unreachable(f"{host}:{port} is no usable address: {error}") from error
        self._links[name] = link
        self._tasks.create_task(self._receive(socket))
        header, tag = sealed.next_header(HELLO_STREAM, 0), bytearray(TAG_BYTES)
        sealed.seal(header, memoryview(b""), memoryview(tag))
        await socket.send_multipart([header, tag])
        return link

    def accept_link(self, remote_key: bytes, ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
        """The acceptor's half; the link is usable once the opener's hello frame has arrived."""
        cipher = ask.cipher if ask.cipher == "chacha20-poly1305" else preferred_cipher()
        secret = secrets.token_bytes(32)
        if ask.link in self._links or ask.link[0] == 0:
            raise WireError("that link id cannot be used")
        for other in [one for one in self._links.values() if one.remote_key == remote_key and one.routing]:
            if not other.outgoing and not other.incoming:
                self.close_link(other)  # an earlier link that its opener has given up
        sealed = SealedLink(ask.link, ask.secret + secret, cipher, opener=False)
        self._links[ask.link] = Link(sealed, remote_key, self._router, ask.link)
        return PeerToPeerLinkOpened(secret=secret, cipher=cipher)

    def find_link(self, remote_key: bytes, name: bytes) -> Link:
        """The link of that name with the holder of ``remote_key``. Raises ``LinkClosed`` when there is none."""
        link = self._links.get(name)
        if link is None or link.remote_key != remote_key:
            raise LinkClosed("that link is not open any more; open a new one")
        return link

    def links_with(self, remote_key: bytes) -> list[Link]:
        return [link for link in self._links.values() if link.remote_key == remote_key]

    def close_link(self, link: Link) -> None:
        """Forget its keys and stop its streams."""
        self._links.pop(link.sealed.link, None)
        for stream in link.outgoing.values():
            stream.close()
        if link.routing is None:
            link.socket.close(linger=0)

    # Sending --------------------------------------------------------------------------------------------

    def serve(self, link: Link, ask: PeerToPeerOpenStream) -> None:
        """Start sending. Raises ``BlobUnavailable`` when we have no such blob or too many streams."""
        source = self._sources.get(ask.blob)
        if source is None:
            raise BlobUnavailable(f"no {ask.blob.kind} of {ask.blob.number} here")
        if ask.stop > source.chunks or ask.first > ask.stop:
            raise BlobUnavailable(f"{ask.blob.kind} of {ask.blob.number} has only {source.chunks} chunks")
        if len(link.outgoing) >= MAX_STREAMS_PER_LINK:
            raise BlobUnavailable("too many streams on this link")
        stream = Outgoing(asyncio.Semaphore(min(ask.credit, 2 * CREDIT)))
        link.outgoing[ask.stream] = stream
        self._tasks.create_task(self._send_stream(link, stream, ask, source))

    async def _send_stream(
        self, link: Link, stream: Outgoing, ask: PeerToPeerOpenStream, source: ChunkSource
    ) -> None:
        try:
            await link.attached.wait()
            for index in range(ask.first, ask.stop):
                await stream.credit.acquire()
                payload = await source.chunk(index)
                if stream.closed:
                    return
                await self._send_frame(link, ask.stream, index, payload)
        except BlobUnavailable as error:
            log.debug("stream of %s ended early: %s", ask.blob, error)
        except zmq.ZMQError as error:
            log.debug("link lost while sending %s: %s", ask.blob, error)
            self.close_link(link)
        finally:
            if link.outgoing.get(ask.stream) is stream:
                del link.outgoing[ask.stream]

    async def _send_frame(self, link: Link, stream: int, chunk: int, payload: memoryview) -> None:
        header = link.sealed.next_header(stream, chunk)
        size = payload.nbytes + TAG_BYTES
        buffer = self._pool.take(size)
        body = memoryview(buffer)[:size]
        await asyncio.to_thread(link.sealed.seal, header, payload, body)
        frames: list[bytes | memoryview] = [header, body]
        if link.routing is not None:
            frames.insert(0, link.routing)
        tracker = await link.socket.send_multipart(frames, copy=False, track=True)
        assert tracker is not None
        self._pool.give_back(buffer, tracker)
        self.meter.sent_bytes += HEADER_BYTES + size

    def add_credit(self, link: Link, stream: int, credit: int) -> None:
        outgoing = link.outgoing.get(stream)
        if outgoing is not None:
            outgoing.add(credit)

    def close_stream(self, link: Link, stream: int) -> None:
        outgoing = link.outgoing.pop(stream, None)
        if outgoing is not None:
            outgoing.close()

    # Receiving ------------------------------------------------------------------------------------------

    def open_incoming(self, link: Link, first: int) -> tuple[int, Incoming]:
        """A place for a stream's frames; returns its number."""
        number = link.next_stream
        link.next_stream += 1
        incoming = Incoming(first, asyncio.Queue(CREDIT))
        link.incoming[number] = incoming
        return number, incoming

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        routed = socket is self._router
        while not socket.closed:
            try:
                frames = await socket.recv_multipart(copy=False)
            except (zmq.ZMQError, asyncio.CancelledError):
                if socket.closed:
                    return
                raise
            routing = frames.pop(0).bytes if routed and frames else None
            if len(frames) == 2:
                self._accept_frame(routing, frames[0].bytes, frames[1])

    def _accept_frame(self, routing: bytes | None, header_bytes: bytes, body: zmq.Frame) -> None:
        try:
            header = Header.unpack(header_bytes)
        except WireError:
            return
        link = self._links.get(header.link)
        if link is None or link.routing != routing:
            log.debug("dropped a bulk frame of an unknown link")
            return
        if header.stream == HELLO_STREAM:
            self._attach(link, header_bytes, body)
            return
        incoming = link.incoming.get(header.stream)
        if incoming is None:
            return
        if header.chunk != incoming.next_chunk or incoming.frames.full():
            incoming.spoil()
            return
        incoming.next_chunk += 1
        incoming.frames.put_nowait((header_bytes, body))

    def _attach(self, link: Link, header: bytes, body: zmq.Frame) -> None:
        if len(body.buffer) != TAG_BYTES:
            return
        try:
            link.sealed.open(header, body.buffer, memoryview(bytearray(0)))
        except WireError as error:
            log.warning("dropped a hello frame: %s", error)
            return
        link.attached.set()

    async def unseal(
        self, link: Link, header: bytes, body: zmq.Frame, sink: Callable[[int, int], memoryview]
    ) -> int:
        """Decrypt one frame into ``sink(chunk, size)``; returns the chunk's index. Raises ``WireError``."""
        size = len(body.buffer) - TAG_BYTES
        if size < 0:
            raise WireError("truncated bulk frame")
        chunk = Header.unpack(header).chunk
        await asyncio.to_thread(link.sealed.open, header, body.buffer, sink(chunk, size))
        link.last_frame_s = time.monotonic()
        self.meter.received_bytes += HEADER_BYTES + size + TAG_BYTES
        return chunk
