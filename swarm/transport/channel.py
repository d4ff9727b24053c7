"""A control channel: one connection over which both ends send requests, with replies and deadlines, and notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
import zmq.asyncio

from shoal.swarm.errors import DeadlineExceeded, LinkError, Unreachable, WireError, remote_error
from shoal.swarm.protocol.messages import PeerToPeerPing, RequestFailed
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Assembly, Envelope, cut, encode
from shoal.swarm.transport.caller_socket import CallerSocket
from shoal.swarm.transport.limits.traffic_limits import RateLimit

M = TypeVar("M", bound=Message)

_NOTIFY_S = 1.0
_MAX_TRIPS = 16


@dataclass(eq=False)
class Channel:
    """A channel to the holder of ``remote_key``, the CURVE key that the other end has proved to hold.

    A dialed channel reconnects by itself. A broken channel never works again: dial anew, or wait for a new caller."""

    remote_key: bytes
    label: str
    socket: zmq.asyncio.Socket
    routing: bytes | None
    """The routing id of an incoming channel; None for a dialed one, which has a socket of its own."""
    remote_host: str = ""
    upload: RateLimit = field(default_factory=RateLimit)
    """Counts what is sent."""
    callers: CallerSocket | None = None
    """The socket of an incoming channel, for its messages; None for a dialed one."""
    is_relayed: bool = False
    """Whether it was dialed over a relay, which may have no way to the other side at the moment."""
    run: str = ""
    """Name of the run that is meant on a dialed channel to a coordinator."""
    is_broken: bool = False
    was_connected: bool = False
    is_connected: bool = False
    """Whether the other side has proved its key and the connection has not been lost since."""
    descriptor: int = -1
    """Of a dialed channel's connection."""
    remote_port: int = 0
    """The port from which a caller has connected; 0 over a relay, and of a channel that was dialed."""
    received_s: float = 0.0
    """Moment of the last receipt, on the event loop's clock."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Message | LinkError]] = field(default_factory=dict)
    _sent: set[int] = field(default_factory=set)
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: LinkError | None = None
    _sending_pieces: asyncio.Lock = field(default_factory=asyncio.Lock)
    assembly: Assembly = field(init=False)
    """Of messages that arrive in pieces."""
    _trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_TRIPS))

    def __post_init__(self) -> None:
        self.assembly = Assembly(MAX_REQUEST_BYTES if self.routing is not None else MAX_MESSAGE_BYTES)

    @property
    def round_trip_s(self) -> float | None:
        """Shortest recent time from a request to its answer; longer ones include work on the other side."""
        return min(self._trips_s, default=None)

    async def request(self, message: Message, reply: type[M], deadline_s: float, scope: int = 0) -> M:
        """Send a request and wait for its reply, and for the connection if there is none. ``scope``: run or stage.

        Raises the other side's typed error, ``Unreachable`` when the connection was lost or never made,
        ``DeadlineExceeded``, or another ``LinkError``."""
        number = next(self._numbers)
        future: asyncio.Future[Message | LinkError] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(deadline_s):
                await self.send(Envelope("request", number, message, scope, self.run))
                self._sent.add(number)
                sent_s = asyncio.get_running_loop().time() if self.is_connected else None
                answer = await future
        except TimeoutError as error:
            raise self.diagnosis(deadline_s) from error
        finally:
            del self._waiting[number]
            self._sent.discard(number)
        if isinstance(answer, LinkError):
            raise answer
        if sent_s is not None:
            self._trips_s.append(asyncio.get_running_loop().time() - sent_s)
        if isinstance(answer, RequestFailed):
            raise remote_error(answer.code, answer.message)
        if not isinstance(answer, reply):
            raise WireError(f"{self.label} answered with {type(answer).__name__} instead of {reply.__name__}")
        return answer

    async def notify(self, message: Message, scope: int = 0) -> None:
        """Send without waiting for an answer. Raises ``Unreachable`` when there is no connection."""
        try:
            # A connected socket accepts it at once; a reconnecting one would block until it is connected.
            await self.send(Envelope("notice", 0, message, scope, self.run), _NOTIFY_S)
        except TimeoutError as error:
            raise Unreachable(f"{self.label} is not connected at the moment") from error

    async def connected(self, deadline_s: float) -> None:
        """Wait for the handshake. Raises ``Unreachable``, ``WrongKey`` or ``NotAdmitted`` as soon as it has failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._decided.wait()
        if not self.is_connected:
            raise self.diagnosis(deadline_s)

    def diagnosis(self, deadline_s: float) -> LinkError:
        """The best explanation for receiving nothing within ``deadline_s``."""
        if self.is_connected:
            return DeadlineExceeded(f"{self.label} did not answer within {deadline_s:.1f} s")
        return self._trouble or Unreachable(
            f"nothing answers at {self.label}: is it running there, is the port open, is the address right?"
        )

    # For the control plane --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request of this side waits for an answer."""
        return not self._waiting

    async def send(self, envelope: Envelope, deadline_s: float | None = None) -> None:
        """Send an envelope. Raises ``Unreachable`` for a broken channel, ``WireError`` for a too large message, and
        ``TimeoutError`` if a dialed one takes longer than ``deadline_s``."""
        data = encode(envelope, MAX_REQUEST_BYTES if self.routing is None else MAX_MESSAGE_BYTES)
        if self.is_broken:
            raise self.diagnosis(0)
        self.upload.count_control(len(data))
        try:
            if self.callers is not None and self.routing is not None:
                # Never wait here: one caller that does not read would block the answers to all others.
                # Each answer is one caller's own, so it is not cut: a caller that reads slowly would fill its queue.
                self.callers.send(self.routing, cut(data) if envelope.kind == "notice" else (data,))
            else:
                async with asyncio.timeout(deadline_s):
                    await self._send_frames(cut(data))
        except zmq.Again as error:
            raise Unreachable(f"{self.label} does not read its messages") from error
        except zmq.ZMQError as error:
            self.mark_broken(Unreachable(f"the connection to {self.label} was lost"))
            raise self.diagnosis(0) from error
        except asyncio.CancelledError:
            # Closing a socket cancels its sends, which must not look as if this task had been cancelled.
            task = asyncio.current_task()
            if self.is_broken and task is not None and not task.cancelling():
                raise self.diagnosis(0) from None
            raise

    async def _send_frames(self, frames: tuple[bytes, ...]) -> None:
        if len(frames) == 1:
            await self.socket.send_multipart(frames)
            return
        async with self._sending_pieces:
            for frame in frames:
                await self.socket.send_multipart([frame])

    def mark_received(self) -> None:
        """Note that something was received, so the other side is alive."""
        self.received_s = asyncio.get_running_loop().time()

    async def ping(self) -> None:
        """Ask the other side of a dialed channel for a sign of life, which updates ``received_s``."""
        # When the socket's queue is full, messages that will be answered are on their way already.
        with contextlib.suppress(zmq.ZMQError):
            await self.socket.send(encode(Envelope("request", 0, PeerToPeerPing())), flags=zmq.DONTWAIT)

    def resolve(self, number: int, answer: Message | LinkError) -> None:
        """Hand a reply to the waiting request; late replies and those to no request are dropped."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def mark_connected(self) -> None:
        self._trouble = None
        self.mark_received()
        self.is_connected = self.was_connected = True
        self._decided.set()

    def mark_away(self) -> None:
        """Fail the requests that were sent over a connection that was lost."""
        if self.is_broken or not self.is_connected:
            return
        self.is_connected = False
        self._decided.clear()
        for number in self._sent:
            self.resolve(number, Unreachable(f"the connection to {self.label} was lost"))

    def mark_broken(self, trouble: LinkError) -> None:
        """Fail all requests, and all later ones, for this reason."""
        if self.is_broken:
            return
        self._trouble = trouble
        self.is_broken = True
        self.is_connected = False
        self._decided.set()
        for number in self._waiting:
            self.resolve(number, trouble)

    def note_trouble(self, trouble: LinkError) -> None:
        """Store the reason for which it is not connected; it keeps trying."""
        self._trouble = trouble
