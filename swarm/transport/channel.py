"""One control connection: requests with replies and deadlines, notices without."""

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

M = TypeVar("M", bound=Message)

_NOTIFY_S = 1.0
_TRIPS = 16


@dataclass(eq=False)
class Channel:
    """``remote_key`` is the CURVE key that the other end has proved to hold.

    A dialed channel reconnects by itself. A broken one never works again: dial anew, or wait for a new call.
    """

    remote_key: bytes
    label: str
    _socket: zmq.asyncio.Socket
    _routing: bytes | None
    remote_host: str = ""
    is_broken: bool = False
    was_connected: bool = False
    running_handlers: int = 0
    descriptor: int = -1
    """Of a dialed one's connection."""
    heard_s: float = 0.0
    """When something came over it last, on the event loop's clock."""
    _is_connected: bool = False
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Message | LinkError]] = field(default_factory=dict)
    _sent: set[int] = field(default_factory=set)
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: LinkError | None = None
    _sending_pieces: asyncio.Lock = field(default_factory=asyncio.Lock)
    assembly: Assembly = field(default_factory=Assembly)
    """Of what comes in pieces."""
    _trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TRIPS))

    @property
    def round_trip_s(self) -> float | None:
        """From a request to its answer: the quickest of the last ones, as some take work over there."""
        return min(self._trips_s, default=None)

    async def request(self, message: Message, reply: type[M], deadline_s: float, scope: int = 0) -> M:
        """Send and await the reply; while the other side is away, wait for it. ``scope``: the run's, or a stage's.

        Raises the other side's typed error, ``Unreachable`` when the connection was lost or never there,
        ``DeadlineExceeded``, or another ``LinkError``.
        """
        number = next(self._numbers)
        future: asyncio.Future[Message | LinkError] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(deadline_s):
                await self.send(Envelope("request", number, message, scope))
                self._sent.add(number)
                sent_s = asyncio.get_running_loop().time() if self._is_connected else None
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
        """Send without waiting for an answer. Raises ``Unreachable`` when the other side is away."""
        try:
            # A connected socket takes it at once; one that reconnects would hold us until it is back.
            async with asyncio.timeout(_NOTIFY_S):
                await self.send(Envelope("notice", 0, message, scope))
        except TimeoutError as error:
            raise Unreachable(f"{self.label} is away") from error

    async def connected(self, deadline_s: float) -> None:
        """Wait for the handshake. Raises ``Unreachable``, ``WrongKey``, ``NotAdmitted`` as soon as known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._decided.wait()
        if not self._is_connected:
            raise self.diagnosis(deadline_s)

    def diagnosis(self, deadline_s: float) -> LinkError:
        """The best explanation for hearing nothing within ``deadline_s``."""
        if self._is_connected:
            return DeadlineExceeded(f"{self.label} did not answer within {deadline_s:.1f} s")
        return self._trouble or Unreachable(
            f"nothing answers at {self.label}: is it running there, is the port open, is the address right?"
        )

    # For the control plane --------------------------------------------------------------------------------

    @property
    def routing(self) -> bytes | None:
        """The routing id of an incoming channel; None for a dialed one, which has a socket of its own."""
        return self._routing

    @property
    def socket(self) -> zmq.asyncio.Socket:
        return self._socket

    @property
    def is_connected(self) -> bool:
        """Whether the other side has proved its key and has not gone since."""
        return self._is_connected

    @property
    def is_idle(self) -> bool:
        """Nobody here waits for an answer over it."""
        return not self._waiting

    async def send(self, envelope: Envelope) -> None:
        """Raises ``Unreachable`` when the channel is broken, ``WireError`` when the message is too large."""
        data = encode(envelope, MAX_REQUEST_BYTES if self._routing is None else MAX_MESSAGE_BYTES)
        if self.is_broken:
            raise self.diagnosis(0)
        try:
            if self._routing is None:
                await self._send_frames(cut(data))
            else:
                # Never wait here: one caller that does not read would hold up all others.
                await self._socket.send_multipart([self._routing, data], flags=zmq.DONTWAIT)
        except zmq.Again as error:
            raise Unreachable(f"{self.label} does not read what it is sent") from error
        except zmq.ZMQError as error:
            self.mark_broken(Unreachable(f"{self.label} is not connected any more"))
            raise self.diagnosis(0) from error
        except asyncio.CancelledError:
            # Closing a socket cancels its sends; only a cancelled task may end by that.
            task = asyncio.current_task()
            if self.is_broken and task is not None and not task.cancelling():
                raise self.diagnosis(0) from None
            raise

    async def _send_frames(self, frames: list[bytes]) -> None:
        if len(frames) == 1:
            await self._socket.send_multipart(frames)
            return
        async with self._sending_pieces:
            for frame in frames:
                await self._socket.send_multipart([frame])

    def heard(self) -> None:
        """Something has come over it: the other side is there."""
        self.heard_s = asyncio.get_running_loop().time()

    async def ping(self) -> None:
        """Ask a dialed one's other side for a sign of life, of which ``heard_s`` tells."""
        # Where nothing more can be queued, there is enough on its way that has to be answered.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send(encode(Envelope("request", 0, PeerToPeerPing())), flags=zmq.DONTWAIT)

    def settle(self, number: int, answer: Message | LinkError) -> None:
        """Hand a reply to whoever waits for it; late and invented ones are dropped."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def mark_connected(self) -> None:
        self._trouble = None
        self.heard()
        self._is_connected = self.was_connected = True
        self._decided.set()

    def mark_away(self) -> None:
        """The connection was lost: replies to what was sent over it cannot come any more."""
        if self.is_broken or not self._is_connected:
            return
        self._is_connected = False
        self._decided.clear()
        for number in self._sent:
            self.settle(number, Unreachable(f"the connection to {self.label} was lost"))

    def mark_broken(self, trouble: LinkError) -> None:
        """It will never work again, for this reason."""
        if self.is_broken:
            return
        self._trouble = trouble
        self.is_broken = True
        self._is_connected = False
        self._decided.set()
        for number in self._waiting:
            self.settle(number, trouble)

    def note_trouble(self, trouble: LinkError) -> None:
        """Why it is away; it goes on trying."""
        self._trouble = trouble
