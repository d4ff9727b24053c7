"""One TCP connection of a link: sends and receives frames without blocking and without copies.

A frame is a length, a header and a sealed body. Where the two ends share memory, the body of a large frame lies there;
its position is sent in place of it, and a bit of the length says so.
"""

from __future__ import annotations

import socket as sockets
import sys
import time
from typing import TYPE_CHECKING

from shoal.swarm.errors import WireError
from shoal.swarm.transport.bulk.frame_crypto import HEADER_BYTES, TAG_BYTES
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

if TYPE_CHECKING:
    from shoal.swarm.protocol.types import PathKind
    from shoal.swarm.transport.bulk.link import Frame, Link
    from shoal.swarm.transport.bulk.shared_memory import RingReader

MAX_CHUNK_BYTES = 2**22 + 2**16
"""Largest payload of a chunk: 4 MiB (2**20 float32 or 2**22 int8 values), and room for scales and the chunk header."""

_SIZE_BYTES = 4
PREFIX_BYTES = _SIZE_BYTES + HEADER_BYTES
"""Bytes before every sealed body: its length and its header."""

_IS_POSITION = 2**31
"""Bit of the length: the header is followed by the body's position in shared memory."""

_POSITION_BYTES = 8
_HAS_LOW_WATER = sys.platform != "win32"
_MIN_SHARED_BYTES = 2**14
"""Smaller bodies are sent over the connection."""

READ_BYTES = 2**14
"""Bytes of a body that must have arrived before the thread reads again: handling single packets costs more than
decrypting them. With a larger value Linux makes room for it at once, and lets the TCP window grow no further."""


class HeldBack(Exception):
    """A limit on this machine's traffic lets no more bytes move at the moment."""


class DataConnection:
    """A non-blocking data socket with the frame being received and the frame being sent."""

    def __init__(
        self,
        socket: sockets.socket,
        link: Link | None,
        since_s: float,
        limits: TrafficLimits | None = None,
        path: PathKind = "direct",
        host: str = "",
    ) -> None:
        """``link``: None until the other side has shown to which link the connection belongs. ``limits``: of the whole
        process; None for none. ``host``: of the other end, where a relay is between."""
        self.socket = socket
        self.path = path
        self.host = host
        limits = limits or TrafficLimits()
        self._upload, self._download = limits.upload, limits.download
        self.link = link
        self.since_s = since_s
        self.is_blocked = False
        self.received_bytes = 0
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._prefix_filled = 0
        self._header = b""
        self._body = memoryview(bytearray(TAG_BYTES))
        self._body_bytes = self._body_left = 0
        self._shared_bytes = 0
        self._lent: RingReader | None = None
        self._low_water_bytes = 1
        self._sealed = bytearray()
        self._unsent = memoryview(b"")

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def receive(self, low_water_bytes: int = READ_BYTES) -> tuple[bytes, memoryview]:
        """Return the next frame's header and sealed body, valid until ``release``, which must precede the next call.

        Until the frame is complete, the socket becomes readable only after ``low_water_bytes`` more have arrived.
        Raises ``BlockingIOError`` when more has yet to come, ``HeldBack``, ``OSError``, and ``WireError`` for a bad
        size or position."""
        if not self._header:
            while self._prefix_filled < PREFIX_BYTES:
                self._prefix_filled += self._read([self._prefix[self._prefix_filled :]])
            size = int.from_bytes(self._prefix[:_SIZE_BYTES], "big")
            is_shared, size = bool(size & _IS_POSITION), size & ~_IS_POSITION
            limit = TAG_BYTES if self.link is None else MAX_CHUNK_BYTES + TAG_BYTES
            if not TAG_BYTES <= size <= limit:
                raise WireError(f"a bulk frame of {size} bytes; allowed are {TAG_BYTES} to {limit}")
            self._header, self._prefix_filled = bytes(self._prefix[_SIZE_BYTES:]), 0
            self._shared_bytes = size if is_shared else 0
            size = _POSITION_BYTES if is_shared else size
            if len(self._body) < size:
                self._body = memoryview(bytearray(size))
            self._body_bytes = self._body_left = size
        while self._body_left:
            rest = self._body[self._body_bytes - self._body_left : self._body_bytes]
            try:
                got = self._read([rest, self._prefix])
            except BlockingIOError:
                self._set_low_water(min(self._body_left, low_water_bytes))
                raise
            self._prefix_filled = max(0, got - self._body_left)
            self._body_left -= min(got, self._body_left)
        self._set_low_water(1)
        header, self._header = self._header, b""
        body = self._body[: self._body_bytes]
        return header, self._find_shared(body) if self._shared_bytes else body

    def _find_shared(self, position: memoryview) -> memoryview:
        memory = None if self.link is None else self.link.memory
        if memory is None:
            raise WireError("a position in shared memory, on a link without shared memory")
        self._lent = memory.reader
        return self._lent.find(int.from_bytes(position, "big"), self._shared_bytes)

    def release(self) -> None:
        """Give back the memory of the last received frame."""
        if self._lent is not None:
            self._lent.free()
            self._lent = None

    def _set_low_water(self, size: int) -> None:
        if size != self._low_water_bytes:
            self._low_water_bytes = size
            if _HAS_LOW_WATER:
                self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, size)

    def _read(self, buffers: list[memoryview]) -> int:
        allowed = self._download.allowed_bytes(time.monotonic())
        if allowed is not None:
            if not allowed:
                raise HeldBack
            buffers = _first_bytes(buffers, allowed)
        if hasattr(self.socket, "recvmsg_into"):
            got = self.socket.recvmsg_into(buffers)[0]
        else:  # Windows
            got = self.socket.recv_into(buffers[0])
        if got == 0:
            raise ConnectionResetError("closed by the other side")
        self.received_bytes += got
        self._download.count_data(got)
        return got

    def seal(self, link: Link, frame: Frame) -> int:
        """Seal a frame for sending; returns its size. The previous frame must have been sent."""
        header = link.sealed.next_header(frame.stream, frame.chunk, frame.scope, frame.kind)
        size = frame.payload.nbytes + TAG_BYTES
        if size >= _MIN_SHARED_BYTES and self._seal_in_shared_memory(link, header, frame.payload):
            return PREFIX_BYTES + size
        if len(self._sealed) < PREFIX_BYTES + size:
            self._sealed = bytearray(PREFIX_BYTES + size)
        sealed = memoryview(self._sealed)[: PREFIX_BYTES + size]
        sealed[:_SIZE_BYTES] = size.to_bytes(_SIZE_BYTES, "big")
        sealed[_SIZE_BYTES:PREFIX_BYTES] = header
        link.sealed.seal(header, frame.payload, sealed[PREFIX_BYTES:])
        self._unsent = sealed
        return PREFIX_BYTES + size

    def _seal_in_shared_memory(self, link: Link, header: bytes, payload: memoryview) -> bool:
        """Seal a frame in shared memory if there is room. Positions keep their order by using one connection only."""
        memory, size = link.memory, payload.nbytes + TAG_BYTES
        if memory is None or not memory.is_shared or self is not link.connections[0]:
            return False
        place = memory.writer.reserve(size)
        if place is None:
            return False
        link.sealed.seal(header, payload, place.memory)
        length = (_IS_POSITION | size).to_bytes(_SIZE_BYTES, "big")
        self._unsent = memoryview(length + header + place.start.to_bytes(_POSITION_BYTES, "big"))
        return True

    def send(self) -> None:
        """Send the rest of the last frame. Raises ``BlockingIOError``, ``HeldBack``, ``OSError``."""
        while self._unsent:
            allowed = self._upload.allowed_bytes(time.monotonic())
            if allowed == 0:
                raise HeldBack
            sent = self.socket.send(self._unsent[:allowed])
            self._upload.count_data(sent)
            self._unsent = self._unsent[sent:]


def _first_bytes(buffers: list[memoryview], most: int) -> list[memoryview]:
    """Return the parts of the buffers that ``most`` bytes fill."""
    parts = []
    for buffer in buffers:
        parts.append(buffer[:most])
        most -= parts[-1].nbytes
    return [part for part in parts if part.nbytes]
