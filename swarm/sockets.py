"""What all ZeroMQ sockets of ours have in common: addresses, binding, and how they treat dead connections."""

from __future__ import annotations

import zmq
import zmq.asyncio

from shoal.swarm.errors import Unreachable

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
