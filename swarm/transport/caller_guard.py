"""The guard of the control plane's port: follows each accepted connection, and closes those that break the limits.

libzmq accepts connections on a thread of its own and tells nobody whose they are. Its monitor gives the descriptor of
each, and every message that of the connection which it came over, so that a connection can be shut down from outside:
libzmq finds it ended by the other side.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio

from shoal.swarm.protocol.addresses import network_of
from shoal.swarm.transport.sockets import borrowed, descriptors_allowed, held, inode_of, received_bytes, shut_down
from shoal.swarm.transport.stranger_limits import Caller, Callers, MessageLimits, strangers_allowed

log = logging.getLogger(__name__)

_LOOK_S, _MANY = 0.05, 256
"""Between two looks at what has come over so many connections, and longer for more: in 0.05 s one of libzmq's threads
decrypts some 30 MB, whoever they are from."""

_EVENT = struct.Struct("=HI")
_WAITING_EVENTS, _EVENTS_AT_ONCE = 64, 32


class CallerGuard:
    """Of one ROUTER. ``start`` before it is bound, ``stop`` before it is closed; all but the thread is for the loop."""

    def __init__(self, most_message_bytes: int, is_member: Callable[[bytes], bool]) -> None:
        """``most_message_bytes``: of a member's message. ``is_member``: by the key of its process."""
        self.is_member = is_member
        self._limits = MessageLimits(most_message_bytes)
        self._lock = threading.Lock()
        self._callers = Callers(strangers_allowed(descriptors_allowed()), random.Random(), _received_bytes)
        self._router: zmq.asyncio.Socket
        self.port = 0
        """The ROUTER's, once that is known."""
        self._thread: threading.Thread | None = None
        self._next_look_s = self._next_members_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Has the error of a thread that ended by itself; cancelled by ``stop``."""

    def start(self, context: zmq.asyncio.Context, router: zmq.asyncio.Socket, address: str) -> None:
        """``address``: an inproc name for the monitor."""
        self._router = router
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        monitor: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PAIR)
        # libzmq's thread waits once so many events do: it accepts no faster than we look.
        monitor.rcvhwm = _WAITING_EVENTS
        monitor.connect(address)
        self._thread = threading.Thread(target=self._run, args=(monitor,), name="shoal-callers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._router.disable_monitor()  # its last event ends the thread, which has taken all others before
            self._thread.join()
            self._thread = None
        self.ended.cancel()

    # On the event loop --------------------------------------------------------------------------------------

    def allows(self, descriptor: int, routing: bytes, key: bytes, host: str, size_bytes: int) -> bool:
        """Whether a message is worth decoding; the connection of one that is not is closed."""
        now_s, is_member = time.monotonic(), self.is_member(key)
        if is_member:
            allowed = self._limits.allows_member(key, size_bytes, now_s)
        else:
            allowed = self._limits.allows_stranger(key, network_of(host), size_bytes, now_s)
        with self._lock:
            caller, to_close = self._speaker(descriptor, routing, key)
            if caller is not None and not caller.is_closed:
                if allowed:
                    to_close += self._callers.hear(caller, is_member, size_bytes, now_s)
                else:
                    log.debug("closing the connection of %s: %d bytes are beyond its limits", host, size_bytes)
                    to_close += self._callers.close(caller)
            _shut(to_close)
            return allowed and not (caller is not None and caller.is_closed)

    def _speaker(self, descriptor: int, routing: bytes, key: bytes) -> tuple[Caller | None, list[Caller]]:
        """Find the caller that has said something, None when it has gone since; and those to close for it."""
        to_close: list[Caller] = []
        if self._callers.speaker(routing) is None and not self._callers.has_ended(routing):
            # The thread may not have heard of it yet, and the descriptor may have been another one's a moment ago.
            if (caller := _caller(descriptor, self.port)) is not None:
                to_close += self._callers.connect(caller)
            to_close += self._callers.introduce(descriptor, routing, key)
        return self._callers.speaker(routing), to_close

    def refuses_handshake(self, key: bytes) -> bool:
        """Whether that non-member has said too much lately to connect again now."""
        return self._limits.refuses_handshake(key, time.monotonic())

    def look_at_members(self) -> None:
        """Whoever is a member no more is a stranger from now on."""
        now_s = time.monotonic()
        with self._lock:
            for caller in self._callers.members():
                if not self.is_member(caller.key):
                    _shut(self._callers.expel(caller, now_s))

    # On the thread ------------------------------------------------------------------------------------------

    def _run(self, monitor: zmq.Socket[bytes]) -> None:
        try:
            while self._turn(monitor):
                pass
        except Exception as error:  # noqa: BLE001 - the loop raises it
            self._loop.call_soon_threadsafe(self._fail, error)
            # Whoever leaves events lying stops libzmq's thread, and with it the end of this process.
            while _EVENT.unpack(monitor.recv_multipart()[0])[0] != zmq.EVENT_MONITOR_STOPPED:
                pass
        finally:
            monitor.close(linger=0)

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _turn(self, monitor: zmq.Socket[bytes]) -> bool:
        """Returns whether there will be another one."""
        with self._lock:
            wait_s = _LOOK_S * max(1.0, len(self._callers) / _MANY)
        is_ending, accepted = False, list[int]()
        if monitor.poll(round(1000 * wait_s)):
            with suppress(zmq.Again):
                while not is_ending and len(accepted) < _EVENTS_AT_ONCE:
                    event, value = _EVENT.unpack(monitor.recv_multipart(zmq.DONTWAIT)[0])
                    if event == zmq.EVENT_ACCEPTED:
                        accepted.append(value)
                    is_ending = event == zmq.EVENT_MONITOR_STOPPED
        now_s = time.monotonic()
        with self._lock:
            for descriptor in accepted:
                caller = _caller(descriptor, self.port)
                if caller is not None:
                    _shut(self._callers.connect(caller))
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_S
                _shut(self._callers.overdue_strangers(now_s))
                self._callers.forget_ended(_is_there)
            if now_s >= self._next_members_s:
                self._next_members_s = now_s + wait_s
                _shut(self._callers.flooding_members())
        return not is_ending


# Other people's descriptors ---------------------------------------------------------------------------------


def _caller(descriptor: int, port: int) -> Caller | None:
    """Return the connection to our ``port`` (0: to any) of that descriptor; None when it is gone, and the number may be
    that of some other socket of this process."""
    try:
        with held(descriptor) as socket:
            inode, host = inode_of(socket.fileno()), str(socket.getpeername()[0])
            is_ours = port in (0, socket.getsockname()[1])
    except OSError:
        return None
    return Caller(descriptor, inode, network_of(host), time.monotonic()) if is_ours and inode is not None else None


def _is_there(caller: Caller) -> bool:
    return inode_of(caller.descriptor) == caller.inode


def _received_bytes(caller: Caller) -> int:
    if _is_there(caller):
        with suppress(OSError), borrowed(caller.descriptor) as socket:  # it may end at any moment
            return received_bytes(socket)
    return 0


def _shut(callers: list[Caller]) -> None:
    """End connections; libzmq closes their descriptors when it sees that."""
    for caller in callers:
        shut_down(caller.descriptor, caller.inode)
