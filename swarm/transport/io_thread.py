"""The I/O thread of the data plane: reads and writes the data sockets, seals and opens frames.

It runs beside the event loop, since a frame costs the loop far more than its bytes do: here a frame is a few system
calls and one pass of the cipher, straight from the sender's memory to the receiver's. Frames of unknown links, of
streams that nobody waits for, or under other keys have no effect.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import selectors
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.addresses import network_of
from shoal.swarm.transport.frame_crypto import CHUNK, CREDIT, HELLO, ORDER, TAG_BYTES, Header
from shoal.swarm.transport.link import (
    MAX_CHUNK_BYTES,
    PREFIX_BYTES,
    READ_BYTES,
    Connection,
    Frame,
    FrameQueue,
    Link,
    Meter,
)
from shoal.swarm.transport.pacing import TICK_S, Pacing
from shoal.swarm.transport.sockets import descriptors_allowed, tune_stream
from shoal.swarm.transport.stranger_limits import StrangerPlaces, strangers_allowed

MAX_ORDER_BYTES = 2**12
"""Of a message about a stream."""


class Intake:
    """Opens frames, each into its place."""

    def __init__(
        self, meter: Meter, tell: Callable[[Callable[[], None]], None], on_orders: Callable[[Link], None]
    ) -> None:
        """``tell``: has something called on the event loop; there ``on_orders`` is when a link has ``orders``."""
        self._meter = meter
        self._tell = tell
        self._on_orders = on_orders

    def take(self, link: Link, header_bytes: bytes, body: memoryview) -> None:
        """A frame that has come over ``link``. Raises ``WireError`` for one that breaks it."""
        header = Header.unpack(header_bytes)
        if header.link != link.sealed.link:
            raise WireError("a bulk frame of another link")
        link.last_frame_s = time.monotonic()
        if header.kind == CHUNK:
            self._take_chunk(link, header, header_bytes, body)
            return
        if body.nbytes > MAX_ORDER_BYTES + TAG_BYTES:
            raise WireError(f"a message of {body.nbytes} bytes about a stream")
        said = bytearray(body.nbytes - TAG_BYTES)
        link.sealed.open(header_bytes, body, memoryview(said))
        if header.kind == CREDIT:
            outgoing = link.outgoing.get(header.stream)
            if outgoing is not None and outgoing.receive(header.chunk):
                self._tell(outgoing.notify)
        elif header.kind == ORDER and link.order(bytes(said)):
            self._tell(partial(self._on_orders, link))

    def _take_chunk(self, link: Link, header: Header, header_bytes: bytes, body: memoryview) -> None:
        incoming = link.incoming.get(header.stream)
        if incoming is None:
            return  # nobody waits for it any more
        if header.scope != incoming.scope:
            raise WireError("a chunk of another scope than its stream's")
        size = body.nbytes - TAG_BYTES
        if incoming.receive(header.chunk, size, lambda place: link.sealed.open(header_bytes, body, place)):
            self._meter.received(PREFIX_BYTES + body.nbytes, link.last_frame_s, header.scope)
        if not incoming.is_announced:
            incoming.is_announced = True
            self._tell(incoming.notify)


log = logging.getLogger(__name__)

MAX_CONNECTIONS_PER_LINK = 16
_GREETING_S = 10.0
_MOST_WAITING_BYTES = 2**28
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 0.1
"""Nothing is accepted for so long once there is no descriptor for it."""

_ACCEPTED_AT_ONCE = 16
_TURN = 4
"""Frames of one connection before another one has its turn."""


class IoThread:
    """The thread. Its public methods are for the event loop, where it also says what it has to say."""

    def __init__(
        self,
        links: Mapping[bytes, Link],
        meter: Meter,
        on_closed: Callable[[Link], None],
        on_orders: Callable[[Link], None],
    ) -> None:
        """``links``: by name; looked up for every frame. Called on the loop: ``on_closed`` when a link broke,
        ``on_orders`` when messages have come over it."""
        self._links = links
        self._meter = meter
        self._on_closed = on_closed
        self._intake = Intake(meter, self._tell, on_orders)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Has the error of a thread that ended by itself; cancelled by whoever waits for it no more."""
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = sockets.socketpair()
        for one in (self._wake_up, self._woken):
            one.setblocking(False)
        self._orders: deque[Callable[[], None]] = deque()
        self._news: deque[Callable[[], None]] = deque()
        self._news_announced = self._is_asleep = self._is_stopping = False
        self._listener: sockets.socket | None = None
        self._accept_again_s: float | None = None
        self._strangers = StrangerPlaces[Connection](
            strangers_allowed(descriptors_allowed()), random.Random(), lambda one: one.received_bytes
        )
        self._pacing = Pacing()
        self._thread = threading.Thread(target=self._run, name="shoal-bulk", daemon=True)

    def start(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Close every socket and end the thread."""
        self._is_stopping = True
        if self._thread.ident is not None:
            self._order(lambda: None)
            self._thread.join()
        self.ended.cancel()
        self._wake_up.close()
        self._woken.close()
        self._selector.close()

    def listen(self, listener: sockets.socket) -> None:
        """Accept connections of links that the other side opens."""
        listener.setblocking(False)
        self._order(lambda: self._listen(listener))

    def attach(self, link: Link, socket: sockets.socket) -> None:
        """A connection of a link that we opened; says which link it is."""
        self._order(lambda: self._attach(link, socket))

    def send(self, link: Link, frame: Frame, *, urgent: bool = False) -> None:
        """Queue a frame; its chunk's bytes must not change until it is sent.

        Streams' credit bounds the queue of those that read what they give credit for; others are cut off."""
        assert frame.payload.nbytes <= MAX_CHUNK_BYTES, "the other side would refuse it"
        if link.queue.waiting_bytes + frame.payload.nbytes > _MOST_WAITING_BYTES:
            self._order(lambda: self._break(link, WireError("it does not read what it asks for")))
            return
        link.queue.put(frame, FrameQueue.URGENT if urgent else FrameQueue.USUAL)
        self._flush_soon(link)

    def order(self, link: Link, message: bytes) -> None:
        """Say something about a stream; what is said arrives in that order."""
        assert len(message) <= MAX_ORDER_BYTES, "the other side would refuse it"
        link.queue.put(Frame(0, 0, memoryview(message), kind=ORDER), FrameQueue.ORDER)
        self._flush_soon(link)

    def forget(self, link: Link, stream: int) -> None:
        """Send no more of that stream's frames."""
        self._order(lambda: link.queue.drop(stream))

    def grant(self, link: Link, stream: int, credit: int) -> None:
        """Let the other side send that many chunks more."""
        link.queue.put(Frame(stream, credit, memoryview(b""), kind=CREDIT), FrameQueue.CREDIT)
        self._flush_soon(link)

    def share_uplink(self, shares: Mapping[bytes, float]) -> None:
        """Of what we send, each key's holder is to get that share from now on; none: as TCP sees fit."""
        self._order(lambda: self._pacing.share(shares))

    def close(self, link: Link) -> None:
        """Close a link's connections."""
        self._order(lambda: self._close_all(link))

    # Between the threads ----------------------------------------------------------------------------------

    def _flush_soon(self, link: Link) -> None:
        if not link.is_flushing:
            link.is_flushing = True
            self._order(lambda: self._flush(link))

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        if self._is_asleep:
            self._is_asleep = False
            try:
                self._wake_up.send(b"\0")
            except BlockingIOError:  # it has more than enough to wake up by
                log.debug("the wake-up socket is full")

    def _tell(self, news: Callable[[], None]) -> None:
        """Have something called on the loop, together with what else has happened."""
        self._news.append(news)
        if not self._news_announced:
            self._news_announced = True
            self._loop.call_soon_threadsafe(self._take_news)

    def _take_news(self) -> None:
        self._news_announced = False
        while self._news:
            self._news.popleft()()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception as error:  # noqa: BLE001 - the loop raises it
            failure = error
            self._tell(lambda: None if self.ended.done() else self.ended.set_exception(failure))
        finally:
            for order in list(self._orders):  # sockets may be on their way to us
                with suppress(OSError, ValueError, KeyError):
                    order()
            if self._listener is not None:  # it may be resting
                self._listener.close()
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, sockets.socket)
                key.fileobj.close()

    # On the thread ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._pacing.rest_s:
            time.sleep(self._pacing.rest_s)
        self._is_asleep = True
        # Only after the flag is up: an order that came before it has woken nobody.
        rests = _REST_S if self._accept_again_s is not None else None
        patience_s = TICK_S if self._pacing.is_on else rests or (1.0 if self._strangers else None)
        ready = self._selector.select(0 if self._orders else patience_s)
        self._is_asleep = False
        if self._accept_again_s is not None and time.monotonic() >= self._accept_again_s:
            self._accept_again()
        for key, events in ready:
            if key.data is None:
                self._drain_wake_ups()
            elif not isinstance(key.data, Connection):
                self._accept(key.data)
            else:
                # What came before may have closed it, in this turn or just now.
                if events & selectors.EVENT_WRITE and not key.data.is_closed:
                    self._unblock(key.data)
                if events & selectors.EVENT_READ and not key.data.is_closed:
                    self._read(key.data)
        for _ in range(len(self._orders)):
            self._orders.popleft()()
        if self._strangers:
            self._dismiss_strangers()
        if self._pacing.is_on:
            self._pacing.look(time.monotonic(), self._links)

    def _drain_wake_ups(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            return

    def _listen(self, listener: sockets.socket) -> None:
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def _accept(self, listener: sockets.socket) -> None:
        try:
            for _ in range(_ACCEPTED_AT_ONCE):
                self._take_in(*listener.accept())
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _EXHAUSTED:
                log.warning("could not accept a data connection: %s", error)
                self._dismiss_strangers(all_of_them=True)
                # It would be offered again at once, and for ever where it is not strangers who have taken them all.
                self._selector.unregister(listener)
                self._accept_again_s = time.monotonic() + _REST_S

    def _accept_again(self) -> None:
        self._accept_again_s = None
        if self._listener is not None:
            self._listen(self._listener)

    def _take_in(self, socket: sockets.socket, address: tuple[str, int]) -> None:
        connection = Connection(socket, None, time.monotonic())
        try:
            tune_stream(socket)
            self._selector.register(socket, selectors.EVENT_READ, connection)
        except OSError as error:
            log.debug("a caller was gone at once: %s", error)
            socket.close()
            return
        victim = self._strangers.add(connection, network_of(address[0]))
        if victim is not None:
            self._drop(victim)

    def _dismiss_strangers(self, all_of_them: bool = False) -> None:
        """Close connections that have not said in time whose they are."""
        now_s = time.monotonic()
        for connection in list(self._strangers):
            if all_of_them or now_s > connection.since_s + _GREETING_S:
                self._drop(connection)
            else:
                break  # the oldest come first

    def _attach(self, link: Link, socket: sockets.socket) -> None:
        try:
            tune_stream(socket)
            connection = Connection(socket, link, time.monotonic())
            connection.put(link, Frame(0, 0, memoryview(b""), kind=HELLO))
            connection.send()
        except OSError as error:
            socket.close()
            self._break(link, error)
            return
        if self._links.get(link.sealed.link) is not link:  # closed in the meantime
            socket.close()
            return
        link.connections.append(connection)
        self._selector.register(socket, selectors.EVENT_READ, connection)
        self._write(connection)

    # Reading

    def _read(self, connection: Connection) -> None:
        link = connection.link
        # Who rests has a batch anyway; and Linux would acknowledge each packet of it up to the mark.
        low_water_bytes = 1 if self._pacing.rest_s else READ_BYTES
        try:
            for _ in range(_TURN):
                header, body = connection.receive(low_water_bytes)
                if connection.link is None:
                    link = self._greet(connection, header, body)
                elif link is not None:
                    self._intake.take(link, header, body)
                connection.release()
        except BlockingIOError:
            if link is not None:
                link.last_frame_s = time.monotonic()
        except (OSError, WireError) as error:
            if link is None:
                self._drop(connection)
            else:
                self._break(link, error)

    def _greet(self, connection: Connection, header_bytes: bytes, body: memoryview) -> Link:
        """The first frame proves to which link a connection belongs. Raises ``WireError``."""
        header = Header.unpack(header_bytes)
        link = self._links.get(header.link)
        if link is None or link.is_ours or header.kind != HELLO:
            raise WireError("a data connection of no link")
        if len(link.connections) >= MAX_CONNECTIONS_PER_LINK:
            raise WireError("too many connections for one link")
        link.sealed.open(header_bytes, body, memoryview(bytearray(0)))
        self._strangers.remove(connection)
        connection.link = link
        link.connections.append(connection)
        self._tell(link.attached.set)
        self._write(connection)
        return link

    # Writing

    def _flush(self, link: Link) -> None:
        link.is_flushing = False
        for connection in list(link.connections):
            if not connection.is_blocked:
                self._write(connection)

    def _unblock(self, connection: Connection) -> None:
        connection.is_blocked = False
        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        link = connection.link
        if link is None or connection not in link.connections:
            return
        try:
            for _ in range(_TURN):
                connection.send()
                frame = link.queue.take(orders=connection is link.connections[0])
                if frame is None:
                    return
                size = connection.put(link, frame)
                if frame.kind == CHUNK:
                    self._meter.sent(size, time.monotonic(), frame.scope)
            connection.send()
        except BlockingIOError:
            connection.is_blocked = True
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        except OSError as error:
            self._break(link, error)
        else:
            self._flush_soon(link)

    # Ending

    def _break(self, link: Link, why: Exception) -> None:
        """A link is as good as its worst connection: its ends agree on what is lost only when all of it is."""
        log.debug("a link broke: %s", why)
        self._close_all(link)
        self._tell(lambda: self._on_closed(link))

    def _close_all(self, link: Link) -> None:
        while link.connections:
            self._drop(link.connections.pop())
        link.queue.clear()

    def _drop(self, connection: Connection) -> None:
        self._strangers.remove(connection)
        if not connection.is_closed:
            self._selector.unregister(connection.socket)
            connection.socket.close()
