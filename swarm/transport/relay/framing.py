"""Messages between a relay and its clients, on plain sockets, as those are handed on once two ends are connected."""

from __future__ import annotations

import asyncio
import socket as sockets
from typing import TypeVar

from shoal.swarm.errors import LinkClosed, ShoalError, WireError, remote_error, words_for_others
from shoal.swarm.protocol.messages import RequestFailed
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.wire import Envelope, decode, encode

M = TypeVar("M", bound=Message)

MAX_BYTES = 2048
"""Largest message; one with a pass and a certificate has about 600 bytes."""

_SIZE_BYTES = 2


async def send(socket: sockets.socket, message: Message) -> None:
    """Send a message. Raises ``LinkClosed``; sets no deadline."""
    data = encode(Envelope("notice", 0, message), MAX_BYTES)
    try:
        await asyncio.get_running_loop().sock_sendall(socket, len(data).to_bytes(_SIZE_BYTES, "big") + data)
    except OSError as error:
        raise LinkClosed(f"the connection was lost: {error}") from error


async def receive(socket: sockets.socket, kind: type[M]) -> M:
    """Receive a message of this class, and not a byte more. Sets no deadline.

    Raises ``LinkClosed``, ``WireError`` for any other message, and the other side's error."""
    size = int.from_bytes(await _exactly(socket, _SIZE_BYTES), "big")
    if not 0 < size <= MAX_BYTES:
        raise WireError(f"a relay's message of {size} bytes; at most {MAX_BYTES} are allowed")
    message = decode(await _exactly(socket, size)).message
    if isinstance(message, RequestFailed):
        raise remote_error(message.code, message.message)
    if not isinstance(message, kind):
        raise WireError(f"{type(message).__name__} was not expected here")
    return message


async def send_error(socket: sockets.socket, error: ShoalError) -> None:
    """Send an error in place of an answer. Raises ``LinkClosed``."""
    await send(socket, RequestFailed(code=type(error).__name__, message=words_for_others(error)[:500]))


async def _exactly(socket: sockets.socket, size: int) -> bytes:
    data, loop = bytearray(), asyncio.get_running_loop()
    while len(data) < size:
        try:
            part = await loop.sock_recv(socket, size - len(data))
        except OSError as error:
            raise LinkClosed(f"the connection was lost: {error}") from error
        if not part:
            raise LinkClosed("the connection was closed by the other side")
        data += part
    return bytes(data)
