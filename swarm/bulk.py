"""The data plane: streams of sealed chunks over plain sockets, with credit, resumption and no copies.

The receiver pulls: it opens a stream of a blob's chunks over the control channel, gives credit as it consumes
and decrypts straight into the memory where the chunk belongs. Frames of unknown links, without credit or out
of order are dropped before any work is done on them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import zmq
import zmq.asyncio

from shoal.swarm.errors import BlobUnavailable, LinkClosed, ShoalError, Unreachable, WireError
from shoal.swarm.links import CREDIT, MAX_STREAMS_PER_LINK, BufferPool, Link, Meter, Outgoing, in_thread
from shoal.swarm.messages import Blob, PeerToPeerLinkOpened, PeerToPeerOpenLink, PeerToPeerOpenStream
from shoal.swarm.sealing import HEADER_BYTES, HELLO_STREAM, TAG_BYTES, Header, SealedLink, preferred_cipher
from shoal.swarm.sockets import PLAIN_DOMAIN, bind, endpoint, tune

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 2**21 + 2**16
"""Of one chunk's payload: 2 MiB (2**19 float32 elements) and some room for its header."""

_QUEUED_FRAMES = 64
_FULL_QUEUE_S = 0.01
# Long: on a slow uplink a heartbeat waits behind megabytes of chunks. Deadlines notice dead streams sooner.
_SILENCE_MS = 120_000


class ChunkSource(Protocol):
    """Chunked bytes that a member offers; ``chunk`` waits until that one exists.

    It raises ``BlobUnavailable`` (or another ``ShoalError``) when it never will; that ends the stream.
    """

    @property
    def chunks(self) -> int: ...

    async def chunk(self, index: int) -> memoryview: ...


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
        """Bind; returns the port. Raises ``Unreachable`` when the address is taken or not ours."""
        _configure(self._router)
        self._router.plain_server = True
        self._router.zap_domain = PLAIN_DOMAIN
        self._router.router_mandatory = True
        bound = bind(self._router, host, port)
        self._tasks.create_task(self._receive(self._router))
        return bound

    def stop(self) -> None:
        for link in list(self._links.values()):
            self.close_link(link)
        self._router.close(linger=0)

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
        address: tuple[str, int],
        agree: Callable[[PeerToPeerOpenLink], Awaitable[PeerToPeerLinkOpened]],
    ) -> Link:
        """Agree on keys through ``agree`` (the control channel), then attach a data connection."""
        # ZeroMQ reserves routing ids that begin with a zero byte.
        name = bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(7)
        ask = PeerToPeerOpenLink(link=name, secret=secrets.token_bytes(32), cipher=preferred_cipher())
        answer = await agree(ask)
        sealed = SealedLink(name, ask.secret + answer.secret, answer.cipher, opener=True)
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unreachable(f"no socket left for a link: {error}") from error
        try:
            _configure(socket)
            socket.routing_id = name
            socket.plain_username, socket.plain_password = name.hex().encode(), sealed.token.hex().encode()
            socket.connect(endpoint(*address))
            header, tag = sealed.next_header(HELLO_STREAM, 0), bytearray(TAG_BYTES)
            sealed.seal(header, memoryview(b""), memoryview(tag))
            await socket.send_multipart([header, tag], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise Unreachable(f"{address[0]}:{address[1]} is no usable address: {error}") from error
        link = self._links[name] = Link(sealed, remote_key, socket, None)
        link.attached.set()
        self._tasks.create_task(self._receive(socket))
        return link

    def accept_link(self, remote_key: bytes, ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
        """The acceptor's half; the link is usable once the opener's hello frame has arrived."""
        cipher = ask.cipher if ask.cipher == "chacha20-poly1305" else preferred_cipher()
        secret = secrets.token_bytes(32)
        if ask.link in self._links or ask.link[0] == 0:
            raise WireError("that link id cannot be used")
        for link in self.links_with(remote_key):
            if link.routing is not None:
                self.close_link(link)  # who opens another has given up the one before
        sealed = SealedLink(ask.link, ask.secret + secret, cipher, opener=False)
        self._links[ask.link] = Link(sealed, remote_key, self._router, ask.link)
        return PeerToPeerLinkOpened(secret=secret, cipher=cipher)

    def admits(self, name: bytes, token: bytes) -> bool:
        """The gate's question: does a data connection come from somebody who knows that link's secrets?"""
        try:
            link = self._links.get(bytes.fromhex(name.decode("ascii")))
        except ValueError:
            return False
        expected = None if link is None or link.routing is None else link.sealed.token
        return expected is not None and hmac.compare_digest(expected.hex().encode(), token)

    def find_link(self, remote_key: bytes, name: bytes) -> Link:
        """The link of that name with the holder of ``remote_key``. Raises ``LinkClosed``."""
        link = self._links.get(name)
        if link is None or link.remote_key != remote_key:
            raise LinkClosed("that link is not open any more; open a new one")
        return link

    def links_with(self, remote_key: bytes) -> list[Link]:
        """Those in use with the holder of that key, our own ones first."""
        links = [link for link in self._links.values() if link.remote_key == remote_key]
        return sorted(links, key=lambda link: link.routing is not None)

    def close_link(self, link: Link) -> None:
        """Forget its keys and stop its streams; those that receive resume on another link."""
        if self._links.get(link.sealed.link) is link:
            del self._links[link.sealed.link]
        link.close()

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
        if ask.stream in link.outgoing or ask.stream == HELLO_STREAM:
            raise WireError("that stream number is taken")
        stream = link.outgoing[ask.stream] = Outgoing(min(ask.credit, 2 * CREDIT))
        stream.task = self._tasks.create_task(self._send_stream(link, stream, ask, source))

    async def _send_stream(self, link: Link, stream: Outgoing, ask: PeerToPeerOpenStream, source: ChunkSource) -> None:
        try:
            await link.attached.wait()
            for index in range(ask.first, ask.stop):
                await stream.take()
                payload = await source.chunk(index)
                await self._send_frame(link, ask.stream, index, payload)
        except (ShoalError, zmq.ZMQError) as error:
            # The link stays: its opener reconnects under the same routing id, or opens another one.
            log.debug("stream of %s ended early: %s", ask.blob, error)
        finally:
            if link.outgoing.get(ask.stream) is stream:
                del link.outgoing[ask.stream]

    async def _send_frame(self, link: Link, stream: int, chunk: int, payload: memoryview) -> None:
        assert payload.nbytes <= MAX_CHUNK_BYTES, "the other side's socket would refuse it"
        header = link.sealed.next_header(stream, chunk)
        size = payload.nbytes + TAG_BYTES
        buffer = self._pool.take(size)
        body = memoryview(buffer)[:size]
        await in_thread(link.sealed.seal, header, payload, body)
        frames: list[bytes | memoryview] = [header, body]
        if link.routing is not None:
            frames.insert(0, link.routing)
        tracker = await self._send_when_possible(link, frames)
        self._pool.give_back(buffer, tracker)
        self.meter.sent(HEADER_BYTES + size, time.monotonic())

    async def _send_when_possible(self, link: Link, frames: list[bytes | memoryview]) -> zmq.MessageTracker:
        while True:
            try:
                tracker = await link.socket.send_multipart(frames, zmq.DONTWAIT, copy=False, track=True)
            except zmq.Again:
                # A ROUTER cannot wait for room in one connection's queue, only in any's.
                await asyncio.sleep(_FULL_QUEUE_S)
            else:
                assert tracker is not None
                return tracker

    # Receiving ------------------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        routed = socket is self._router
        while not socket.closed:
            frames = await socket.recv_multipart(copy=False)
            routing = frames.pop(0).bytes if routed else None
            if len(frames) == 2:
                self._accept_frame(socket, routing, frames[0].bytes, frames[1])
            # Receiving does not suspend while frames are queued: without this a flood would starve the rest.
            await asyncio.sleep(0)

    def _accept_frame(
        self, socket: zmq.asyncio.Socket, routing: bytes | None, header_bytes: bytes, body: zmq.Frame
    ) -> None:
        try:
            header = Header.unpack(header_bytes)
        except WireError:
            return
        link = self._links.get(header.link)
        if link is None or link.socket is not socket or link.routing != routing:
            log.debug("dropped a bulk frame of an unknown link")
            return
        link.last_frame_s = time.monotonic()
        if header.stream == HELLO_STREAM:
            self._attach(link, header_bytes, body)
            return
        incoming = link.incoming.get(header.stream)
        if incoming is None:
            return
        if incoming.gap or header.chunk != incoming.next_chunk or incoming.frames.full():
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

    async def unseal(self, link: Link, header: bytes, body: zmq.Frame, sink: Callable[[int, int], memoryview]) -> int:
        """Decrypt one frame into ``sink(chunk, size)``; returns the chunk's index. Raises ``WireError``."""
        size = len(body.buffer) - TAG_BYTES
        if size < 0:
            raise WireError("truncated bulk frame")
        chunk = Header.unpack(header).chunk
        await in_thread(link.sealed.open, header, body.buffer, sink(chunk, size))
        self.meter.received(HEADER_BYTES + size + TAG_BYTES, time.monotonic())
        return chunk


def _configure(socket: zmq.asyncio.Socket) -> None:
    socket.maxmsgsize = MAX_CHUNK_BYTES + TAG_BYTES
    # Times the size of a chunk, this is the memory that one connection can claim.
    socket.rcvhwm = socket.sndhwm = _QUEUED_FRAMES
    tune(socket, _SILENCE_MS)
