"""The data plane: streams of sealed chunks over plain TCP sockets, with credit and without copies.

The receiver pulls: it opens a stream of a blob's chunks with a stream control message and grants credit as it consumes
them. Chunks are decrypted straight into the memory where they belong (``io_thread.py``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket as sockets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from shoal.swarm.aio import task_scope
from shoal.swarm.errors import (
    BlobUnavailable,
    Busy,
    LinkClosed,
    LinkError,
    ShoalError,
    WireError,
    member_error,
    remote_error,
    words_for_others,
)
from shoal.swarm.protocol.addresses import network_of
from shoal.swarm.protocol.messages import (
    PeerToPeerCloseStream,
    PeerToPeerLinkOpened,
    PeerToPeerMemoryOpened,
    PeerToPeerOfferMemory,
    PeerToPeerOpenLink,
    PeerToPeerOpenStream,
    PeerToPeerStreamEnded,
)
from shoal.swarm.protocol.types import Blob, Message, PathKind
from shoal.swarm.protocol.wire import Envelope, decode, encode
from shoal.swarm.transport.bulk.frame_crypto import SealedLink, preferred_cipher
from shoal.swarm.transport.bulk.io_thread import MAX_CONNECTIONS_PER_LINK, IoThread
from shoal.swarm.transport.bulk.link import (
    CREDIT,
    MAX_CREDIT,
    MAX_STREAMS_PER_LINK,
    ChunkSink,
    Frame,
    IncomingStream,
    Link,
    OutgoingStream,
)
from shoal.swarm.transport.bulk.shared_memory import OfferedMemory, open_shared
from shoal.swarm.transport.bulk.source import ChunkSource, DownloadSource, reading
from shoal.swarm.transport.limits.download_quota import DownloadQuota, Reader
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.limits.traffic_meter import TrafficMeter
from shoal.swarm.transport.tcp.sockets import is_on_this_machine, listen

log = logging.getLogger(__name__)

_PUBLISH_WAIT_S = 0.5
_MAX_REASON = 500
"""Characters of the reason for which a stream ended."""

Dial = Callable[[], Awaitable[sockets.socket]]

_URGENT = ("contribution", "partial", "activation", "gradient")
"""Kinds of blobs that a reduction or a stage waits for."""


class DataPlane:
    """All links of one process, and the blobs that it offers. ``node.py`` connects it with the control plane."""

    def __init__(self, tasks: asyncio.TaskGroup, limits: TrafficLimits) -> None:
        """``limits``: of the whole process, control messages included."""
        self.meter = TrafficMeter()
        self.limits = limits
        self.connections_per_link = 1
        """TCP connections of each link that this side opens; over long, fast paths several carry more than one."""
        self.reader_of: Callable[[bytes, str], Reader] = lambda key, host: Reader(key.hex(), network_of(host))
        """Who downloads, given the key and the address of the other end of a link."""
        self._quota = DownloadQuota()
        self._state_bytes: dict[int, int] = {}
        """By scope, the size of the state that is offered. All of them are what the quota counts as one: a member that
        holds several stages downloads the state of each."""
        self._tasks = tasks
        self._links: dict[bytes, Link] = {}
        self._sources: dict[Blob, ChunkSource] = {}
        self._published = asyncio.Event()  # replaced after each publication
        self._io_thread = IoThread(self._links, self.meter, limits, self.close_link, self._handle_stream_control)

    def start(self) -> None:
        """Start the I/O thread; links can be opened from now on."""
        self._io_thread.start()
        self._tasks.create_task(self._watch_io_thread())

    def bind(self, host: str, port: int) -> int:
        """Accept links that others open; returns the port. Raises ``Unreachable`` when it cannot listen there."""
        listener = listen(host, port)
        self._io_thread.listen(listener)
        return int(listener.getsockname()[1])

    async def _watch_io_thread(self) -> None:
        await self._io_thread.ended

    def stop(self) -> None:
        for link in list(self._links.values()):
            self.close_link(link)
        self._io_thread.stop()

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        """Offer a blob to every member of the roster until it is retracted."""
        self._sources[blob] = source
        if isinstance(source, DownloadSource):
            self._state_bytes[blob.scope] = max(source.state_bytes, self._state_bytes.get(blob.scope, 0))
        self._published.set()
        self._published = asyncio.Event()

    def retract(self, blob: Blob) -> None:
        """Stop offering a blob; its streams that are in progress still finish."""
        self._sources.pop(blob, None)

    def leave(self, scope: int) -> None:
        """Retract all blobs of that scope."""
        self._sources = {blob: source for blob, source in self._sources.items() if blob.scope != scope}
        self._state_bytes.pop(scope, None)

    # Links ----------------------------------------------------------------------------------------------

    async def open_link(
        self,
        remote_key: bytes,
        dial: Dial,
        agree: Callable[[PeerToPeerOpenLink], Awaitable[PeerToPeerLinkOpened]],
        path: PathKind = "direct",
    ) -> Link:
        """Agree on keys through ``agree`` (a request over the control channel), then attach data connections.

        ``dial``: opens a connection to the other side. A punched one is beside the link over a relay, which others
        of its streams go on using. Raises ``Unreachable``, and what ``agree`` raises."""
        name = secrets.token_bytes(8)
        is_punched = path == "punched"
        ask = PeerToPeerOpenLink(
            link=name, secret=secrets.token_bytes(32), cipher=preferred_cipher(), is_beside=is_punched
        )
        answer = await agree(ask)
        sealed = SealedLink(name, ask.secret + answer.secret, answer.cipher, opener=True)
        connections = await self._connect(dial, 1 if is_punched else self.connections_per_link)
        if name in self._links:  # the other side knew the name already, and opened a link of that name towards us
            for socket in connections:
                socket.close()
            raise LinkClosed("the other side opened another link of the same name")
        link = self._links[name] = Link(sealed, remote_key, is_ours=True, path=path)
        for socket in connections:
            self._io_thread.attach(link, socket)
        link.attached.set()
        if path == "direct" and is_on_this_machine(connections[0]) and not self.limits.are_set:
            self._offer_memory(link)
        return link

    async def _connect(self, dial: Dial, number: int) -> list[sockets.socket]:
        opened: list[sockets.socket] = []

        async def one() -> None:
            opened.append(await dial())

        try:
            async with task_scope() as tasks:
                for _ in range(min(number, MAX_CONNECTIONS_PER_LINK)):
                    tasks.create_task(one())
        except BaseException:
            for socket in opened:
                socket.close()
            raise
        return opened

    def accept_link(self, remote_key: bytes, ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
        """Accept a link; it is usable once the opener's hello frame has arrived."""
        cipher = ask.cipher if ask.cipher == "chacha20-poly1305" else preferred_cipher()
        secret = secrets.token_bytes(32)
        if ask.link in self._links:
            raise WireError("a link of that name exists already")
        earlier = [link for link in self._links.values() if link.remote_key == remote_key and not link.is_ours]
        # Whoever opens a new link has given up the previous ones, unless it has found a better path beside the last.
        for link in earlier[:-1] if ask.is_beside else earlier:
            self.close_link(link)
        sealed = SealedLink(ask.link, ask.secret + secret, cipher, opener=False)
        self._links[ask.link] = Link(sealed, remote_key, is_ours=False)
        return PeerToPeerLinkOpened(secret=secret, cipher=cipher)

    def links_with(self, remote_key: bytes) -> list[Link]:
        """Links with the holder of a key. The first is the one that both ends prefer: a direct one, and the same, as on
        a shared connection the traffic of one direction carries the acknowledgements of the other."""
        links = [link for link in self._links.values() if link.remote_key == remote_key]
        return sorted(links, key=lambda link: (link.path == "relayed", link.sealed.link))

    def close_link(self, link: Link) -> None:
        """Forget a link's keys and end its streams; receivers resume on another link."""
        if self._links.get(link.sealed.link) is link:
            del self._links[link.sealed.link]
        link.close()
        self._io_thread.close(link)

    def accept(self, socket: sockets.socket, host: str, path: PathKind) -> None:
        """Take over a connection that another member has opened, at ``host``, and that is not one of our port."""
        self._io_thread.accept(socket, host, path)

    def all_links(self) -> list[Link]:
        """All links, with whomever."""
        return list(self._links.values())

    # Shared memory between processes of one machine -----------------------------------------------------------

    def _offer_memory(self, link: Link) -> None:
        try:
            link.offered = offered = OfferedMemory()
        except OSError as error:
            log.debug("a link without shared memory: %s", error)
            return
        link.memory = offered.memory
        offer = PeerToPeerOfferMemory(process=offered.process, descriptor=offered.descriptor, token=offered.token)
        self._send_stream_control(link, offer)

    def _open_memory(self, link: Link, offer: PeerToPeerOfferMemory) -> None:
        if link.is_ours or link.was_offered:
            raise WireError("an unexpected offer of memory")
        link.was_offered = True
        connections = list(link.connections)
        try:
            if self.limits.are_set:
                raise LinkError("traffic is limited here, and what lies in memory would not count")
            if not connections or not all(
                one.path == "direct" and is_on_this_machine(one.socket) for one in connections
            ):
                raise LinkError("the other end is on another machine")
            link.memory = open_shared(offer.process, offer.descriptor, offer.token)
        except LinkError as error:
            log.info("a link without shared memory: %s", error)
        self._send_stream_control(link, PeerToPeerMemoryOpened(is_open=link.memory is not None))

    def _use_memory(self, link: Link, answer: PeerToPeerMemoryOpened) -> None:
        if link.memory is None or link.offered is None:
            raise WireError("an answer to an offer of memory that was not made")
        link.withdraw_memory()
        link.memory.is_shared = answer.is_open
        if not answer.is_open:
            link.memory = None

    # Stream control messages ----------------------------------------------------------------------------

    def _send_stream_control(self, link: Link, message: Message) -> None:
        if self._links.get(link.sealed.link) is link:
            self._io_thread.send_stream_control(link, encode(Envelope("notice", 0, message)))

    def _handle_stream_control(self, link: Link) -> None:
        for control in link.pop_stream_controls():
            if self._links.get(link.sealed.link) is not link:
                return  # closed by this side, or because of an earlier message
            try:
                match decode(control).message:
                    case PeerToPeerOpenStream() as ask:
                        self._begin_stream(link, ask)
                    case PeerToPeerCloseStream(stream=number):
                        link.close_outgoing(number)
                        self._io_thread.drop_stream(link, number)
                    case PeerToPeerStreamEnded(stream=number) as end:
                        if (incoming := link.incoming.get(number)) is not None:
                            why = member_error(remote_error(end.code, end.message, end.retry_s))
                            incoming.end(end.following, why)
                    case PeerToPeerOfferMemory() as offer:
                        self._open_memory(link, offer)
                    case PeerToPeerMemoryOpened() as answer:
                        self._use_memory(link, answer)
                    case other:
                        raise WireError(f"{type(other).__name__} is not a stream control message")
            except LinkError as error:
                log.warning("closed a link because of a bad stream control message: %s", error)
                self.close_link(link)

    # Sending --------------------------------------------------------------------------------------------

    def _begin_stream(self, link: Link, ask: PeerToPeerOpenStream) -> None:
        """Begin to send a stream. Raises ``WireError`` for a number that is in use."""
        if ask.stream in link.outgoing:
            raise WireError(f"stream number {ask.stream} is in use")
        if len(link.outgoing) >= MAX_STREAMS_PER_LINK:
            self._end_stream(link, ask, BlobUnavailable("too many streams on this link"), ask.first)
            return
        stream = link.outgoing[ask.stream] = OutgoingStream(min(ask.credit, MAX_CREDIT), ask.first)
        stream.task = self._tasks.create_task(self._send_stream(link, stream, ask))

    async def _send_stream(self, link: Link, stream: OutgoingStream, ask: PeerToPeerOpenStream) -> None:
        try:
            source = self._sources.get(ask.blob) or await self._await_source(ask.blob)
            if ask.stop > source.chunks or ask.first > ask.stop:
                raise BlobUnavailable(f"{ask.blob.kind} {ask.blob.number} has only {source.chunks} chunks")
            if isinstance(source, DownloadSource):
                await self._send_download(link, stream, ask, source)
            else:
                with reading(source, link.remote_key):
                    await self._send_chunks(link, stream, ask, source)
        except ShoalError as error:
            log.debug("stream of %s ended early: %s", ask.blob, error)
            self._end_stream(link, ask, error, stream.following)
        finally:
            if link.outgoing.get(ask.stream) is stream:
                del link.outgoing[ask.stream]

    async def _send_download(
        self, link: Link, stream: OutgoingStream, ask: PeerToPeerOpenStream, source: DownloadSource
    ) -> None:
        """Send as much as the reader's quota allows. Raises ``Busy`` where that ends."""
        reader, now_s = self.reader_of(link.remote_key, link.remote_host), asyncio.get_running_loop().time
        state_bytes = max(source.state_bytes, sum(self._state_bytes.values()))

        def uplink_bps() -> float:
            return self.limits.usable_bps(self.meter.bandwidth_bps)

        def count(size_bytes: int) -> None:
            self._quota.take(reader, size_bytes, state_bytes, uplink_bps(), now_s())

        place = self._quota.place(reader, state_bytes, uplink_bps(), now_s())
        with place, reading(source, link.remote_key):
            await self._send_chunks(link, stream, ask, source, count)

    async def _send_chunks(
        self,
        link: Link,
        stream: OutgoingStream,
        ask: PeerToPeerOpenStream,
        source: ChunkSource,
        count: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """``count``: called with the size of each chunk before it is sent; may raise."""
        for index in range(ask.first, ask.stop):
            await stream.use_credit()
            chunk = await source.chunk(index)
            count(chunk.nbytes)
            stream.following = index + 1
            frame = Frame(ask.stream, index, chunk, ask.blob.scope)
            self._io_thread.send(link, frame, urgent=ask.blob.kind in _URGENT)

    async def _await_source(self, blob: Blob) -> ChunkSource:
        """Wait a moment for a blob to be published: the other side often hears of a round slightly before us."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PUBLISH_WAIT_S):
                while blob not in self._sources:
                    await self._published.wait()
        source = self._sources.get(blob)
        if source is None:
            raise BlobUnavailable(f"{blob.kind} {blob.number} is not offered here")
        return source

    def _end_stream(self, link: Link, ask: PeerToPeerOpenStream, why: ShoalError, following: int) -> None:
        message = words_for_others(why)[:_MAX_REASON]
        retry_s = why.retry_s if isinstance(why, Busy) else 0.0
        end = PeerToPeerStreamEnded(
            stream=ask.stream, code=type(why).__name__, message=message, following=following, retry_s=retry_s
        )
        self._send_stream_control(link, end)

    def share_uplink(self, shares: Mapping[bytes, float]) -> None:
        """Pace what we send so that the holder of each key gets its share of the uplink; empty ends the pacing."""
        self._io_thread.share_uplink(shares)

    # Receiving ------------------------------------------------------------------------------------------

    def open_stream(self, link: Link, blob: Blob, chunks: range, sink: ChunkSink) -> tuple[int, IncomingStream]:
        """Ask the other side for chunks; returns the stream's number and the stream.

        When the other side refuses, ``next_chunk`` raises its reason: ``BlobUnavailable``, ``Busy``."""
        number, incoming = link.open_incoming(chunks, sink, blob.scope)
        ask = PeerToPeerOpenStream(stream=number, blob=blob, first=chunks.start, stop=chunks.stop, credit=CREDIT)
        self._send_stream_control(link, ask)
        return number, incoming

    def grant(self, link: Link, number: int, incoming: IncomingStream, in_use: int = 0) -> None:
        """Grant credit for a stream, if enough is free; ``in_use`` of the consumed chunks still occupy their memory."""
        if credit := incoming.new_credit(in_use):
            self._io_thread.grant(link, number, credit)

    def close_stream(self, link: Link, number: int, *, finished: bool) -> None:
        """Close a stream; unless it is ``finished``, tell the other side to stop sending it."""
        link.close_incoming(number)
        if not finished:
            self._send_stream_control(link, PeerToPeerCloseStream(stream=number))
