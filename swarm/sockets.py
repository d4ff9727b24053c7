"""What all ZeroMQ sockets of ours have in common: addresses, binding, and how they treat dead connections."""

from __future__ import annotations

import asyncio
import logging
import socket as sockets

import zmq
import zmq.asyncio

from shoal.swarm.errors import Unreachable

log = logging.getLogger(__name__)

CURVE_DOMAIN = b"control"
PLAIN_DOMAIN = b"bulk"


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's spelling of a TCP address; IPv6 addresses need brackets."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def tune(socket: zmq.asyncio.Socket, silence_ms: int) -> None:
    """IPv6 too, dead connections noticed after ``silence_ms``, quick reconnects, no lingering."""
    socket.ipv6 = True
    socket.linger = 0
    socket.heartbeat_ivl = silence_ms // 3
    socket.heartbeat_timeout = silence_ms
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


async def look_up(host: str, port: int, limit_s: float) -> str:
    """The address of a host name; empty when there is none in time.

    Looked up here, in a thread: libzmq would do it on the one that moves everybody's bytes, at each member again."""
    if not host:
        return ""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            found = await loop.getaddrinfo(host, port, type=sockets.SOCK_STREAM)
    except (TimeoutError, OSError, UnicodeError) as error:
        log.info("a member calls itself %r, which has no address: %s", host, error)
        return ""
    return str(found[0][4][0])
