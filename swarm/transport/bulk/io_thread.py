"""The I/O thread of the data plane: reads and writes the data sockets, seals and opens frames.

A frame costs an event loop far more than its bytes do, so this thread runs beside it: here a frame is a few system
calls and one pass of the cipher, straight from the sender's memory to the receiver's. Frames of unknown links, of
streams that nobody receives, or under wrong keys have no effect. Where the owner has limited this machine's traffic,
the connections that may not go on yet are held back here, and go on in turn.
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
from shoal.swarm.protocol.types import PathKind
from shoal.swarm.transport.bulk.data_connection import (
    MAX_CHUNK_BYTES,
    PREFIX_BYTES,
    READ_BYTES,
    DataConnection,
    HeldBack,
)
from shoal.swarm.transport.bulk.frame_crypto import CHUNK, CREDIT, HELLO, STREAM_CONTROL, TAG_BYTES, Header
from shoal.swarm.transport.bulk.link import Frame, FrameQueue, Link
from shoal.swarm.transport.bulk.pacing import TICK_S, Pacing
from shoal.swarm.transport.limits.caller_limits import StrangerPlaces, strangers_allowed
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.limits.traffic_meter import TrafficMeter
from shoal.swarm.transport.tcp.sockets import descriptors_allowed, limit_receive_buffer, tune_stream

log = logging.getLogger(__name__)

MAX_STREAM_CONTROL_BYTES = 2**12

MAX_CONNECTIONS_PER_LINK = 16
_HELLO_S = 10.0
"""A new connection has to show within this time to which link it belongs."""

_MAX_WAITING_BYTES = 2**28
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_PAUSE_S = 0.1
"""Pause of accepting connections when no descriptor is left."""

_MAX_ACCEPTS = 16
"""Connections accepted before other sockets have their turn."""

_MAX_FRAMES = 4
"""Frames of one connection before other connections have their turn."""


class FrameReceiver:
    """Opens received frames: chunks into their sinks, credit and stream control messages for the event loop."""

    def __init__(
        self,
        meter: TrafficMeter,
        call_on_loop: Callable[[Callable[[], None]], None],
        on_stream_control: Callable[[Link], None],
    ) -> None:
        """``on_stream_control``: called on the event loop when a link has received stream control messages."""
        self._meter = meter
        self._call_on_loop = call_on_loop
        self._on_stream_control = on_stream_control

    def receive(self, link: Link, header_bytes: bytes, body: memoryview) -> None:
        """Open a frame of ``link``. Raises ``WireError`` for a frame after which the link cannot be used."""
        header = Header.unpack(header_bytes)
        if header.link != link.sealed.link:
            raise WireError("a bulk frame of another link")
        link.last_frame_s = time.monotonic()
        if header.kind == CHUNK:
            self._receive_chunk(link, header, header_bytes, body)
            return
        if body.nbytes > MAX_STREAM_CONTROL_BYTES + TAG_BYTES:
            raise WireError(f"a stream control message of {body.nbytes} bytes; at most {MAX_STREAM_CONTROL_BYTES}")
        control = bytearray(body.nbytes - TAG_BYTES)
        link.sealed.open(header_bytes, body, memoryview(control))
        if header.kind == CREDIT:
            outgoing = link.outgoing.get(header.stream)
            if outgoing is not None and outgoing.receive_credit(header.chunk):
                self._call_on_loop(outgoing.notify)
        elif header.kind == STREAM_CONTROL and link.receive_stream_control(bytes(control)):
            self._call_on_loop(partial(self._on_stream_control, link))

    def _receive_chunk(self, link: Link, header: Header, header_bytes: bytes, body: memoryview) -> None:
        incoming = link.incoming.get(header.stream)
        if incoming is None:
            return  # the stream was closed meanwhile
        if header.scope != incoming.scope:
            raise WireError("a chunk of a scope that is not its stream's")
        size = body.nbytes - TAG_BYTES
        if incoming.receive(header.chunk, size, lambda place: link.sealed.open(header_bytes, body, place)):
            self._meter.count_received(PREFIX_BYTES + body.nbytes, link.last_frame_s, header.scope)
        if not incoming.is_announced:
            incoming.is_announced = True
            self._call_on_loop(incoming.notify)


class IoThread:
    """The thread. Its public methods are for the event loop, on which it also calls its callbacks."""

    def __init__(
        self,
        links: Mapping[bytes, Link],
        meter: TrafficMeter,
        limits: TrafficLimits,
        on_closed: Callable[[Link], None],
        on_stream_control: Callable[[Link], None],
    ) -> None:
        """``links``: by name, looked up when a connection attaches. Called on the event loop: ``on_closed`` when a link
        broke, ``on_stream_control`` when it has received stream control messages."""
        self._links = links
        self._meter = meter
        self._limits = limits
        self._held_reads: dict[DataConnection, None] = {}
        self._held_writes: dict[DataConnection, None] = {}
        """Connections that a limit holds back, those that have waited for longest first."""
        self._on_closed = on_closed
        self._receiver = FrameReceiver(meter, self._call_on_loop, on_stream_control)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Receives the error of the thread if it fails; cancelled by ``stop``."""
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = sockets.socketpair()
        for one in (self._wake_up, self._woken):
            one.setblocking(False)
        self._commands: deque[Callable[[], None]] = deque()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._callbacks_scheduled = self._is_asleep = self._is_stopping = False
        self._listener: sockets.socket | None = None
        self._accept_again_s: float | None = None
        self._strangers = StrangerPlaces[DataConnection](
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
            self._post(lambda: None)
            self._thread.join()
        self.ended.cancel()
        self._wake_up.close()
        self._woken.close()
        self._selector.close()

    def listen(self, listener: sockets.socket) -> None:
        """Accept connections of links that other members open."""
        listener.setblocking(False)
        self._post(lambda: self._listen(listener))

    def accept(self, socket: sockets.socket, host: str, path: PathKind) -> None:
        """Take over a connection of a link that another member opens, made elsewhere; ``host``: from where."""
        self._post(lambda: self._add_caller(socket, (host, 0), path))

    def attach(self, link: Link, socket: sockets.socket) -> None:
        """Add a connection to a link that we opened; its first frame names the link."""
        self._post(lambda: self._attach(link, socket))

    def send(self, link: Link, frame: Frame, *, urgent: bool = False) -> None:
        """Queue a chunk, whose bytes must not change until it is sent.

        Credit bounds the queue towards receivers that read what they grant credit for; links to others are closed."""
        assert frame.payload.nbytes <= MAX_CHUNK_BYTES, "the other side would refuse it"
        if link.queue.waiting_bytes + frame.payload.nbytes > _MAX_WAITING_BYTES:
            self._post(lambda: self._break(link, WireError("the other side does not read the chunks that it asks for")))
            return
        link.queue.put(frame, FrameQueue.URGENT if urgent else FrameQueue.USUAL)
        self._flush_soon(link)

    def send_stream_control(self, link: Link, message: bytes) -> None:
        """Send a stream control message; messages of one link arrive in the order in which they were sent."""
        assert len(message) <= MAX_STREAM_CONTROL_BYTES, "the other side would refuse it"
        link.queue.put(Frame(0, 0, memoryview(message), kind=STREAM_CONTROL), FrameQueue.STREAM_CONTROL)
        self._flush_soon(link)

    def drop_stream(self, link: Link, stream: int) -> None:
        """Remove a stream's frames from the queue."""
        self._post(lambda: link.queue.drop(stream))

    def grant(self, link: Link, stream: int, credit: int) -> None:
        """Allow the other side to send ``credit`` more chunks of a stream."""
        link.queue.put(Frame(stream, credit, memoryview(b""), kind=CREDIT), FrameQueue.CREDIT)
        self._flush_soon(link)

    def share_uplink(self, shares: Mapping[bytes, float]) -> None:
        """Pace what we send so that the holder of each key gets its share of the uplink; empty ends the pacing."""
        self._post(lambda: self._pacing.begin_round(shares))

    def close(self, link: Link) -> None:
        """Close a link's connections."""
        self._post(lambda: self._close_all(link))

    # Between the threads ----------------------------------------------------------------------------------

    def _flush_soon(self, link: Link) -> None:
        if not link.is_flushing:
            link.is_flushing = True
            self._post(lambda: self._flush(link))

    def _post(self, command: Callable[[], None]) -> None:
        """Have a command run on the thread."""
        self._commands.append(command)
        if self._is_asleep:
            self._is_asleep = False
            try:
                self._wake_up.send(b"\0")
            except BlockingIOError:  # enough wake-ups are queued already
                log.debug("the wake-up socket is full")

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        """Have a callback called on the event loop, together with others that are waiting."""
        self._callbacks.append(callback)
        if not self._callbacks_scheduled:
            self._callbacks_scheduled = True
            self._loop.call_soon_threadsafe(self._run_callbacks)

    def _run_callbacks(self) -> None:
        self._callbacks_scheduled = False
        while self._callbacks:
            self._callbacks.popleft()()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception as error:  # noqa: BLE001 - raised on the event loop
            failure = error
            self._call_on_loop(lambda: None if self.ended.done() else self.ended.set_exception(failure))
        finally:
            for command in list(self._commands):  # they may hold sockets that have to be closed
                with suppress(OSError, ValueError, KeyError):
                    command()
            if self._listener is not None:  # it may be unregistered at the moment
                self._listener.close()
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, sockets.socket)
                key.fileobj.close()
            for connection in self._held_reads:  # the selector may not have them
                connection.socket.close()

    # On the thread ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._pacing.sleep_s:
            time.sleep(self._pacing.sleep_s)
        self._is_asleep = True
        # Look at the commands only after setting the flag: one that was posted before has not woken the thread.
        ready = self._selector.select(0 if self._commands else self._longest_wait_s())
        self._is_asleep = False
        if self._held_reads or self._held_writes:
            self._let_go_on()
        if self._accept_again_s is not None and time.monotonic() >= self._accept_again_s:
            self._accept_again()
        for key, events in ready:
            if key.data is None:
                self._drain_wake_ups()
            elif not isinstance(key.data, DataConnection):
                self._accept(key.data)
            else:
                # An earlier event of this turn, or the write, may have closed it.
                if events & selectors.EVENT_WRITE and not key.data.is_closed:
                    self._unblock(key.data)
                if events & selectors.EVENT_READ and not key.data.is_closed:
                    self._read(key.data)
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        if self._strangers:
            self._dismiss_strangers()
        if self._pacing.is_on:
            self._pacing.update(time.monotonic(), self._links)

    def _longest_wait_s(self) -> float | None:
        """Return for how long the thread may wait for its sockets; None for ever."""
        now_s = time.monotonic()
        waits_s = [
            *((TICK_S,) if self._pacing.is_on else ()),
            *((_ACCEPT_PAUSE_S,) if self._accept_again_s is not None else ()),
            *((1.0,) if self._strangers else ()),
            *((self._limits.upload.wait_s(now_s),) if self._held_writes else ()),
            *((self._limits.download.wait_s(now_s),) if self._held_reads else ()),
        ]
        return min(waits_s, default=None)

    def _let_go_on(self) -> None:
        """Let connections that a limit has held back go on, as far as it allows."""
        for held, limit, go_on in (
            (self._held_writes, self._limits.upload, self._write_on),
            (self._held_reads, self._limits.download, self._read_on),
        ):
            if limit.wait_s(time.monotonic()):
                continue
            for connection in list(held):
                if limit.allowed_bytes(time.monotonic()) == 0:
                    break
                if connection in held:  # else what another one did has closed it
                    go_on(connection)

    def _read_on(self, connection: DataConnection) -> None:
        del self._held_reads[connection]
        self._watch(connection)
        self._read(connection, in_turn=True)

    def _write_on(self, connection: DataConnection) -> None:
        del self._held_writes[connection]
        connection.is_blocked = False
        self._watch(connection)
        self._write(connection, in_turn=True)

    def _hold_read(self, connection: DataConnection) -> None:
        self._held_reads[connection] = None
        self._watch(connection)
        if connection.link is not None:
            connection.link.last_frame_s = time.monotonic()  # it is this side that makes it wait

    def _hold_write(self, connection: DataConnection) -> None:
        connection.is_blocked = True
        self._held_writes[connection] = None
        self._watch(connection)

    def _watch(self, connection: DataConnection) -> None:
        """Have the selector report what the connection waits for: what a limit holds back waits for no socket."""
        events = 0 if connection in self._held_reads else selectors.EVENT_READ
        if connection.is_blocked and connection not in self._held_writes:
            events |= selectors.EVENT_WRITE
        is_known = connection.socket in self._selector.get_map()
        if events and is_known:
            self._selector.modify(connection.socket, events, connection)
        elif events:
            self._selector.register(connection.socket, events, connection)
        elif is_known:
            self._selector.unregister(connection.socket)

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
            for _ in range(_MAX_ACCEPTS):
                self._add_caller(*listener.accept())
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _EXHAUSTED:
                log.warning("cannot accept a data connection: %s; closing those of strangers, trying again soon", error)
                self._dismiss_strangers(all_of_them=True)
                # The selector would report the listener at once again, without end if members hold all descriptors.
                self._selector.unregister(listener)
                self._accept_again_s = time.monotonic() + _ACCEPT_PAUSE_S

    def _accept_again(self) -> None:
        self._accept_again_s = None
        if self._listener is not None:
            self._listen(self._listener)

    def _add_caller(self, socket: sockets.socket, address: tuple[str, int], path: PathKind = "direct") -> None:
        host = "" if path == "direct" else address[0]
        connection = DataConnection(socket, None, time.monotonic(), self._limits, path, host)
        try:
            self._tune(socket)
            self._selector.register(socket, selectors.EVENT_READ, connection)
        except OSError as error:
            log.debug("an accepted connection was closed at once: %s", error)
            socket.close()
            return
        victim = self._strangers.add(connection, network_of(address[0]))
        if victim is not None:
            self._drop(victim)

    def _tune(self, socket: sockets.socket) -> None:
        tune_stream(socket)
        if (size_bytes := self._limits.receive_buffer_bytes) is not None:
            limit_receive_buffer(socket, size_bytes)

    def _dismiss_strangers(self, all_of_them: bool = False) -> None:
        """Close connections that have not shown in time to which link they belong."""
        now_s = time.monotonic()
        for connection in list(self._strangers):
            if all_of_them or now_s > connection.since_s + _HELLO_S:
                self._drop(connection)
            else:
                break  # the oldest are first

    def _attach(self, link: Link, socket: sockets.socket) -> None:
        try:
            self._tune(socket)
            connection = DataConnection(socket, link, time.monotonic(), self._limits, link.path)
            connection.seal(link, Frame(0, 0, memoryview(b""), kind=HELLO))
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

    # Reading ----------------------------------------------------------------------------------------------

    def _read(self, connection: DataConnection, *, in_turn: bool = False) -> None:
        """``in_turn``: it has waited; others go behind those that wait."""
        link = connection.link
        if self._held_reads and not in_turn:
            self._hold_read(connection)
            return
        # A paced thread sleeps and reads batches anyway; with a mark Linux would acknowledge each packet up to it.
        low_water_bytes = 1 if self._pacing.sleep_s else READ_BYTES
        try:
            for _ in range(_MAX_FRAMES):
                header, body = connection.receive(low_water_bytes)
                if connection.link is None:
                    link = self._attach_caller(connection, header, body)
                elif link is not None:
                    self._receiver.receive(link, header, body)
                connection.release()
        except HeldBack:
            self._hold_read(connection)
        except BlockingIOError:
            if link is not None:
                link.last_frame_s = time.monotonic()
        except (OSError, WireError) as error:
            if link is None:
                self._drop(connection)
            else:
                self._break(link, error)

    def _attach_caller(self, connection: DataConnection, header_bytes: bytes, body: memoryview) -> Link:
        """Attach an accepted connection to the link that its first frame proves. Raises ``WireError``."""
        header = Header.unpack(header_bytes)
        link = self._links.get(header.link)
        if link is None or link.is_ours or header.kind != HELLO:
            raise WireError("a data connection that belongs to no link")
        if len(link.connections) >= MAX_CONNECTIONS_PER_LINK:
            raise WireError(f"more than {MAX_CONNECTIONS_PER_LINK} connections for one link")
        link.sealed.open(header_bytes, body, memoryview(bytearray(0)))
        self._strangers.remove(connection)
        connection.link, link.path = link, connection.path
        link.connections.append(connection)
        self._call_on_loop(link.attached.set)
        self._write(connection)
        return link

    # Writing ----------------------------------------------------------------------------------------------

    def _flush(self, link: Link) -> None:
        link.is_flushing = False
        for connection in list(link.connections):
            if not connection.is_blocked:
                self._write(connection)

    def _unblock(self, connection: DataConnection) -> None:
        connection.is_blocked = False
        self._watch(connection)
        self._write(connection)

    def _write(self, connection: DataConnection, *, in_turn: bool = False) -> None:
        """``in_turn``: it has waited; others go behind those that wait."""
        link = connection.link
        if link is None or connection not in link.connections:
            return
        if self._held_writes and not in_turn:
            self._hold_write(connection)
            return
        try:
            for _ in range(_MAX_FRAMES):
                connection.send()
                frame = link.queue.pop(with_stream_control=connection is link.connections[0])
                if frame is None:
                    return
                size = connection.seal(link, frame)
                if frame.kind == CHUNK:
                    self._meter.count_sent(size, time.monotonic(), frame.scope)
            connection.send()
        except HeldBack:
            self._hold_write(connection)
        except BlockingIOError:
            connection.is_blocked = True
            self._watch(connection)
        except OSError as error:
            self._break(link, error)
        else:
            self._flush_soon(link)

    # Closing ----------------------------------------------------------------------------------------------

    def _break(self, link: Link, why: Exception) -> None:
        """Close a link of which one connection failed: the ends can only agree on what was lost if all of it was."""
        log.debug("closing a link: %s", why)
        self._close_all(link)
        self._call_on_loop(lambda: self._on_closed(link))

    def _close_all(self, link: Link) -> None:
        while link.connections:
            self._drop(link.connections.pop())
        link.queue.clear()

    def _drop(self, connection: DataConnection) -> None:
        self._strangers.remove(connection)
        self._held_writes.pop(connection, None)
        if not connection.is_closed:
            if connection.socket in self._selector.get_map():
                self._selector.unregister(connection.socket)
            connection.socket.close()
        self._held_reads.pop(connection, None)
