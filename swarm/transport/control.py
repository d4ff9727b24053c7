"""The control plane: requests, replies and notices over ZeroMQ with CURVE encryption.

One ROUTER socket serves all callers, and each dialed channel has a DEALER socket. Channels are symmetric: both ends
may send requests, whichever connected. So a peer that cannot be reached answers over the connections that it made.
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
from shoal.swarm.protocol.types import RUN_MEMBERS, Address, Message
from shoal.swarm.protocol.wire import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Envelope, decode
from shoal.swarm.transport.caller_socket import CallerSocket
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.limits.caller_guard import CallerGuard
from shoal.swarm.transport.limits.origins import Origins
from shoal.swarm.transport.limits.receive_backlog import ReceiveBacklog
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.tcp.sockets import CURVE_DOMAIN, PROBES, SILENCE_S, bind, endpoint, remote_port, tune

log = logging.getLogger(__name__)

Handler = Callable[[Channel, Message], Awaitable[Message | None]]

MAX_CHANNELS = 3 * RUN_MEMBERS
"""Most incoming channels; of more, the idle ones that were silent for longest are forgotten."""

MAX_HANDLERS = 4 * RUN_MEMBERS
"""Most handlers that run at once: all members of a full run may each have sent a few requests."""

MAX_HANDLERS_PER_RUN = MAX_HANDLERS // 2
"""Of those, most of one run of a coordinator: who floods it leaves room for the others."""

MAX_HANDLERS_PER_KEY = 64
_HANDSHAKE_TRIES = 2
_MAX_SKIPPED = 256
_REPLY_S = 15.0
_GIVEN_UP_S = 3.0
_HANDSHAKE_MS, _BACKLOG = 10_000, 1024
_CURVE_BYTES = 33
"""Bytes that CURVE adds to a frame: libzmq compares the size of what is enciphered with the largest one allowed, and
ends the connection over a larger one."""

_CALLER_BUFFER_BYTES = 2**17
"""Bytes of each caller that may wait in the kernel. The guard limits those in libzmq, whose own limit must not be used
(``receive_backlog.py``)."""

_FORMER_MEMBERS_S = 1.0
"""Between two searches for connections of former members."""
_UNBOUNDED = 2**40
_monitors = itertools.count()
_EVENT = struct.Struct("=Hi")
"""A monitor's message: the event and its value, mostly the connection's descriptor."""


class ControlPlane:
    """All control channels of one process; its tasks live in ``tasks``."""

    def __init__(
        self, context: zmq.asyncio.Context, keys: CurveKeys, tasks: asyncio.TaskGroup, limits: TrafficLimits
    ) -> None:
        """``limits``: count this plane's messages; they never wait."""
        self.keys = keys
        self.silence_s = SILENCE_S
        """A dialed channel that receives nothing for this long connects anew."""
        self._backlog = ReceiveBacklog()
        self._context = context
        self._tasks = tasks
        self._is_stopped = False
        self._limits = limits
        self._handlers: dict[tuple[str, int, type[Message]], Handler] = {}
        self.without_handlers: Callable[[str], ShoalError | None] = lambda run: None
        """Why a run of that name has no handlers here; None where that is not known."""
        self._router = context.socket(zmq.ROUTER)
        self._callers = CallerSocket(self._router)
        self._incoming: dict[bytes, Channel] = {}  # by key, those that were silent for longest first
        self._dialed: dict[tuple[str, bytes], Channel] = {}
        self._running_handlers = 0
        self._handlers_of: Counter[bytes] = Counter()
        """Running handlers by key, over all connections of its holder."""
        self._handlers_of_run: Counter[str] = Counter()
        self._decoding_large = asyncio.Lock()
        self.origins = Origins()
        """Where callers come from that a local forwarder connects."""
        self.guard = CallerGuard(MAX_REQUEST_BYTES, lambda key: False, self.origins)
        """Guard of the ROUTER; its ``is_member`` is set by the node or the coordinator."""

    def handle(self, kind: type[Message], handler: Handler, scope: int = 0, run: str = "") -> None:
        """Register the handler of a message class in a scope; it returns the reply, or None to acknowledge.

        ``run``: of a coordinator's, the name by which its callers mean it."""
        self._handlers[run, scope, kind] = handler

    def leave(self, scope: int) -> None:
        """Remove all handlers of a scope."""
        self._handlers = {of: handler for of, handler in self._handlers.items() if of[:2] != ("", scope)}

    def leave_run(self, run: str) -> None:
        """Remove all handlers of one of a coordinator's runs."""
        self._handlers = {of: handler for of, handler in self._handlers.items() if of[0] != run}

    def start(self, host: str, port: int) -> int:
        """Bind; returns the port. Raises ``Unreachable`` when it cannot listen there."""
        self._configure(self._router)
        self._router.curve_server = True
        self._router.zap_domain = CURVE_DOMAIN
        self._router.router_mandatory = True
        self._router.handshake_ivl, self._router.backlog = _HANDSHAKE_MS, _BACKLOG
        self._router.maxmsgsize, self._router.rcvbuf = MAX_FRAME_BYTES + _CURVE_BYTES, _CALLER_BUFFER_BYTES
        self.guard.start(self._context, self._router, f"inproc://monitor-{next(_monitors)}")
        bound = self.guard.port = bind(self._router, host, port)
        self._tasks.create_task(self._receive_incoming())
        self._tasks.create_task(self._demote_former_members())
        self._tasks.create_task(self._watch_guard())
        self._tasks.create_task(self._watch_backlog())
        self._tasks.create_task(self._watch_dialed())
        return bound

    def stop(self) -> None:
        self._is_stopped = True
        # Incoming channels too: sending on a closed socket would leave a failed future that nobody awaits.
        for channel in self.channels:
            self._close(channel, Unreachable("closing down"), linger_ms=100)
        self.guard.stop()
        self._callers.close(linger_ms=100)

    # Calling ----------------------------------------------------------------------------------------------

    def dial(self, host: str, port: int, key: bytes, via: Address | None = None, from_port: int = 0) -> Channel:
        """The channel to the holder of ``key`` at an address; it connects and reconnects in the background.

        ``via``: a relay, where the address is that of a local forwarder (``relay_paths.py``); ``from_port``: the local
        port, if ``host`` is an IP address. Raises ``Unreachable`` for an
        address that is not valid, and while this process leaves the network."""
        if self._is_stopped:
            raise Unreachable("closing down")
        address = endpoint(host, port, from_port)
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
                raise Unreachable(f"cannot connect to {host}:{port}: {error}") from error
            undo.pop_all()
        if via is None:
            channel = Channel(key, f"{host}:{port}", socket, None, host, self._limits.upload)
        else:
            channel = Channel(key, f"the relay {via}", socket, None, via.host, self._limits.upload, is_relayed=True)
        self._dialed[address, key] = channel
        self._tasks.create_task(self._watch_connection(channel, monitor, address))
        self._tasks.create_task(self._receive_dialed(channel))
        return channel

    def hang_up(self, channel: Channel) -> None:
        """Close a dialed channel, or forget an incoming one."""
        self._close(channel, Unreachable(f"this side closed the channel to {channel.label}"))

    def forget(self, key: bytes) -> None:
        """Hang up all channels with the holder of ``key``, dialed and incoming."""
        for channel in self.channels:
            if channel.remote_key == key:
                self.hang_up(channel)

    @property
    def channels(self) -> list[Channel]:
        """All channels, dialed and incoming."""
        return [*self._dialed.values(), *self._incoming.values()]

    def dialed_over_relay(self, key: bytes) -> Channel | None:
        """The channel to the holder of ``key`` that was dialed over a relay, if any."""
        return next((one for one in self._dialed.values() if one.remote_key == key and one.is_relayed), None)

    def incoming(self, key: bytes) -> Channel | None:
        """The newest incoming channel of the holder of ``key``, if any."""
        channel = self._incoming.get(key)
        return None if channel is None or channel.is_broken else channel

    def _close(self, channel: Channel, why: LinkError, linger_ms: int = 0) -> None:
        channel.mark_broken(why)
        if channel.routing is None:
            self._dialed = {at: other for at, other in self._dialed.items() if other is not channel}
            self._forget_connection(channel)
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
        while received := await self._callers.receive():
            routing, *frames = received
            if frames and not await self._receive_from_caller(routing.bytes, frames):
                # A caller that ended or broke a limit may have left many messages; yield only after some of them.
                skipped += 1
                if skipped % _MAX_SKIPPED:
                    continue
            # Receiving does not suspend while messages are queued, so a flood would starve all other tasks.
            await asyncio.sleep(0)

    async def _watch_guard(self) -> None:
        await self.guard.ended

    async def _demote_former_members(self) -> None:
        while not self._router.closed:
            self.guard.demote_former_members()
            await asyncio.sleep(_FORMER_MEMBERS_S)

    def _incoming_channel(self, key: bytes, host: str, routing: bytes, descriptor: int | None) -> Channel:
        """``descriptor``: of the caller's connection; None for one over a relay."""
        channel = self._incoming.pop(key, None)
        if channel is None or channel.routing != routing:
            if channel is not None:
                channel.mark_broken(Unreachable(f"{channel.label} has opened a new connection"))
            self._limit_channels()
            channel = Channel(key, host, self._router, routing, host, self._limits.upload, callers=self._callers)
            channel.remote_port = 0 if descriptor is None else remote_port(descriptor)
            channel.mark_connected()
        self._incoming[key] = channel
        return channel

    def _limit_channels(self) -> None:
        if len(self._incoming) >= MAX_CHANNELS:
            idle = [channel for channel in self._incoming.values() if channel.is_idle]
            strangers = (channel for channel in idle if not self.guard.is_member(channel.remote_key))
            if idle:
                del self._incoming[next(strangers, idle[0]).remote_key]

    async def _receive_dialed(self, channel: Channel) -> None:
        while not channel.socket.closed:
            frames = await channel.socket.recv_multipart(copy=False)
            size = sum(map(len, frames))
            self._backlog.count_read(int(frames[-1].get(zmq.SRCFD)), size)
            self._limits.download.count_control(size)
            data = channel.assembly.add(frames[0].buffer) if len(frames) == 1 else None
            if data is not None:
                await self._dispatch(channel, data)
            await asyncio.sleep(0)

    async def _receive_from_caller(self, routing: bytes, frames: list[zmq.Frame]) -> bool:
        """Handle a caller's message; returns whether the guard allowed it."""
        frame = frames[0]
        self._limits.download.count_control(sum(map(len, frames)))
        key = bytes.fromhex(str(frame.get("User-Id")))
        address, descriptor = str(frame.get("Peer-Address")), int(frame.get(zmq.SRCFD))
        host = self.origins.of(address)
        size = len(frame) if len(frames) == 1 else _UNBOUNDED  # Shoal sends no messages of several frames
        if not self.guard.allows(descriptor, routing, key, host, size):
            return False
        channel = self._incoming_channel(key, host, routing, descriptor if host == address else None)
        data = channel.assembly.add(frame.buffer)
        if data is not None and len(data) > MAX_FRAME_BYTES:
            self._tasks.create_task(self._dispatch_large(channel, data))
        elif data is not None:
            await self._dispatch(channel, data)
        return True

    async def _dispatch_large(self, channel: Channel, data: memoryview) -> None:
        """Decode a large message in a thread, one at a time; later messages of the sender may overtake it.

        The verdict of a full run takes tens of milliseconds, the layout of a large model more."""
        if not channel.is_broken:
            async with self._decoding_large:
                await self._dispatch(channel, data)

    async def _dispatch(self, channel: Channel, data: memoryview) -> None:
        channel.mark_received()
        if channel.is_broken:
            return  # after one malformed message, all others of the connection are ignored
        try:
            is_large = channel.routing is not None and len(data) > MAX_FRAME_BYTES
            envelope = await in_thread(decode, data) if is_large else decode(data)
        except ProtocolMismatch as error:
            if channel.routing is not None:
                # The caller cannot decode this reply, but it sees our version and can report the mismatch.
                await self._reply(channel, Envelope("reply", 0, _failed(error)))
            self._drop(channel, error)
            return
        except WireError as error:
            self._drop(channel, error)
            return
        name = type(envelope.message).__name__
        if envelope.kind == "reply":
            channel.resolve(envelope.number, envelope.message)
        elif self._is_flooded(channel.remote_key, envelope.run):
            log.debug("dropped %s from %s: too many handlers are running", name, channel.label)
        else:
            self._handlers_of[channel.remote_key] += 1
            self._handlers_of_run[envelope.run] += 1
            self._running_handlers += 1
            self._tasks.create_task(self._run_handler(channel, envelope))

    def _is_flooded(self, key: bytes, run: str) -> bool:
        """Whether as many handlers run as may: of a caller, of a coordinator's run, or in all."""
        of_run = self._handlers_of_run[run] if run else 0
        return (
            self._handlers_of[key] >= MAX_HANDLERS_PER_KEY
            or of_run >= MAX_HANDLERS_PER_RUN
            or self._running_handlers >= MAX_HANDLERS
        )

    def _drop(self, channel: Channel, error: LinkError) -> None:
        log.warning("ignoring %s after a bad message: %s", channel.label, error)
        if channel.routing is None:
            self._close(channel, error)
        else:
            channel.mark_broken(error)  # it is kept, so that its other messages are ignored

    async def _run_handler(self, channel: Channel, envelope: Envelope) -> None:
        name = type(envelope.message).__name__
        run, kind = envelope.run, type(envelope.message)
        handler = self._handlers.get((run, envelope.scope, kind)) or self._handlers.get(("", envelope.scope, kind))
        try:
            if handler is None and (why := self.without_handlers(run)) is not None:
                raise why
            if handler is None:
                where = f" (in scope {envelope.scope})" if envelope.scope else ""
                raise WireError(f"{name} is not for this side{where}")
            answer = await handler(channel, envelope.message) or Acknowledged()
        except ShoalError as error:
            log.debug("%s from %s: %s", name, channel.label, error)
            answer = _failed(error)
        except (OSError, ValueError, zmq.ZMQError) as error:
            # A library failed on input that the handler should have refused; the node goes on.
            log.exception("the handler of %s from %s failed", name, channel.label)
            answer = _failed(LinkError(f"the handler of {name} failed: {type(error).__name__}"))
        finally:
            self._handlers_of[channel.remote_key] -= 1
            if not self._handlers_of[channel.remote_key]:
                del self._handlers_of[channel.remote_key]
            self._handlers_of_run[run] -= 1
            if not self._handlers_of_run[run]:
                del self._handlers_of_run[run]
            self._running_handlers -= 1
        if envelope.kind == "request":
            await self._reply(channel, Envelope("reply", envelope.number, answer, envelope.scope))

    async def _reply(self, channel: Channel, reply: Envelope) -> None:
        try:
            await channel.send(reply, _REPLY_S)
        except (LinkError, TimeoutError) as error:
            log.debug("could not send an answer to %s: %s", channel.label, error)

    async def _send_first_message(self, channel: Channel) -> None:
        with contextlib.suppress(LinkError):
            await channel.notify(PeerToPeerPing())

    # Liveness of dialed connections -----------------------------------------------------------------------

    async def _watch_backlog(self) -> None:
        while not self._router.closed:
            self._backlog.check()
            await asyncio.sleep(self._backlog.period_s)

    async def _watch_dialed(self) -> None:
        """Ping dialed channels that have been silent for a while; connect anew if no answer comes.

        Incoming channels are left to their callers, which do the same, and to the kernel's detection of dead ones."""
        loop = asyncio.get_running_loop()
        while not self._router.closed:
            pause_s = self.silence_s / PROBES
            checked_s = loop.time()
            await asyncio.sleep(pause_s / 2)
            if loop.time() - checked_s > pause_s:
                # This process was suspended, and what arrived meanwhile has not been read yet.
                for channel in self._dialed.values():
                    channel.mark_received()
                continue
            for channel in list(self._dialed.values()):
                silent_s = loop.time() - channel.received_s
                if channel.is_connected and silent_s >= self.silence_s:
                    log.info("received nothing from %s for %.1f s; connecting anew", channel.label, silent_s)
                    # Do not disconnect the socket: until libzmq has, it queues messages for the dead connection.
                    self._backlog.shut_down(channel.descriptor, channel)
                elif channel.is_connected and silent_s >= pause_s:
                    await channel.ping()

    def _forget_connection(self, channel: Channel) -> None:
        """Forget the descriptor of a connection that has ended; it may be reused."""
        self._backlog.remove(channel.descriptor, channel)
        channel.descriptor = -1

    def _connect_anew(self, channel: Channel, address: str) -> None:
        channel.mark_away()
        self._forget_connection(channel)
        with contextlib.suppress(zmq.ZMQError):
            channel.socket.disconnect(address)
        with contextlib.suppress(zmq.ZMQError):
            channel.socket.connect(address)

    async def _watch_connection(self, channel: Channel, monitor: zmq.asyncio.Socket, address: str) -> None:
        """Follow a dialed connection's events, to tell a wrong key from a closed port and from a refusal."""
        failures, event, value = 0, 0, 0
        try:
            while not channel.is_broken:
                try:
                    async with asyncio.timeout(_GIVEN_UP_S if event == zmq.EVENT_DISCONNECTED else None):
                        event, value = _EVENT.unpack((await monitor.recv_multipart())[0])
                except TimeoutError:
                    # No retry came: libzmq gives up for good when a server answers that does not speak ZeroMQ.
                    self._connect_anew(channel, address)
                    event = 0
                if event == zmq.EVENT_CONNECTED:
                    channel.descriptor = value
                    self._backlog.add(value, channel)
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    failures = 0
                    channel.mark_connected()
                    # Only the first message shows the other side whose connection this is.
                    self._tasks.create_task(self._send_first_message(channel))
                elif event == zmq.EVENT_DISCONNECTED:
                    self._forget_connection(channel)
                    channel.mark_away()
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    refused = NotAdmitted(f"{channel.label} does not admit this key")
                    if channel.was_connected:
                        channel.note_trouble(refused)
                    else:
                        self._close(channel, refused)
                elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and channel.is_relayed:
                    # The relay may not have reached it, or it does not hold the key (any more).
                    channel.note_trouble(Unreachable(f"it does not answer over {channel.label}"))
                elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    failures += 1
                    # A server that had the key before is probably restarting behind a proxy that accepts for it.
                    if failures >= _HANDSHAKE_TRIES and not channel.was_connected:
                        self._close(channel, _wrong_key(channel))
                elif event == zmq.EVENT_MONITOR_STOPPED:
                    return
        finally:
            _close_monitored(channel.socket, linger_ms=0)
            monitor.close(linger=0)


def _monitor(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, events: int) -> None:
    """Send a socket's events to ``monitor``, a PAIR socket; call it before anything happens on the socket."""
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor.rcvhwm = 0  # otherwise libzmq's I/O thread could block while it holds a lock that closing the socket needs
    monitor.connect(address)


def _close_monitored(socket: zmq.asyncio.Socket, linger_ms: int) -> None:
    """Close a socket before its monitor: libzmq's I/O thread would block for ever on an event that nobody receives."""
    if not socket.closed:
        socket.disable_monitor()
        socket.close(linger=linger_ms)


def _failed(error: ShoalError) -> RequestFailed:
    return RequestFailed(code=type(error).__name__, message=words_for_others(error)[:2000])


def _wrong_key(channel: Channel) -> WrongKey:
    return WrongKey(
        f"{channel.label} does not hold the key that was expected: "
        "check the invite with the host; or a program other than Shoal listens there"
    )
