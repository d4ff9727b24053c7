"""One member's end of the network: the control and data planes together, addressed by peer id.

``Endpoint`` is the interface that the averaging protocol and the tests' in-memory network share; ``Node`` is the
real one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import zmq.asyncio

from shoal.swarm.bulk import CREDIT, ChunkSource, DataPlane, Incoming, Link, Meter
from shoal.swarm.control import Channel, ControlPlane
from shoal.swarm.errors import LinkClosed, LinkError, NotAdmitted, Unreachable, WireError
from shoal.swarm.identity import CurveKeys, verify_certificate
from shoal.swarm.messages import (
    Acknowledged,
    Blob,
    Message,
    PeerToPeerCloseStream,
    PeerToPeerLinkOpened,
    PeerToPeerOpenLink,
    PeerToPeerOpenStream,
    PeerToPeerPing,
    PeerToPeerPong,
    PeerToPeerStreamCredit,
    PeerToPeerStreamOpened,
    RosterEntry,
)

log = logging.getLogger(__name__)

Sink = Callable[[int, int], memoryview]
"""``sink(chunk, size_bytes)`` gives the writable memory for that chunk; raises ``WireError`` to refuse it."""

_ATTEMPTS = 3
_RETRY_S = 0.05
_MAX_RETRY_S = 0.5


class Endpoint(Protocol):
    """What the averaging protocol needs of a network."""

    def publish(self, blob: Blob, source: ChunkSource) -> None: ...

    def retract(self, blob: Blob) -> None: ...

    def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float
    ) -> AsyncGenerator[int, None]: ...


class Node:
    """The real endpoint. Make it with ``Node.open``."""

    def __init__(self, control: ControlPlane, data: DataPlane) -> None:
        self.control = control
        self._data = data
        self._roster: dict[str, RosterEntry] = {}
        self._peers_by_key: dict[bytes, str] = {}
        self._link_locks: dict[str, asyncio.Lock] = {}
        self.control_port = 0
        self.data_port = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, keys: CurveKeys, host: str, ports: tuple[int, int], admit: Callable[[bytes], Awaitable[bool]]
    ) -> AsyncIterator[Node]:
        """Bind both planes on ``host`` (port 0: any free one); everything ends with the context."""
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as tasks:
                node = cls(ControlPlane(context, keys, admit, tasks), DataPlane(context, tasks))
                try:
                    node._register()
                    node.control_port = node.control.start(host, ports[0])
                    node.data_port = node._data.start(host, ports[1])
                    yield node
                finally:
                    node.control.stop()
                    node._data.stop()
                tasks.create_task(_end())
        except* _Ended:
            pass
        finally:
            context.destroy(linger=0)

    @property
    def meter(self) -> Meter:
        return self._data.meter

    def update_roster(self, roster: tuple[RosterEntry, ...]) -> None:
        """Replace the set of members that may talk to us. Entries whose certificate is wrong are left out."""
        entries = {}
        for entry in roster:
            try:
                if verify_certificate(entry.certificate) == entry.peer:
                    entries[entry.peer] = entry
            except NotAdmitted as error:
                log.warning("roster entry %s left out: %s", entry.peer, error)
        self._roster = entries
        self._peers_by_key = {entry.certificate.curve_key: peer for peer, entry in entries.items()}

    def knows_key(self, curve_key: bytes) -> bool:
        return curve_key in self._peers_by_key

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._data.publish(blob, source)

    def retract(self, blob: Blob) -> None:
        self._data.retract(blob)

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        """Yield the index of each chunk once it lies in its sink, in order, resuming over broken links.

        Raises the last ``LinkError`` (``Unreachable``, ``BlobUnavailable``, …) after ``progress_s`` without a
        new chunk.
        """
        following, progress = chunks.start, time.monotonic()
        retry_s, trouble = _RETRY_S, LinkError(f"{peer} sent nothing")
        while following < chunks.stop:
            try:
                rest = range(following, chunks.stop)
                async with aclosing(self._attempt(peer, blob, rest, sink, progress_s / _ATTEMPTS)) as attempt:
                    async for chunk in attempt:
                        following, progress, retry_s = chunk + 1, time.monotonic(), _RETRY_S
                        yield chunk
            except LinkError as error:
                trouble = error
            if following < chunks.stop:
                if time.monotonic() - progress > progress_s:
                    raise trouble
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _attempt(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, wait_s: float
    ) -> AsyncGenerator[int, None]:
        channel = self._channel(peer)
        link = await self._link(peer, channel, wait_s)
        number, incoming = self._data.open_incoming(link, chunks.start)
        ask = PeerToPeerOpenStream(
            stream=number,
            link=link.sealed.link,
            blob=blob,
            first=chunks.start,
            stop=chunks.stop,
            credit=CREDIT,
        )
        finished = False
        try:
            await channel.request(ask, PeerToPeerStreamOpened, wait_s)
            consumed = 0
            for _ in chunks:
                yield await self._next_chunk(link, incoming, sink, wait_s)
                consumed += 1
                if consumed % (CREDIT // 2) == 0:
                    await channel.notify(
                        PeerToPeerStreamCredit(stream=number, link=link.sealed.link, credit=CREDIT // 2)
                    )
            finished = True
        except TimeoutError as error:
            if time.monotonic() - link.last_frame_s >= wait_s:
                self._data.close_link(link)
            raise LinkError(f"{peer} sent no chunk of {blob.kind} {blob.number} for {wait_s:.1f} s") from error
        except LinkClosed:
            self._data.close_link(link)
            raise
        finally:
            link.incoming.pop(number, None)
            if not finished:
                await self._stop_stream(channel, link, number)

    async def _next_chunk(self, link: Link, incoming: Incoming, sink: Sink, wait_s: float) -> int:
        while True:
            if incoming.gap and incoming.frames.empty():
                raise LinkError("frames were lost on the way")
            async with asyncio.timeout(wait_s):
                frame = await incoming.frames.get()
            if frame is None:
                continue
            try:
                return await self._data.unseal(link, *frame, sink)
            except WireError as error:
                log.warning("dropped a bulk frame: %s", error)
                incoming.gap = True

    async def _stop_stream(self, channel: Channel, link: Link, number: int) -> None:
        try:
            async with asyncio.timeout(1.0):
                await channel.notify(PeerToPeerCloseStream(stream=number, link=link.sealed.link))
        except (TimeoutError, LinkError):
            log.debug("could not tell %s to stop a stream", channel.label)

    def _channel(self, peer: str) -> Channel:
        entry = self._roster.get(peer)
        if entry is None:
            raise Unreachable(f"{peer} is not on the roster (any more)")
        if entry.reachable:
            return self.control.dial(entry.host, entry.control_port, entry.certificate.curve_key)
        channel = self.control.incoming(entry.certificate.curve_key)
        if channel is None:
            raise Unreachable(f"{peer} cannot be reached from here and has not called yet")
        return channel

    async def _link(self, peer: str, channel: Channel, wait_s: float) -> Link:
        """The link with that peer; opens one when there is none and the peer can be reached."""
        entry = self._roster[peer]
        async with self._link_locks.setdefault(peer, asyncio.Lock()):
            links = self._data.links_with(channel.remote_key)
            attached = [link for link in links if link.attached.is_set() and link.routing is None]
            attached += [link for link in links if link.attached.is_set() and link.routing is not None]
            if attached:
                return attached[0]
            if not entry.reachable:
                raise Unreachable(f"{peer} has not opened a link yet")

            async def agree(ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
                await channel.connected(wait_s)
                return await channel.request(ask, PeerToPeerLinkOpened, wait_s)

            return await self._data.open_link(channel.remote_key, entry.host, entry.data_port, agree)

    async def call_on(self, peer: str, wait_s: float) -> None:
        """Make sure that a link with ``peer`` exists, so that it can fetch from us though it cannot reach us."""
        await self._link(peer, self._channel(peer), wait_s)

    # What others ask of us ------------------------------------------------------------------------------

    def _register(self) -> None:
        control = self.control

        async def ping(channel: Channel, message: Message) -> Message:
            return PeerToPeerPong()

        async def open_link(channel: Channel, message: Message) -> Message:
            assert isinstance(message, PeerToPeerOpenLink)
            self._require_member(channel)
            return self._data.accept_link(channel.remote_key, message)

        async def open_stream(channel: Channel, message: Message) -> Message:
            assert isinstance(message, PeerToPeerOpenStream)
            self._require_member(channel)
            self._data.serve(self._data.find_link(channel.remote_key, message.link), message)
            return PeerToPeerStreamOpened()

        async def add_credit(channel: Channel, message: Message) -> Message:
            assert isinstance(message, PeerToPeerStreamCredit)
            link = self._data.find_link(channel.remote_key, message.link)
            self._data.add_credit(link, message.stream, message.credit)
            return Acknowledged()

        async def close_stream(channel: Channel, message: Message) -> Message:
            assert isinstance(message, PeerToPeerCloseStream)
            link = self._data.find_link(channel.remote_key, message.link)
            self._data.close_stream(link, message.stream)
            return Acknowledged()

        control.handle(PeerToPeerPing, ping)
        control.handle(PeerToPeerOpenLink, open_link)
        control.handle(PeerToPeerOpenStream, open_stream)
        control.handle(PeerToPeerStreamCredit, add_credit)
        control.handle(PeerToPeerCloseStream, close_stream)

    def _require_member(self, channel: Channel) -> None:
        if channel.remote_key not in self._peers_by_key:
            raise NotAdmitted("only members of the run may open links")


class _Ended(Exception):
    """Ends a task group whose tasks would run for ever."""


async def _end() -> None:
    raise _Ended
