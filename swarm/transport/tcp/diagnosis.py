"""Diagnosis of a server that cannot be talked to: no such name, refused, silent, or another kind of server."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress

from shoal.swarm.protocol.addresses import join_host_port, parse_ip

_SPEAKS_FIRST_S = 1.0
"""Time for a server that speaks first, as SSH and ZeroMQ do."""

_ANSWER_S = 2.0
_MOST_BYTES = 64
_HTTP = b"GET / HTTP/1.0\r\n\r\n"
_TLS_ALERT = b"\x15\x03"
_UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL})


async def unknown_name(host: str, limit_s: float) -> str:
    """Look a host's name up; returns why that is in vain, or empty. An IP address is not looked up."""
    if parse_ip(host) is not None:
        return ""
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return f"no machine is known by the name {host!r}: is it spelt right, and is this machine online?"
    except (TimeoutError, OSError):
        return ""  # the attempt to connect tells more
    return ""


async def why_silent(host: str, port: int, limit_s: float) -> tuple[str, bool]:
    """Connect as plain TCP and listen. Returns in words why there is no talking to this server, and whether it is
    certain that trying again is in vain."""
    place = join_host_port(host, port)
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{place} does not answer at all: a firewall may drop the packets, or the machine is off", False
    except ConnectionRefusedError:
        return f"{place} refuses the connection: nothing listens on that port at the moment", False
    except OSError as error:
        if error.errno in _UNREACHABLE:
            return f"there is no way from here to {place}: {error.strerror}", False
        return f"{place} cannot be connected to: {error.strerror or error}", False
    try:
        return await _listen(place, reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _listen(place: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool]:
    first = await _read(reader, _SPEAKS_FIRST_S)
    if not first:
        with suppress(OSError):
            writer.write(_HTTP)
            first = await _read(reader, _ANSWER_S)
    if first.startswith(b"\xff"):  # ZeroMQ's greeting
        return f"a coordinator or relay answers at {place}, but does not finish its greeting: it may be busy", False
    if first.startswith(b"SSH-"):
        return f"an SSH server answers at {place}, not a coordinator: is the port right?", True
    if first.startswith((b"HTTP/", b"<")):
        return f"a web server answers at {place}, not a coordinator: is the port right?", True
    if first.startswith(_TLS_ALERT):
        return f"a server for TLS (https) answers at {place}, not a coordinator: is the port right?", True
    if first:
        return f"another kind of server answers at {place}, not a coordinator: is the port right?", True
    return f"{place} takes the connection and says nothing: another kind of server may listen there", False


async def _read(reader: asyncio.StreamReader, limit_s: float) -> bytes:
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(limit_s):
            return await reader.read(_MOST_BYTES)
    return b""
