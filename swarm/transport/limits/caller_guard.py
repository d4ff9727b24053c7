"""Guard of the control plane's port: follows each accepted connection and closes those that break the limits.

libzmq accepts connections on its own thread and does not say from whom. Its monitor reports the descriptor of each, and
every message carries the descriptor of its connection. So a connection can be shut down from outside libzmq, as if the
other side had closed it.
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
from shoal.swarm.transport.limits.caller_limits import (
    MEMBER_BACKLOG_BYTES,
    Caller,
    Callers,
    MessageLimits,
    strangers_allowed,
)
from shoal.swarm.transport.limits.origins import Origins
from shoal.swarm.transport.tcp.sockets import (
    descriptors_allowed,
    duplicated,
    inode_of,
    machine_received_bytes,
    received_bytes_on,
    shut_down,
)

log = logging.getLogger(__name__)

_PERIOD_S, _CONNECTIONS = 0.05, 256
"""Time between two checks of up to so many connections, longer for more. In 0.05 s a thread of libzmq decrypts 30 MB,
whoever sent them."""

_QUIET_S = 5.0
"""Longest time between two checks of members while this machine receives hardly anything."""

_EVENT = struct.Struct("=HI")
_MAX_WAITING_EVENTS, _MAX_EVENTS = 64, 32


class CallerGuard:
    """Guard of one ROUTER socket; call ``start`` before the socket is bound and ``stop`` before it is closed.

    A thread checks the connections' limits; the public methods are for the event loop."""

    def __init__(self, most_message_bytes: int, is_member: Callable[[bytes], bool], origins: Origins) -> None:
        """``most_message_bytes``: largest message of a member. ``is_member``: whether a transport key is a member's.
        ``origins``: of connections that local forwarders make."""
        self.origins = origins
        self.is_member = is_member
        self._limits = MessageLimits(most_message_bytes)
        self._lock = threading.Lock()
        self._callers = Callers(strangers_allowed(descriptors_allowed()), random.Random(), _received_bytes)
        self._router: zmq.asyncio.Socket
        self.port = 0
        """The ROUTER's port; 0 until it is known."""
        self._thread: threading.Thread | None = None
        self._next_check_s = self._next_members_s = self._members_by_s = 0.0
        self._received_bytes: int | None = None
        """Bytes that this machine had received when the members were looked at last."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Receives the error of the thread if it fails; cancelled by ``stop``."""

    def start(self, context: zmq.asyncio.Context, router: zmq.asyncio.Socket, address: str) -> None:
        """Start to follow connections. ``address``: an inproc address for the monitor."""
        self._router = router
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        monitor: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PAIR)
        # When so many events wait, libzmq's thread blocks: it accepts connections no faster than this thread sees them.
        monitor.rcvhwm = _MAX_WAITING_EVENTS
        monitor.connect(address)
        self._thread = threading.Thread(
            target=self._watch_connections, args=(monitor,), name="shoal-callers", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._router.disable_monitor()  # its last event ends the thread, after all others
            self._thread.join()
            self._thread = None
        self.ended.cancel()

    # On the event loop --------------------------------------------------------------------------------------

    def allows(self, descriptor: int, routing: bytes, key: bytes, host: str, size_bytes: int) -> bool:
        """Whether to decode a message; closes its connection if not."""
        now_s, is_member = time.monotonic(), self.is_member(key)
        if is_member:
            allowed = self._limits.allows_member(key, size_bytes, now_s)
        else:
            allowed = self._limits.allows_stranger(key, network_of(host), size_bytes, now_s)
        with self._lock:
            caller, to_close = self._sender(descriptor, routing, key)
            if caller is not None and not caller.is_closed:
                if allowed:
                    to_close += self._callers.count_message(caller, is_member, size_bytes, now_s)
                else:
                    log.debug(
                        "closing the connection of %s: a message of %d bytes exceeds its limits", host, size_bytes
                    )
                    to_close += self._callers.close(caller)
            _shut(to_close)
            return allowed and not (caller is not None and caller.is_closed)

    def _sender(self, descriptor: int, routing: bytes, key: bytes) -> tuple[Caller | None, list[Caller]]:
        """Find the connection of a message, None if it has ended; returns connections to close, too."""
        to_close: list[Caller] = []
        if self._callers.find(routing) is None and not self._callers.has_ended(routing):
            # The thread may not know the connection yet, or may know an earlier one with the same descriptor.
            if (caller := self._caller(descriptor)) is not None:
                to_close += self._callers.add(caller)
            to_close += self._callers.identify(descriptor, routing, key)
        return self._callers.find(routing), to_close

    def _caller(self, descriptor: int) -> Caller | None:
        return _caller(descriptor, self.port, self.origins)

    def refuses_handshake(self, key: bytes) -> bool:
        """Whether a stranger has sent too much lately to connect again now."""
        return self._limits.refuses_handshake(key, time.monotonic())

    def demote_former_members(self) -> None:
        """Treat connections of peers that are not members any more as strangers'."""
        now_s = time.monotonic()
        with self._lock:
            for caller in self._callers.members():
                if not self.is_member(caller.key):
                    _shut(self._callers.make_stranger(caller, now_s))

    # On the thread ------------------------------------------------------------------------------------------

    def _watch_connections(self, monitor: zmq.Socket[bytes]) -> None:
        try:
            while self._check(monitor):
                pass
        except Exception as error:  # noqa: BLE001 - raised on the event loop
            self._loop.call_soon_threadsafe(self._fail, error)
            # Unread events would block libzmq's thread, and with it the end of this process.
            while _EVENT.unpack(monitor.recv_multipart()[0])[0] != zmq.EVENT_MONITOR_STOPPED:
                pass
        finally:
            monitor.close(linger=0)

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _check(self, monitor: zmq.Socket[bytes]) -> bool:
        """Handle events and check the limits once; returns False after the monitor's last event."""
        with self._lock:
            wait_s = _PERIOD_S * max(1.0, len(self._callers) / _CONNECTIONS)
        is_ending, accepted = False, list[int]()
        if monitor.poll(round(1000 * wait_s)):
            with suppress(zmq.Again):
                while not is_ending and len(accepted) < _MAX_EVENTS:
                    event, value = _EVENT.unpack(monitor.recv_multipart(zmq.DONTWAIT)[0])
                    if event == zmq.EVENT_ACCEPTED:
                        accepted.append(value)
                    is_ending = event == zmq.EVENT_MONITOR_STOPPED
        now_s = time.monotonic()
        with self._lock:
            for descriptor in accepted:
                caller = self._caller(descriptor)
                if caller is not None:
                    _shut(self._callers.add(caller))
            if now_s >= self._next_check_s:
                self._next_check_s = now_s + _PERIOD_S
                _shut(self._callers.overdue_strangers(now_s))
                self._callers.forget_ended_strangers(_is_open)
            if now_s >= self._next_members_s and (now_s >= self._members_by_s or not self._is_quiet()):
                self._next_members_s, self._members_by_s = now_s + wait_s, now_s + _QUIET_S
                self._received_bytes = machine_received_bytes()
                self._callers.forget_ended(_is_open)
                _shut(self._callers.flooding_members())
        return not is_ending

    def _is_quiet(self) -> bool:
        """Whether this machine has received so little since the members were looked at that no backlog is too large.

        Looking at each of a thousand connections takes a tenth of a core."""
        before, received_bytes = self._received_bytes, machine_received_bytes()
        if before is None or received_bytes is None:
            return False
        return 0 <= received_bytes - before < MEMBER_BACKLOG_BYTES - self._callers.waiting_bytes


# libzmq's descriptors --------------------------------------------------------------------------------------


def _caller(descriptor: int, port: int, origins: Origins) -> Caller | None:
    """The connection of a descriptor to our ``port`` (0: any port); None if it was closed.

    The number may belong to another socket of this process by now."""
    try:
        with duplicated(descriptor) as socket:
            inode, host = inode_of(socket.fileno()), str(socket.getpeername()[0])
            is_ours = port in (0, socket.getsockname()[1])
    except OSError:
        return None
    if not is_ours or inode is None:
        return None
    return Caller(descriptor, inode, network_of(origins.of(host)), time.monotonic())


def _is_open(caller: Caller) -> bool:
    return inode_of(caller.descriptor) == caller.inode


def _received_bytes(caller: Caller) -> int:
    return received_bytes_on(caller.descriptor, caller.inode)


def _shut(callers: list[Caller]) -> None:
    """Shut connections down; libzmq then closes their descriptors."""
    for caller in callers:
        shut_down(caller.descriptor, caller.inode)
