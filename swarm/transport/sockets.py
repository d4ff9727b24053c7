"""Addresses, binding, connecting, and how our ZeroMQ sockets treat dead connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket as sockets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
import zmq.asyncio

from shoal.swarm.errors import Unreachable
from shoal.swarm.protocol.addresses import join_host_port, parse_ip

log = logging.getLogger(__name__)

CURVE_DOMAIN = b"control"

SILENCE_S = 15.0
"""A control connection over which nothing has come for so long is given up, by the kernel and by us, at the latest."""

PROBES = 3
"""In that time, the other side is asked so often whether it is there."""

_NOT_SENT_LOW_WATER = 0x201 if sys.platform == "darwin" else 25
"""TCP_NOTSENT_LOWAT, which Python does not name before 3.12."""

_UNSENT_BYTES, _LEAST_UNSENT_BYTES, _UNSENT_S = 2**17, 2**13, 0.05
"""What waits in the kernel to be sent on one connection, at most; less where that would take longer."""

_IS_LINUX = sys.platform == "linux"
_MAX_PACING_RATE, _CONGESTION_CONTROL = 47, 13
"""SO_MAX_PACING_RATE and TCP_CONGESTION; Python does not name the one, and the other only on Linux."""

_UNPACED, _SLOWEST_BYTES_S = 2**32 - 1, 2**12
_WITH_HEADERS = 1500 / 1448
"""The kernel paces packets, with the headers of IP and TCP."""

_ACKED, _RECEIVED, _SHORTEST_US = struct.Struct("120xQ"), struct.Struct("128xQ"), struct.Struct("148xI")
"""``tcpi_bytes_acked``, ``tcpi_bytes_received`` and ``tcpi_min_rtt`` of the kernel's ``struct tcp_info``."""


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's spelling of a TCP address; IPv6 addresses need brackets."""
    return f"tcp://{join_host_port(host, port)}"


def tune(socket: zmq.asyncio.Socket) -> None:
    """IPv6 too, dead connections noticed after ``SILENCE_S``, quick reconnects, no lingering, no high-water mark for
    what is received.

    Never with libzmq's heartbeats, nor with a mark: each lets the other side end this process (``inflow.py``)."""
    socket.ipv6 = True
    socket.linger = 0
    socket.rcvhwm = 0
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = int(SILENCE_S / PROBES)
    socket.tcp_keepalive_cnt = PROBES - 1
    # Keepalive is silent while something that was sent waits for its receipt: that has a limit of its own.
    socket.tcp_maxrt = int(1000 * SILENCE_S)
    socket.connect_timeout = int(1000 * SILENCE_S / PROBES)
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2_000


def bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    """Bind to ``host:port`` (0: any free one); returns the port. Raises ``Unreachable``."""
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        raise Unreachable(f"cannot listen on {host}:{port}: {error}; choose another --bind") from error
    bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return int(bound.rstrip(b"\0").rsplit(b":", 1)[1])


async def all_addresses(host: str, port: int, limit_s: float) -> list[str]:
    """All addresses of a host name, in the order in which to try them; none when there is none in time.

    Looked up in a thread: libzmq would do it on the one that moves everybody's bytes, at each connection again."""
    if parse_ip(host) is not None:
        return [host]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            found = await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
    except (TimeoutError, OSError, UnicodeError) as error:
        log.info("%r has no address: %s", host, error)
        return []
    return [str(address[0]) for *_, address in found]


def descriptors_allowed() -> int:
    """How many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int) -> sockets.socket:
    """A plain listening socket on ``host:port`` (0: any free one). Raises ``Unreachable``."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    dual = host == "::" and sockets.has_dualstack_ipv6()
    try:
        return sockets.create_server((host, port), family=family, backlog=256, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise Unreachable(f"cannot listen on {host}:{port}: {error}; choose another --bind") from error


def tune_stream(socket: sockets.socket) -> None:
    """For a data connection: it does not block, sends at once and notices in the end when the other side is gone.

    Little waits in the kernel, where what is urgent could not overtake it."""
    socket.setblocking(False)
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    socket.setsockopt(sockets.IPPROTO_TCP, _NOT_SENT_LOW_WATER, _UNSENT_BYTES)


def is_on_this_machine(socket: sockets.socket) -> bool:
    """Whether a TCP connection has both its ends here: they have one address."""
    try:
        ours, theirs = socket.getsockname(), socket.getpeername()
    except OSError:  # closed meanwhile
        return False
    return bool(ours[0] == theirs[0])


def acked_bytes(socket: sockets.socket) -> int:
    """How many bytes sent on a TCP connection the other side has got; 0 where nobody can tell."""
    return _tcp_info(socket, _ACKED)


@contextmanager
def borrowed(descriptor: int) -> Iterator[sockets.socket]:
    """A TCP socket that somebody else closes, such as libzmq. Raises ``OSError`` when it is none any more."""
    socket = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield socket
    finally:
        socket.detach()


def inode_of(descriptor: int) -> int | None:
    """The number that tells a socket from a later one with the same descriptor; None when it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def shut_down(descriptor: int, inode: int) -> None:
    """End a borrowed connection, if that number still is its; whoever owns it finds it ended by the other side.

    On a duplicate: its owner may close it at any moment, and the number be another socket's."""
    with suppress(OSError), held(descriptor) as socket:
        if inode_of(socket.fileno()) == inode:
            socket.shutdown(sockets.SHUT_RDWR)


@contextmanager
def held(descriptor: int) -> Iterator[sockets.socket]:
    """A duplicate of a socket that somebody else may close meanwhile, or the socket itself where no descriptor is left
    for one. Raises ``OSError`` when it is no socket any more."""
    try:
        duplicate = os.dup(descriptor)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        with borrowed(descriptor) as socket:
            yield socket
        return
    try:
        socket = sockets.socket(fileno=duplicate)  # finds out its family
    except OSError:
        os.close(duplicate)
        raise
    with socket:
        yield socket


def received_bytes(socket: sockets.socket) -> int:
    """How many bytes have come over a TCP connection, read or not; 0 where nobody can tell."""
    return _tcp_info(socket, _RECEIVED)


def shortest_round_trip_s(socket: sockets.socket) -> float:
    """The shortest round trip that a TCP connection has seen; 0 where nobody can tell."""
    return _tcp_info(socket, _SHORTEST_US) / 1e6


def _tcp_info(socket: sockets.socket, field: struct.Struct) -> int:
    if not _IS_LINUX:
        return 0
    try:
        found: tuple[int] = field.unpack(socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, field.size))
    except (OSError, struct.error):  # closed meanwhile; an old kernel
        return 0
    return found[0]


def pace(socket: sockets.socket, bps: float | None) -> None:
    """Let the kernel send no faster than that on a TCP connection, where it can; None: as fast as it sees fit.

    The slower it is, the less waits there, or a request would wait for it: of results, behind contributions, on a link
    with 10 Mbit/s for three tenths of a second."""
    bytes_s = _UNPACED if bps is None else min(max(int(_WITH_HEADERS * bps / 8), _SLOWEST_BYTES_S), _UNPACED - 1)
    unsent_bytes = min(_UNSENT_BYTES, max(_LEAST_UNSENT_BYTES, int(_UNSENT_S * bytes_s)))
    if _IS_LINUX:
        with suppress(OSError):  # closed meanwhile
            socket.setsockopt(sockets.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("I", bytes_s))
            socket.setsockopt(sockets.IPPROTO_TCP, _NOT_SENT_LOW_WATER, unsent_bytes)


def renew_model(socket: sockets.socket) -> None:
    """Have BBR, where it governs a TCP connection, learn the way anew, with the window that it has.

    Every ten seconds it would send next to nothing for two tenths, to see how short the way is: in most rounds of some
    seconds once, while everybody waits. What a paced connection has seen of the way is right without that."""
    if _IS_LINUX:
        with suppress(OSError):  # closed meanwhile, or not allowed
            if socket.getsockopt(sockets.IPPROTO_TCP, _CONGESTION_CONTROL, 16).rstrip(b"\0") == b"bbr":
                for other in (b"reno", b"bbr"):
                    socket.setsockopt(sockets.IPPROTO_TCP, _CONGESTION_CONTROL, other)


async def connect(host: str, port: int) -> sockets.socket:
    """A connected plain socket that does not block. Raises ``Unreachable``; has no deadline of its own."""
    loop = asyncio.get_running_loop()
    trouble: Exception = OSError("it has no address")
    try:
        found = await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            socket = sockets.socket(family, kind, protocol)
            try:
                socket.setblocking(False)
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
    raise Unreachable(f"no data connection to {host}:{port}: {trouble}") from trouble
