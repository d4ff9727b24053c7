"""Socket helpers: options of ZeroMQ and TCP sockets, binding, connecting, and the kernel's view of a connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket as sockets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
import zmq.asyncio

from shoal.swarm import system
from shoal.swarm.errors import Unreachable
from shoal.swarm.protocol.addresses import join_host_port, parse_ip

log = logging.getLogger(__name__)

CURVE_DOMAIN = b"control"

SILENCE_S = 15.0
"""A control connection over which nothing arrives for this long is given up, by the kernel and by Shoal."""

PROBES = 3
"""Number of probes of the other side within ``SILENCE_S``."""

_NOT_SENT_LOW_WATER = 0x201 if sys.platform == "darwin" else 25
"""TCP_NOTSENT_LOWAT, which Python does not name before 3.12."""

_UNSENT_BYTES, _LEAST_UNSENT_BYTES, _UNSENT_S = 2**17, 2**13, 0.05
"""Most bytes that wait in the kernel to be sent on one connection; fewer where they would take longer than this."""

_IS_LINUX = sys.platform == "linux"
_MAX_PACING_RATE, _CONGESTION_CONTROL = 47, 13
"""SO_MAX_PACING_RATE, which Python does not name, and TCP_CONGESTION, which it names on Linux only."""

_UNPACED, _SLOWEST_BYTES_S = 2**32 - 1, 2**12
_WITH_HEADERS = 1500 / 1448
"""The kernel paces whole packets, including the headers of IP and TCP."""

_ACKED, _RECEIVED, _SHORTEST_US = struct.Struct("120xQ"), struct.Struct("128xQ"), struct.Struct("148xI")
"""``tcpi_bytes_acked``, ``tcpi_bytes_received`` and ``tcpi_min_rtt`` in the kernel's ``struct tcp_info``."""


def endpoint(host: str, port: int | str, from_port: int = 0) -> str:
    """A TCP address as ZeroMQ writes it; ``from_port``: to be dialed from that local port, if it is an IP address."""
    address = join_host_port(host, port)
    own_host = "::" if ":" in host else "0.0.0.0"
    is_from = from_port and parse_ip(host) is not None
    return f"tcp://{join_host_port(own_host, from_port)};{address}" if is_from else f"tcp://{address}"


def tune(socket: zmq.asyncio.Socket) -> None:
    """Set options: IPv6, detection of dead connections after ``SILENCE_S``, quick reconnects, no lingering.

    Never use libzmq's heartbeats or a high-water mark for received messages: with either, the other side can end this
    process (``receive_backlog.py``)."""
    socket.ipv6 = True
    socket.linger = 0
    socket.rcvhwm = 0
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = int(SILENCE_S / PROBES)
    socket.tcp_keepalive_cnt = PROBES - 1
    # Keepalive does not probe while sent data is unacknowledged: that has a limit of its own.
    socket.tcp_maxrt = int(1000 * SILENCE_S)
    socket.connect_timeout = int(1000 * SILENCE_S / PROBES)
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2_000


def bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    """Bind a ZeroMQ socket (port 0: any free one); returns the port. Raises ``Unreachable``."""
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        raise Unreachable(f"cannot listen on {host}:{port}: {error}; choose another --bind") from error
    bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return int(bound.rstrip(b"\0").rsplit(b":", 1)[1])


async def all_addresses(host: str, port: int, limit_s: float) -> list[str]:
    """All IP addresses of a host name, in the order in which to try them; none if the look-up fails or takes too long.

    asyncio looks names up in a thread. libzmq would do it on its I/O thread, for every connection again."""
    if parse_ip(host) is not None:
        return [host]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            found = await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
    except (TimeoutError, OSError, UnicodeError) as error:
        log.info("cannot find the address of %r: %s", host, error)
        return []
    return [str(address[0]) for *_, address in found]


def own_end(bind: str) -> str:
    """The host at which processes of this machine reach a listener on ``bind``."""
    return {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(bind, bind)


def descriptors_allowed() -> int:
    """The process's limit of open files and sockets."""
    return system.most_files()


def listen(host: str, port: int) -> sockets.socket:
    """A listening TCP socket (port 0: any free one). Raises ``Unreachable``."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    dual = host == "::" and sockets.has_dualstack_ipv6()
    try:
        return sockets.create_server((host, port), family=family, backlog=256, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise Unreachable(f"cannot listen on {host}:{port}: {error}; choose another --bind") from error


def tune_stream(socket: sockets.socket) -> None:
    """Set options of a data connection: non-blocking, no delay, keepalive, and a small unsent buffer in the kernel.

    Urgent frames cannot overtake what already waits in the kernel."""
    socket.setblocking(False)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    if sys.platform != "win32":
        socket.setsockopt(sockets.IPPROTO_TCP, _NOT_SENT_LOW_WATER, _UNSENT_BYTES)


def limit_receive_buffer(socket: sockets.socket, size_bytes: int) -> None:
    """Limit what a connection receives ahead of its reader. Raises ``OSError``."""
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, size_bytes)


def tune_relayed(socket: sockets.socket) -> None:
    """Set options of a connection to or of a relay, or between a local forwarder and libzmq."""
    socket.setblocking(False)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    if _IS_LINUX:
        idle_s = int(SILENCE_S / PROBES)
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, idle_s)
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, idle_s)
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, PROBES - 1)
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, int(1000 * SILENCE_S))


def is_on_this_machine(socket: sockets.socket) -> bool:
    """Whether both ends of a TCP connection have the same address, and so are on this machine."""
    try:
        ours, theirs = socket.getsockname(), socket.getpeername()
    except OSError:  # it was closed
        return False
    return bool(ours[0] == theirs[0])


def acked_bytes(socket: sockets.socket) -> int:
    """Bytes of a TCP connection that the other side has acknowledged; 0 if unknown."""
    return _tcp_info(socket, _ACKED)


@contextmanager
def borrowed(descriptor: int) -> Iterator[sockets.socket]:
    """Use a TCP socket of another owner, such as libzmq, who closes it. Raises ``OSError`` if it is closed already."""
    socket = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield socket
    finally:
        socket.detach()


def inode_of(descriptor: int) -> int | None:
    """The inode, which tells a socket from a later one with the same descriptor; None if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def shut_down(descriptor: int, inode: int) -> None:
    """Shut down a connection of another owner, to whom it looks as if the other side had closed it.

    Works on a duplicate, as the owner may close the socket at any moment and the number may then be reused."""
    with suppress(OSError), duplicated(descriptor) as socket:
        if inode_of(socket.fileno()) == inode:
            socket.shutdown(sockets.SHUT_RDWR)


@contextmanager
def duplicated(descriptor: int) -> Iterator[sockets.socket]:
    """A duplicate of another owner's socket, or the socket itself when no descriptor is left for a duplicate.

    Raises ``OSError`` if it is closed already."""
    try:
        duplicate = os.dup(descriptor)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        with borrowed(descriptor) as socket:
            yield socket
        return
    try:
        socket = sockets.socket(fileno=duplicate)  # detects the family
    except OSError:
        os.close(duplicate)
        raise
    with socket:
        yield socket


def received_bytes_on(descriptor: int, inode: int) -> int:
    """Bytes received on a TCP connection of another owner, read or not; 0 if unknown or closed."""
    if inode_of(descriptor) == inode:
        with suppress(OSError), borrowed(descriptor) as socket:  # it may be closed at any moment
            return _tcp_info(socket, _RECEIVED)
    return 0


def machine_received_bytes() -> int | None:
    """Bytes that all interfaces of this machine have received, loopback included; None where that is not known.

    One short read, however many connections there are."""
    if not _IS_LINUX:
        return None
    try:
        with open("/proc/net/dev", "rb") as file:
            return sum(int(line.split(b":", 1)[1].split(None, 1)[0]) for line in file.readlines()[2:])
    except (OSError, ValueError, IndexError):
        return None


def remote_port(descriptor: int) -> int:
    """The other side's port of a TCP connection of another owner; 0 if it is closed."""
    with suppress(OSError), borrowed(descriptor) as socket:  # it may be closed at any moment
        return int(socket.getpeername()[1])
    return 0


def shortest_round_trip_s(socket: sockets.socket) -> float:
    """The shortest round trip of a TCP connection; 0 if unknown."""
    return _tcp_info(socket, _SHORTEST_US) / 1e6


def _tcp_info(socket: sockets.socket, field: struct.Struct) -> int:
    if not _IS_LINUX:
        return 0
    try:
        found: tuple[int] = field.unpack(socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, field.size))
    except (OSError, struct.error):  # it was closed, or the kernel is old
        return 0
    return found[0]


def pace(socket: sockets.socket, bps: float | None) -> None:
    """Limit the rate at which the kernel sends on a TCP connection, where it can; None removes the limit.

    Less data waits in the kernel on slower connections, as frames queue behind it: on a link of 10 Mbit/s results would
    wait for three tenths of a second behind contributions."""
    bytes_s = _UNPACED if bps is None else min(max(int(_WITH_HEADERS * bps / 8), _SLOWEST_BYTES_S), _UNPACED - 1)
    unsent_bytes = min(_UNSENT_BYTES, max(_LEAST_UNSENT_BYTES, int(_UNSENT_S * bytes_s)))
    if _IS_LINUX:
        with suppress(OSError):  # it was closed
            socket.setsockopt(sockets.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("I", bytes_s))
            socket.setsockopt(sockets.IPPROTO_TCP, _NOT_SENT_LOW_WATER, unsent_bytes)


def renew_model(socket: sockets.socket) -> None:
    """Restart the path model of BBR, if a TCP connection uses it, with its current window.

    Every ten seconds BBR sends hardly anything for 0.2 s to measure the shortest round trip: in most rounds once, while
    all members wait. A paced connection fills no queues, so its measured round trips are right without that."""
    if _IS_LINUX:
        with suppress(OSError):  # it was closed, or this is not allowed
            if socket.getsockopt(sockets.IPPROTO_TCP, _CONGESTION_CONTROL, 16).rstrip(b"\0") == b"bbr":
                for other in (b"reno", b"bbr"):
                    socket.setsockopt(sockets.IPPROTO_TCP, _CONGESTION_CONTROL, other)


async def connect(
    host: str, port: int, *, from_port: int | None = None, from_host: str = "", what: str = "a data connection"
) -> sockets.socket:
    """Connect a non-blocking TCP socket. Raises ``Unreachable``; sets no deadline.

    ``from_port``: the port to connect from, 0 for any, which later connections may share: a NAT gives all of them the
    same public port, so whoever has seen that of one connection knows where to dial. ``from_host``: the local address;
    ``what``: for the error."""
    loop = asyncio.get_running_loop()
    trouble: Exception = OSError("the host has no address")
    try:
        found = await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            socket = sockets.socket(family, kind, protocol)
            try:
                socket.setblocking(False)
                if from_port is not None:
                    share_port(socket)
                if from_port is not None or from_host:
                    own_host = from_host or ("::" if family == sockets.AF_INET6 else "0.0.0.0")
                    socket.bind((own_host, from_port or 0))
                await loop.sock_connect(socket, address)
            except OSError as error:
                socket.close()
                trouble = error
            except BaseException:
                socket.close()
                raise
            else:
                return socket
    except (OSError, UnicodeError) as error:
        trouble = error
    raise Unreachable(f"cannot open {what} to {host}:{port}: {trouble}") from trouble


def share_port(socket: sockets.socket) -> None:
    """Allow a socket to be bound to a port that other sockets of this process use."""
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    if hasattr(sockets, "SO_REUSEPORT"):
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEPORT, 1)
