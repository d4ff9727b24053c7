"""The control plane: requests, replies and notices over CURVE, one ROUTER for callers and DEALERs to call.

A channel is symmetric: whoever connected, both ends may send requests over it, so a peer that nobody can reach
still answers over the connections that it made itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from shoal.swarm.errors import (
    REMOTE_ERRORS,
    DeadlineExceeded,
    LinkError,
    NotAdmitted,
    ProtocolMismatch,
    ShoalError,
    Unreachable,
    WireError,
    WrongKey,
)
from shoal.swarm.identity import CurveKeys
from shoal.swarm.messages import Message, RequestFailed
from shoal.swarm.wire import MAX_MESSAGE_BYTES, Envelope, decode, encode

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Admit = Callable[[bytes], Awaitable[bool]]
Handler = Callable[["Channel", Message], Awaitable[Message | None]]

MAX_CONCURRENT_REQUESTS = 512
_HANDSHAKE_TRIES = 2


@dataclass(eq=False)
class Channel:
    """One control connection. ``remote_key`` is the CURVE key that the other end has proved to hold."""

    remote_key: bytes
    label: str
    _socket: zmq.asyncio.Socket
    _routing: bytes | None
    remote_host: str = ""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Message]] = field(default_factory=dict)
    _is_connected: bool = False
    _is_broken: bool = False
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: LinkError | None = None

    async def request(self, message: Message, reply: type[M], deadline_s: float) -> M:
        """Send and await the reply. Raises the other side's typed error, ``DeadlineExceeded`` or ``LinkError``."""
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(Envelope("request", number, message))
                answer = await future
        except TimeoutError as error:
            raise self._diagnosis(deadline_s) from error
        finally:
            del self._waiting[number]
        if isinstance(answer, RequestFailed):
            raise REMOTE_ERRORS.get(answer.code, LinkError)(answer.message)
        if not isinstance(answer, reply):
            raise WireError(f"{self.label} answered with {type(answer).__name__} instead of {reply.__name__}")
        return answer

    async def notify(self, message: Message) -> None:
        """Send without waiting for anything; lost when the other side is away."""
        await self._send(Envelope("notice", 0, message))

    async def connected(self, deadline_s: float) -> None:
        """Wait for the first handshake. Raises ``Unreachable``, ``WrongKey``, ``NotAdmitted`` as soon as known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._decided.wait()
        if not self._is_connected:
            raise self._trouble or Unreachable(
                f"nothing answers at {self.label}: is it running there, is the port open, is the address right?"
            )

    def settle(self, number: int, message: Message) -> None:
        """Hand a reply to whoever waits for it; late and invented ones are dropped."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: LinkError) -> None:
        """The other side sent something that ends this conversation, such as another protocol version."""
        self.mark_broken(error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def mark_connected(self) -> None:
        self._trouble = None
        self._is_connected = True
        self._decided.set()

    def mark_broken(self, error: LinkError) -> None:
        """Connecting will not help any more: the next dial makes a new channel."""
        self._trouble = error
        self._is_broken = True
        self._decided.set()

    async def _send(self, envelope: Envelope) -> None:
        data = encode(envelope)
        frames = [data] if self._routing is None else [self._routing, data]
        try:
            await self._socket.send_multipart(frames)
        except zmq.ZMQError as error:
            raise Unreachable(f"{self.label} is not connected any more") from error

    def _diagnosis(self, deadline_s: float) -> LinkError:
        if self._trouble is not None and not self._is_connected:
            return self._trouble
        return DeadlineExceeded(f"{self.label} did not answer within {deadline_s:.1f} s")


class ControlPlane:
    """All control channels of one process. Use as an async context manager; tasks live in ``tasks``."""

    def __init__(
        self, context: zmq.asyncio.Context, keys: CurveKeys, admit: Admit, tasks: asyncio.TaskGroup
    ) -> None:
        self.keys = keys
        self._context = context
        self._admit = admit
        self._tasks = tasks
        self._handlers: dict[type[Message], Handler] = {}
        self._authenticator = AsyncioAuthenticator(context)
        self._router = context.socket(zmq.ROUTER)
        self._incoming: dict[bytes, Channel] = {}
        self._by_key: dict[bytes, Channel] = {}
        self._dialed: dict[tuple[str, bytes], Channel] = {}
        self._requests = 0

    def handle(self, kind: type[Message], handler: Handler) -> None:
        """Answer messages of this class; the handler returns the reply, or None for a notice."""
        self._handlers[kind] = handler

    def start(self, host: str, port: int) -> int:
        """Bind; returns the port. Raises ``Unreachable`` when the address is taken or not ours."""
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)
        _configure(self._router, self.keys)
        self._router.curve_server = True
        self._router.zap_domain = b"shoal"
        self._authenticator.configure_curve_callback("shoal", self)
        self._router.router_mandatory = True
        bound = bind(self._router, host, port)
        self._tasks.create_task(self._receive_incoming())
        return bound

    def stop(self) -> None:
        self._authenticator.stop()
        self._router.close(linger=0)
        for channel in self._dialed.values():
            channel._socket.disable_monitor()
            channel._socket.close(linger=100)

    async def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question (RFC 27): may this key, in Z85, come in?"""
        try:
            return await self._admit(z85.decode(key))
        except (LinkError, ValueError) as error:
            log.info("refused an unknown key: %s", error)
            return False

    def dial(self, host: str, port: int, key: bytes) -> Channel:
        """The channel to the server that holds ``key``; connects, and reconnects, in the background."""
        endpoint = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        known = self._dialed.get((endpoint, key))
        if known is not None and not known._is_broken:
            return known
        if known is not None:
            self._hang_up(known)
        socket = self._context.socket(zmq.DEALER)
        _configure(socket, self.keys)
        socket.curve_serverkey = z85.encode(key)
        socket.immediate = True
        channel = Channel(key, f"{host}:{port}", socket, None, remote_host=host)
        self._dialed[endpoint, key] = channel
        monitor = socket.get_monitor_socket()
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise Unreachable(f"{host}:{port} is no usable address: {error}") from error
        self._tasks.create_task(self._watch(channel, monitor))
        self._tasks.create_task(self._receive_dialed(channel))
        return channel

    def incoming(self, key: bytes) -> Channel | None:
        """The newest channel over which the holder of ``key`` has called us, if any."""
        return self._by_key.get(key)

    def _hang_up(self, channel: Channel) -> None:
        channel._socket.disable_monitor()
        channel._socket.close(linger=0)
        self._dialed = {at: other for at, other in self._dialed.items() if other is not channel}

    async def _receive_incoming(self) -> None:
        while True:
            frames = await self._router.recv_multipart(copy=False)
            if len(frames) != 2:
                continue
            routing, frame = frames[0].bytes, frames[1]
            try:
                key = z85.decode(str(frame.get("User-Id")))
                host = str(frame.get("Peer-Address"))
            except (zmq.ZMQError, ValueError):
                continue
            channel = self._incoming.get(routing)
            if channel is None or channel.remote_key != key:
                channel = Channel(key, host, self._router, routing, remote_host=host)
                channel.mark_connected()
                self._forget_older(key)
                self._incoming[routing] = channel
            self._by_key[key] = channel
            await self._dispatch(channel, frame.buffer)

    def _forget_older(self, key: bytes) -> None:
        older = self._by_key.get(key)
        if older is not None and older._routing is not None:
            self._incoming.pop(older._routing, None)

    async def _receive_dialed(self, channel: Channel) -> None:
        while not channel._socket.closed:
            try:
                frames = await channel._socket.recv_multipart(copy=False)
            except (zmq.ZMQError, asyncio.CancelledError):
                if channel._socket.closed:
                    return
                raise
            if len(frames) == 1:
                await self._dispatch(channel, frames[0].buffer)

    async def _dispatch(self, channel: Channel, data: memoryview) -> None:
        try:
            envelope = decode(data)
        except ProtocolMismatch as error:
            channel.fail(error)
            if channel._routing is not None:
                # In our version, which the caller cannot read either, but it sees the number and can say so.
                await self._answer(channel, 0, error)
            return
        except WireError as error:
            log.warning("dropped bytes from %s: %s", channel.label, error)
            return
        if envelope.kind == "reply":
            channel.settle(envelope.number, envelope.message)
        elif self._requests >= MAX_CONCURRENT_REQUESTS:
            log.warning("too busy: dropped %s from %s", type(envelope.message).__name__, channel.label)
        else:
            self._requests += 1
            self._tasks.create_task(self._run_handler(channel, envelope))

    async def _run_handler(self, channel: Channel, envelope: Envelope) -> None:
        handler = self._handlers.get(type(envelope.message))
        try:
            if handler is None:
                raise WireError(f"{type(envelope.message).__name__} is not for this side")
            answer = await handler(channel, envelope.message)
            if envelope.kind == "request" and answer is not None:
                await channel._send(Envelope("reply", envelope.number, answer))
        except Unreachable:
            log.debug("%s went away before its answer", channel.label)
        except ShoalError as error:
            if envelope.kind == "request":
                await self._answer(channel, envelope.number, error)
        finally:
            self._requests -= 1

    async def _answer(self, channel: Channel, number: int, error: ShoalError) -> None:
        failed = RequestFailed(code=type(error).__name__, message=str(error)[:2000])
        try:
            await channel._send(Envelope("reply", number, failed))
        except Unreachable:
            log.debug("%s went away before its error", channel.label)

    async def _watch(self, channel: Channel, monitor: zmq.asyncio.Socket) -> None:
        """Follow the connection's events, to tell a wrong key from a closed port from a refusal."""
        failures = 0
        while True:
            try:
                frames = await monitor.recv_multipart()
            except (zmq.ZMQError, asyncio.CancelledError):
                if channel._socket.closed:
                    return
                raise
            event, _ = struct.unpack("=Hi", frames[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                failures = 0
                channel.mark_connected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                channel.mark_broken(NotAdmitted(f"{channel.label} does not admit this key"))
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                failures += 1
                trouble = WrongKey(
                    f"{channel.label} does not hold the key that was expected of it: "
                    "check the invite with the host (or something else than Shoal listens there)"
                )
                if failures >= _HANDSHAKE_TRIES and not channel._is_connected:
                    channel.mark_broken(trouble)
            elif event == zmq.EVENT_MONITOR_STOPPED:
                return


def _configure(socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
    socket.curve_publickey, socket.curve_secretkey = z85.encode(keys.public), z85.encode(keys.secret)
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    tune(socket)


def tune(socket: zmq.asyncio.Socket) -> None:
    """What every TCP socket of ours wants: IPv6 too, dead connections noticed, quick reconnects, no lingering."""
    socket.ipv6 = True
    socket.linger = 0
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 15_000
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2_000


def bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    """Bind to ``host:port`` (0: any free one); returns the port. Raises ``Unreachable``."""
    try:
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise Unreachable(f"cannot listen on {host}:{port}: {error}; choose another --bind") from error
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])
