"""The data plane: streams of sealed chunks over plain TCP sockets, with credit, resumption and no copies.

The receiver pulls: it opens a stream of a blob's chunks with a message over the link, grants credit as it consumes,
and chunks are decrypted straight into the memory where they belong (``io_thread.py``). Frames of unknown links, without
credit or under other keys are dropped before any work is done with them.
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
    LinkClosed,
    LinkError,
    ShoalError,
    WireError,
    remote_error,
    words_for_others,
)
from shoal.swarm.protocol.messages import (
    PeerToPeerCloseStream,
    PeerToPeerLinkOpened,
    PeerToPeerMemoryOpened,
    PeerToPeerOfferMemory,
    PeerToPeerOpenLink,
    PeerToPeerOpenStream,
    PeerToPeerStreamEnded,
)
from shoal.swarm.protocol.types import Blob, Message
from shoal.swarm.protocol.wire import Envelope, decode, encode
from shoal.swarm.transport.frame_crypto import SealedLink, preferred_cipher
from shoal.swarm.transport.io_thread import MAX_CONNECTIONS_PER_LINK, IoThread
from shoal.swarm.transport.link import (
    CREDIT,
    MAX_STREAMS_PER_LINK,
    MOST_CREDIT,
    Frame,
    Incoming,
    Link,
    Meter,
    Outgoing,
    Sink,
)
from shoal.swarm.transport.shared_memory import Offered, open_shared
from shoal.swarm.transport.sockets import connect, is_on_this_machine, listen
from shoal.swarm.transport.source import ChunkSource, reading

log = logging.getLogger(__name__)

_SOON_S = 0.5
_MOST_SAID = 500  # letters, of why a stream has ended
_URGENT = ("contribution", "partial", "activation", "gradient")  # what it is reduced with, or a stage, waits for it


class DataPlane:
    """All links of one process; ``node.py`` connects it with the control plane."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.meter = Meter()
        self.connections_per_link = 1
        """TCP connections of each link that we open: more carry more over long, fast ways, where one is held back."""
        self._tasks = tasks
        self._links: dict[bytes, Link] = {}
        self._sources: dict[Blob, ChunkSource] = {}
        self._published = asyncio.Event()  # another one after each
        self._io_thread = IoThread(self._links, self.meter, self.close_link, self._hear)

    def start(self) -> None:
        """From now on links can be opened from here."""
        self._io_thread.start()
        self._tasks.create_task(self._watch())

    def bind(self, host: str, port: int) -> int:
        """Accept links, too; returns the port. Raises ``Unreachable`` when the address is taken or not ours."""
        listener = listen(host, port)
        self._io_thread.listen(listener)
        return int(listener.getsockname()[1])

    async def _watch(self) -> None:
        await self._io_thread.ended

    def stop(self) -> None:
        for link in list(self._links.values()):
            self.close_link(link)
        self._io_thread.stop()

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        """Offer a blob to every member of the roster until it is retracted."""
        self._sources[blob] = source
        self._published.set()
        self._published = asyncio.Event()

    def retract(self, blob: Blob) -> None:
        """Stop offering a blob; streams of it that are under way still finish."""
        self._sources.pop(blob, None)

    def leave(self, scope: int) -> None:
        """Retract all blobs of that scope."""
        self._sources = {blob: source for blob, source in self._sources.items() if blob.scope != scope}

    # Links ----------------------------------------------------------------------------------------------

    async def open_link(
        self,
        remote_key: bytes,
        address: tuple[str, int],
        agree: Callable[[PeerToPeerOpenLink], Awaitable[PeerToPeerLinkOpened]],
    ) -> Link:
        """Agree on keys through ``agree`` (the control channel), then attach data connections.

        Raises ``Unreachable``, and what ``agree`` raises."""
        name = secrets.token_bytes(8)
        ask = PeerToPeerOpenLink(link=name, secret=secrets.token_bytes(32), cipher=preferred_cipher())
        answer = await agree(ask)
        sealed = SealedLink(name, ask.secret + answer.secret, answer.cipher, opener=True)
        connections = await self._connect(address)
        if name in self._links:  # the other side has heard the name before, and opened one of that name
            for socket in connections:
                socket.close()
            raise LinkClosed("somebody else opened a link of that name")
        link = self._links[name] = Link(sealed, remote_key, is_ours=True)
        for socket in connections:
            self._io_thread.attach(link, socket)
        link.attached.set()
        if is_on_this_machine(connections[0]):
            self._offer_memory(link)
        return link

    async def _connect(self, address: tuple[str, int]) -> list[sockets.socket]:
        opened: list[sockets.socket] = []

        async def one() -> None:
            opened.append(await connect(*address))

        try:
            async with task_scope() as tasks:
                for _ in range(min(self.connections_per_link, MAX_CONNECTIONS_PER_LINK)):
                    tasks.create_task(one())
        except BaseException:
            for socket in opened:
                socket.close()
            raise
        return opened

    def accept_link(self, remote_key: bytes, ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
        """The acceptor's half; the link is usable once the opener's hello frame has arrived."""
        cipher = ask.cipher if ask.cipher == "chacha20-poly1305" else preferred_cipher()
        secret = secrets.token_bytes(32)
        if ask.link in self._links:
            raise WireError("that link id cannot be used")
        for link in self.links_with(remote_key):
            if not link.is_ours:
                self.close_link(link)  # who opens another has given up the one before
        sealed = SealedLink(ask.link, ask.secret + secret, cipher, opener=False)
        self._links[ask.link] = Link(sealed, remote_key, is_ours=False)
        return PeerToPeerLinkOpened(secret=secret, cipher=cipher)

    def links_with(self, remote_key: bytes) -> list[Link]:
        """Those in use with the holder of that key; first the one that both ends prefer: what goes one way over it
        carries the receipts of what goes the other way."""
        links = [link for link in self._links.values() if link.remote_key == remote_key]
        return sorted(links, key=lambda link: link.sealed.link)

    def close_link(self, link: Link) -> None:
        """Forget its keys and stop its streams; those that receive resume on another link."""
        if self._links.get(link.sealed.link) is link:
            del self._links[link.sealed.link]
        link.close()
        self._io_thread.close(link)

    # Memory between processes of one machine -----------------------------------------------------------------

    def _offer_memory(self, link: Link) -> None:
        try:
            link.offered = offered = Offered()
        except OSError as error:
            log.debug("no memory to share: %s", error)
            return
        link.memory = offered.memory
        self._say(
            link, PeerToPeerOfferMemory(process=offered.process, descriptor=offered.descriptor, token=offered.token)
        )

    def _open_memory(self, link: Link, offer: PeerToPeerOfferMemory) -> None:
        if link.is_ours or link.was_offered:
            raise WireError("an offer of memory that is out of turn")
        link.was_offered = True
        connections = list(link.connections)
        try:
            if not connections or not all(is_on_this_machine(one.socket) for one in connections):
                raise LinkError("the other end is on another machine")
            link.memory = open_shared(offer.process, offer.descriptor, offer.token)
        except LinkError as error:
            log.info("a link goes without shared memory: %s", error)
        self._say(link, PeerToPeerMemoryOpened(is_open=link.memory is not None))

    def _use_memory(self, link: Link, answer: PeerToPeerMemoryOpened) -> None:
        if link.memory is None or link.offered is None:
            raise WireError("an answer to no offer of memory")
        link.withdraw()
        link.memory.is_shared = answer.is_open
        if not answer.is_open:
            link.memory = None

    # Messages about streams -----------------------------------------------------------------------------

    def _say(self, link: Link, message: Message) -> None:
        if self._links.get(link.sealed.link) is link:
            self._io_thread.order(link, encode(Envelope("notice", 0, message)))

    def _hear(self, link: Link) -> None:
        for order in link.orders():
            if self._links.get(link.sealed.link) is not link:
                return  # closed, here or by what came before
            try:
                match decode(order).message:
                    case PeerToPeerOpenStream() as ask:
                        self._serve(link, ask)
                    case PeerToPeerCloseStream(stream=number):
                        link.close_stream(number)
                        self._io_thread.forget(link, number)
                    case PeerToPeerStreamEnded(stream=number) as end:
                        if (incoming := link.incoming.get(number)) is not None:
                            incoming.fail(remote_error(end.code, end.message))
                    case PeerToPeerOfferMemory() as offer:
                        self._open_memory(link, offer)
                    case PeerToPeerMemoryOpened() as answer:
                        self._use_memory(link, answer)
                    case other:
                        raise WireError(f"{type(other).__name__} is not about a stream")
            except LinkError as error:
                log.warning("closed a link: %s", error)
                self.close_link(link)

    # Sending --------------------------------------------------------------------------------------------

    def _serve(self, link: Link, ask: PeerToPeerOpenStream) -> None:
        """Begin to send. Raises ``WireError`` for a number that is taken."""
        if ask.stream in link.outgoing:
            raise WireError("that stream number is taken")
        if len(link.outgoing) >= MAX_STREAMS_PER_LINK:
            self._end(link, ask, BlobUnavailable("too many streams on this link"))
            return
        stream = link.outgoing[ask.stream] = Outgoing(min(ask.credit, MOST_CREDIT))
        stream.task = self._tasks.create_task(self._send_stream(link, stream, ask))

    async def _send_stream(self, link: Link, stream: Outgoing, ask: PeerToPeerOpenStream) -> None:
        try:
            source = self._sources.get(ask.blob) or await self._soon(ask.blob)
            if ask.stop > source.chunks or ask.first > ask.stop:
                raise BlobUnavailable(f"{ask.blob.kind} of {ask.blob.number} has only {source.chunks} chunks")
            with reading(source, link.remote_key):
                await self._send_chunks(link, stream, ask, source)
        except ShoalError as error:
            log.debug("stream of %s ended early: %s", ask.blob, error)
            self._end(link, ask, error)
        finally:
            if link.outgoing.get(ask.stream) is stream:
                del link.outgoing[ask.stream]

    async def _send_chunks(self, link: Link, stream: Outgoing, ask: PeerToPeerOpenStream, source: ChunkSource) -> None:
        for index in range(ask.first, ask.stop):
            await stream.take()
            chunk = await source.chunk(index)
            frame = Frame(ask.stream, index, chunk, ask.blob.scope)
            self._io_thread.send(link, frame, urgent=ask.blob.kind in _URGENT)

    async def _soon(self, blob: Blob) -> ChunkSource:
        """Who asks has heard of a round a moment before us, more often than not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SOON_S):
                while blob not in self._sources:
                    await self._published.wait()
        source = self._sources.get(blob)
        if source is None:
            raise BlobUnavailable(f"no {blob.kind} of {blob.number} here")
        return source

    def _end(self, link: Link, ask: PeerToPeerOpenStream, why: ShoalError) -> None:
        message = words_for_others(why)[:_MOST_SAID]
        self._say(link, PeerToPeerStreamEnded(stream=ask.stream, code=type(why).__name__, message=message))

    def share_uplink(self, shares: Mapping[bytes, float]) -> None:
        """Of what we send, the holder of each key is to get that share from now on; none: as TCP sees fit."""
        self._io_thread.share_uplink(shares)

    # Receiving ------------------------------------------------------------------------------------------

    def open_stream(self, link: Link, blob: Blob, chunks: range, sink: Sink) -> tuple[int, Incoming]:
        """Have the other side send those chunks; returns the stream's number too.

        When it has none of them (any more), ``Incoming.next`` raises what it says: ``BlobUnavailable``, ``Busy``."""
        number, incoming = link.open_incoming(chunks, sink, blob.scope)
        ask = PeerToPeerOpenStream(stream=number, blob=blob, first=chunks.start, stop=chunks.stop, credit=CREDIT)
        self._say(link, ask)
        return number, incoming

    def grant(self, link: Link, number: int, incoming: Incoming, in_use: int = 0) -> None:
        """Let more of a stream come, if it is time to; ``in_use`` of the chunks that were taken still are."""
        if credit := incoming.grant(in_use):
            self._io_thread.grant(link, number, credit)

    def close_stream(self, link: Link, number: int, *, finished: bool) -> None:
        """Take no more of a stream; unless it is ``finished``, the other side is told to send no more."""
        link.close_incoming(number)
        if not finished:
            self._say(link, PeerToPeerCloseStream(stream=number))
