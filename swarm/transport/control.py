"""The control plane: requests, replies and notices over CURVE, one ROUTER for callers and DEALERs to call.

A channel is symmetric: whoever connected, both ends may send requests over it, so a peer that nobody can
reach still answers over the connections that it made itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
from collections import Counter
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio
from zmq.utils import z85

from shoal.swarm.aio import in_thread
from shoal.swarm.errors import (
    LinkError,
    NotAdmitted,
    ProtocolMismatch,
    ShoalError,
    Unreachable,
    WireError,
    WrongKey,
    words_for_others,
)
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.messages import Acknowledged, PeerToPeerPing, RequestFailed
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.wire import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Envelope, decode
from shoal.swarm.transport.caller_guard import CallerGuard
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.inflow import Inflow
from shoal.swarm.transport.sockets import CURVE_DOMAIN, PROBES, SILENCE_S, bind, endpoint, tune

__all__ = ["Channel", "ControlPlane", "Handler"]

log = logging.getLogger(__name__)

Handler = Callable[[Channel, Message], Awaitable[Message | None]]

MAX_CHANNELS = 4096
"""Callers that are remembered; of more, those forget that were silent the longest."""

MAX_HANDLERS = 4096
"""A thousand members may all have asked for two things at once."""

MAX_HANDLERS_PER_KEY = 64
_HANDSHAKE_TRIES = 2
_SKIPPED_AT_ONCE = 256
_REPLY_S = 15.0
_GIVEN_UP_S = 3.0
_HANDSHAKE_MS, _BACKLOG = 10_000, 1024
_CALLER_BUFFER_BYTES = 2**17
"""Of each caller, bytes that wait in the kernel. How many wait in libzmq, which has no limit that could be used
(``inflow.py``), the guard looks at."""

_LOOK_AT_CALLERS_S = 1.0
_UNBOUNDED = 2**40
_monitors = itertools.count()
_EVENT = struct.Struct("=Hi")
"""A monitor's message: which event, and its value, mostly the connection's descriptor."""


class ControlPlane:
    """All control channels of one process; its tasks live in ``tasks``."""

    def __init__(self, context: zmq.asyncio.Context, keys: CurveKeys, tasks: asyncio.TaskGroup) -> None:
        self.keys = keys
        self.silence_s = SILENCE_S
        """A dialed connection over which nothing comes for so long is made anew."""
        self._inflow = Inflow()
        self._context = context
        self._tasks = tasks
        self._handlers: dict[tuple[int, type[Message]], Handler] = {}
        self._router = context.socket(zmq.ROUTER)
        self._incoming: dict[bytes, Channel] = {}  # by key, those that were silent the longest first
        self._dialed: dict[tuple[str, bytes], Channel] = {}
        self._running_handlers = 0
        self._handlers_of: Counter[bytes] = Counter()
        """Of each key, however often its holder connects."""
        self._decoding_large = asyncio.Lock()
        self.guard = CallerGuard(MAX_REQUEST_BYTES, lambda key: False)
        """Of those that call; ``is_member`` says whose messages may be large."""

    def handle(self, kind: type[Message], handler: Handler, scope: int = 0) -> None:
        """Answer messages of this class in this scope; the handler returns the reply, or None for a notice."""
        self._handlers[scope, kind] = handler

    def leave(self, scope: int) -> None:
        """Nothing of that scope is for this side any more."""
        self._handlers = {of: handler for of, handler in self._handlers.items() if of[0] != scope}

    def start(self, host: str, port: int) -> int:
        """Bind; returns the port. Raises ``Unreachable`` when the address is taken or not ours."""
        self._configure(self._router)
        self._router.curve_server = True
        self._router.zap_domain = CURVE_DOMAIN
        self._router.router_mandatory = True
        self._router.handshake_ivl, self._router.backlog = _HANDSHAKE_MS, _BACKLOG
        self._router.maxmsgsize, self._router.rcvbuf = MAX_FRAME_BYTES, _CALLER_BUFFER_BYTES
        self.guard.start(self._context, self._router, f"inproc://monitor-{next(_monitors)}")
        bound = self.guard.port = bind(self._router, host, port)
        self._tasks.create_task(self._receive_incoming())
        self._tasks.create_task(self._look_at_callers())
        self._tasks.create_task(self._watch_guard())
        self._tasks.create_task(self._watch_inflow())
        self._tasks.create_task(self._watch_dialed())
        return bound

    def stop(self) -> None:
        # Incoming ones too: sending on a closed socket leaves a failed future behind that nobody looks at.
        for channel in self.channels:
            self._close(channel, Unreachable("closing down"), linger_ms=100)
        self.guard.stop()
        self._router.close(linger=100)

    # Calling ----------------------------------------------------------------------------------------------

    def dial(self, host: str, port: int, key: bytes) -> Channel:
        """The channel to the server that holds ``key``; connects, and reconnects, in the background.

        Raises ``Unreachable`` when the address cannot be one.
        """
        address = endpoint(host, port)
        known = self._dialed.get((address, key))
        if known is not None:
            return known
        with contextlib.ExitStack() as undo:
            try:
                socket = self._context.socket(zmq.DEALER)
                undo.callback(_close_monitored, socket, linger_ms=0)
                monitor = self._context.socket(zmq.PAIR)
                undo.callback(monitor.close, linger=0)
                undo.callback(_close_monitored, socket, linger_ms=0)  # before its monitor
                _monitor(socket, monitor, zmq.EVENT_ALL)
                self._configure(socket)
                socket.curve_serverkey = z85.encode(key)
                socket.immediate = True
                socket.connect(address)
            except zmq.ZMQError as error:
                raise Unreachable(f"{host}:{port} cannot be called: {error}") from error
            undo.pop_all()
        channel = Channel(key, f"{host}:{port}", socket, None, remote_host=host)
        self._dialed[address, key] = channel
        self._tasks.create_task(self._watch(channel, monitor, address))
        self._tasks.create_task(self._receive_dialed(channel))
        return channel

    def hang_up(self, channel: Channel) -> None:
        """Done with a channel: close a dialed one, forget an incoming one."""
        self._close(channel, Unreachable(f"hung up on {channel.label}"))

    def forget(self, key: bytes) -> None:
        """Hang up on whoever holds ``key``, whichever side had called."""
        for channel in self.channels:
            if channel.remote_key == key:
                self.hang_up(channel)

    @property
    def channels(self) -> list[Channel]:
        """With whomever there is one."""
        return [*self._dialed.values(), *self._incoming.values()]

    def incoming(self, key: bytes) -> Channel | None:
        """The newest channel over which the holder of ``key`` has called us, if any."""
        channel = self._incoming.get(key)
        return None if channel is None or channel.is_broken else channel

    def _close(self, channel: Channel, why: LinkError, linger_ms: int = 0) -> None:
        channel.mark_broken(why)
        if channel.routing is None:
            self._dialed = {at: other for at, other in self._dialed.items() if other is not channel}
            self._lose(channel)
            _close_monitored(channel.socket, linger_ms)
        elif self._incoming.get(channel.remote_key) is channel:
            del self._incoming[channel.remote_key]

    def _configure(self, socket: zmq.asyncio.Socket) -> None:
        socket.curve_publickey, socket.curve_secretkey = (
            z85.encode(self.keys.public),
            z85.encode(self.keys.secret),
        )
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.sndhwm = 256
        tune(socket)

    # Receiving --------------------------------------------------------------------------------------------

    async def _receive_incoming(self) -> None:
        skipped = 0
        while not self._router.closed:
            routing, *frames = await self._router.recv_multipart(copy=False)
            if frames and not await self._take_in(routing.bytes, frames):
                # Whoever is gone, or has broken a limit, may have left much behind: it is not worth a turn each.
                skipped += 1
                if skipped % _SKIPPED_AT_ONCE:
                    continue
            # Receiving does not suspend while messages are queued: without this a flood starves the rest.
            await asyncio.sleep(0)

    async def _watch_guard(self) -> None:
        await self.guard.ended

    async def _look_at_callers(self) -> None:
        while not self._router.closed:
            self.guard.look_at_members()
            await asyncio.sleep(_LOOK_AT_CALLERS_S)

    def _caller(self, key: bytes, host: str, routing: bytes) -> Channel:
        channel = self._incoming.pop(key, None)
        if channel is None or channel.routing != routing:
            if channel is not None:
                channel.mark_broken(Unreachable(f"{channel.label} has connected anew"))
            self._make_room()
            channel = Channel(key, host, self._router, routing, remote_host=host)
            channel.mark_connected()
        self._incoming[key] = channel
        return channel

    def _make_room(self) -> None:
        if len(self._incoming) >= MAX_CHANNELS:
            idle = [channel for channel in self._incoming.values() if channel.is_idle]
            strangers = (channel for channel in idle if not self.guard.is_member(channel.remote_key))
            if idle:
                del self._incoming[next(strangers, idle[0]).remote_key]

    async def _receive_dialed(self, channel: Channel) -> None:
        while not channel.socket.closed:
            frames = await channel.socket.recv_multipart(copy=False)
            self._inflow.read(int(frames[-1].get(zmq.SRCFD)), sum(map(len, frames)))
            if len(frames) == 1:
                await self._dispatch(channel, frames[0].buffer)
            await asyncio.sleep(0)

    async def _take_in(self, routing: bytes, frames: list[zmq.Frame]) -> bool:
        """A caller's message. Returns whether it was worth looking at."""
        frame = frames[0]
        key, host = bytes.fromhex(str(frame.get("User-Id"))), str(frame.get("Peer-Address"))
        size = len(frame) if len(frames) == 1 else _UNBOUNDED  # we send none of several frames
        if not self.guard.allows(int(frame.get(zmq.SRCFD)), routing, key, host, size):
            return False
        channel = self._caller(key, host, routing)
        data = channel.assembly.take(frame.buffer)
        if data is not None and len(data) > MAX_FRAME_BYTES:
            self._tasks.create_task(self._dispatch_large(channel, data))
        elif data is not None:
            await self._dispatch(channel, data)
        return True

    async def _dispatch_large(self, channel: Channel, data: memoryview) -> None:
        """Beside the loop, one at a time: a full run's verdict takes tens of milliseconds, a large model's layout more.

        What its sender says meanwhile may overtake it."""
        if not channel.is_broken:
            async with self._decoding_large:
                await self._dispatch(channel, data)

    async def _dispatch(self, channel: Channel, data: memoryview) -> None:
        channel.heard()
        if channel.is_broken:
            return  # who has sent nonsense once is not listened to again on that connection
        try:
            is_large = channel.routing is not None and len(data) > MAX_FRAME_BYTES
            envelope = await in_thread(decode, data) if is_large else decode(data)
        except ProtocolMismatch as error:
            if channel.routing is not None:
                # In our version, which the caller cannot read either, but it sees the number and can say so.
                await self._reply(channel, Envelope("reply", 0, _failed(error)))
            self._drop(channel, error)
            return
        except WireError as error:
            self._drop(channel, error)
            return
        name = type(envelope.message).__name__
        if envelope.kind == "reply":
            channel.settle(envelope.number, envelope.message)
        elif self._handlers_of[channel.remote_key] >= MAX_HANDLERS_PER_KEY or self._running_handlers >= MAX_HANDLERS:
            log.debug("too busy: dropped %s from %s", name, channel.label)
        else:
            channel.running_handlers += 1
            self._handlers_of[channel.remote_key] += 1
            self._running_handlers += 1
            self._tasks.create_task(self._run_handler(channel, envelope))

    def _drop(self, channel: Channel, error: LinkError) -> None:
        log.warning("dropped %s: %s", channel.label, error)
        if channel.routing is None:
            self._close(channel, error)
        else:
            channel.mark_broken(error)  # and still remembered, to ignore what else it sends

    async def _run_handler(self, channel: Channel, envelope: Envelope) -> None:
        name = type(envelope.message).__name__
        handler = self._handlers.get((envelope.scope, type(envelope.message)))
        try:
            if handler is None:
                where = f" (in scope {envelope.scope})" if envelope.scope else ""
                raise WireError(f"{name} is not for this side{where}")
            answer = await handler(channel, envelope.message) or Acknowledged()
        except ShoalError as error:
            log.debug("%s from %s: %s", name, channel.label, error)
            answer = _failed(error)
        except (OSError, ValueError, zmq.ZMQError) as error:
            # What libraries raise for input that we should have refused: not a reason for the node to stop.
            log.exception("could not handle %s from %s", name, channel.label)
            answer = _failed(LinkError(f"{name} could not be handled: {type(error).__name__}"))
        finally:
            channel.running_handlers -= 1
            self._handlers_of[channel.remote_key] -= 1
            if not self._handlers_of[channel.remote_key]:
                del self._handlers_of[channel.remote_key]
            self._running_handlers -= 1
        if envelope.kind == "request":
            await self._reply(channel, Envelope("reply", envelope.number, answer, envelope.scope))

    async def _reply(self, channel: Channel, reply: Envelope) -> None:
        try:
            async with asyncio.timeout(_REPLY_S):
                await channel.send(reply)
        except (LinkError, TimeoutError) as error:
            log.debug("%s went away before its answer: %s", channel.label, error)

    async def _introduce(self, channel: Channel) -> None:
        with contextlib.suppress(LinkError):
            await channel.notify(PeerToPeerPing())

    # Liveness of dialed connections -----------------------------------------------------------------------

    async def _watch_inflow(self) -> None:
        while not self._router.closed:
            self._inflow.look()
            await asyncio.sleep(self._inflow.pause_s)

    async def _watch_dialed(self) -> None:
        """Ask for signs of life where nothing was heard for a while, and connect anew where none come.

        Only where we have called: whoever calls us does the same, and the kernel gives up what it can tell is dead."""
        loop = asyncio.get_running_loop()
        while not self._router.closed:
            pause_s = self.silence_s / PROBES
            looked_s = loop.time()
            await asyncio.sleep(pause_s / 2)
            if loop.time() - looked_s > pause_s:
                # We stood still ourselves, and what came meanwhile has not been read.
                for channel in self._dialed.values():
                    channel.heard()
                continue
            for channel in list(self._dialed.values()):
                silent_s = loop.time() - channel.heard_s
                if channel.is_connected and silent_s >= self.silence_s:
                    log.info("nothing came from %s for %.1f s: connecting anew", channel.label, silent_s)
                    # Not by disconnecting: until libzmq has done that, it takes messages for the dead connection.
                    self._inflow.shut_down(channel.descriptor, channel)
                elif channel.is_connected and silent_s >= pause_s:
                    await channel.ping()

    def _lose(self, channel: Channel) -> None:
        """Its connection has ended: the descriptor may be another's now."""
        self._inflow.closed(channel.descriptor, channel)
        channel.descriptor = -1

    def _connect_anew(self, channel: Channel, address: str) -> None:
        channel.mark_away()
        self._lose(channel)
        with contextlib.suppress(zmq.ZMQError):
            channel.socket.disconnect(address)
        with contextlib.suppress(zmq.ZMQError):
            channel.socket.connect(address)

    async def _watch(self, channel: Channel, monitor: zmq.asyncio.Socket, address: str) -> None:
        """Follow the connection's events, to tell a wrong key from a closed port from a refusal."""
        failures, event, value = 0, 0, 0
        try:
            while not channel.is_broken:
                try:
                    async with asyncio.timeout(_GIVEN_UP_S if event == zmq.EVENT_DISCONNECTED else None):
                        event, value = _EVENT.unpack((await monitor.recv_multipart())[0])
                except TimeoutError:
                    # Not even a retry: libzmq gives up for good when something answers that is not ZeroMQ.
                    self._connect_anew(channel, address)
                    event = 0
                if event == zmq.EVENT_CONNECTED:
                    channel.descriptor = value
                    self._inflow.opened(value, channel)
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    failures = 0
                    channel.mark_connected()
                    # Until it has heard something, the other side does not know whose connection that is.
                    self._tasks.create_task(self._introduce(channel))
                elif event == zmq.EVENT_DISCONNECTED:
                    self._lose(channel)
                    channel.mark_away()
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    refused = NotAdmitted(f"{channel.label} does not admit this key")
                    if channel.was_connected:
                        channel.note_trouble(refused)
                    else:
                        self._close(channel, refused)
                elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    failures += 1
                    # Who has held the key before is rather restarting, behind a proxy that accepts for it.
                    if failures >= _HANDSHAKE_TRIES and not channel.was_connected:
                        self._close(channel, _wrong_key(channel))
                elif event == zmq.EVENT_MONITOR_STOPPED:
                    return
        finally:
            _close_monitored(channel.socket, linger_ms=0)
            monitor.close(linger=0)


def _monitor(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, events: int) -> None:
    """Have a socket's events sent to ``monitor``, a PAIR, before anything happens on the socket."""
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor.rcvhwm = 0  # or libzmq's I/O thread would wait for us, with a lock that closing the socket needs
    monitor.connect(address)


def _close_monitored(socket: zmq.asyncio.Socket, linger_ms: int) -> None:
    """Before its monitor is closed: libzmq's I/O thread blocks for ever on an event nobody can take."""
    if not socket.closed:
        socket.disable_monitor()
        socket.close(linger=linger_ms)


def _failed(error: ShoalError) -> RequestFailed:
    return RequestFailed(code=type(error).__name__, message=words_for_others(error)[:2000])


def _wrong_key(channel: Channel) -> WrongKey:
    return WrongKey(
        f"{channel.label} does not hold the key that was expected of it: "
        "check the invite with the host (or something else than Shoal listens there)"
    )
