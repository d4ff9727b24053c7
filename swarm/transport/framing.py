"""Bulk frames on a TCP connection: a length, a header, a sealed body; received and sent without blocking or copying.

Of a link's shared memory only the place of a body goes over the connection, and the length says so.
"""

from __future__ import annotations

import socket as sockets

from shoal.swarm.errors import WireError
from shoal.swarm.transport.frame_crypto import HEADER_BYTES, TAG_BYTES
from shoal.swarm.transport.frames import Frame
from shoal.swarm.transport.links import Link
from shoal.swarm.transport.shared_memory import RingReader

MAX_CHUNK_BYTES = 2**22 + 2**16
"""Of one chunk's payload: 4 MiB (2**20 float32, 2**22 int8 elements) and some room for scales and its header."""

_SIZE_BYTES = 4
PREFIX_BYTES = _SIZE_BYTES + HEADER_BYTES
"""In front of every sealed body: its length, then its header."""

_IS_PLACE = 2**31
"""In a length: what follows the header is where the body begins in shared memory."""

_PLACE_BYTES = 8
_WORTH_A_PLACE_BYTES = 2**14

READ_BYTES = 2**14
"""Of a body as much has to have arrived before we look again: a packet at a time costs more than opening it does. With
more, Linux makes room for it at once and lets the window grow no further."""


class Connection:
    """One data socket, which must not block: the frame that is being received, and the one that is being sent."""

    def __init__(self, socket: sockets.socket, link: Link | None, since_s: float) -> None:
        """``link``: None until the other side has said which one it is."""
        self.socket = socket
        self.link = link
        self.since_s = since_s
        self.is_blocked = False
        self.received_bytes = 0
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._prefix_filled = 0
        self._header = b""
        self._body = memoryview(bytearray(TAG_BYTES))
        self._body_bytes = self._body_left = 0
        self._placed_bytes = 0
        self._lent: RingReader | None = None
        self._awaited_bytes = 1
        self._sealed = bytearray()
        self._unsent = memoryview(b"")

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def receive(self, low_water_bytes: int = READ_BYTES) -> tuple[bytes, memoryview]:
        """The next frame's header and sealed body, good until ``release``, which comes before the next call; until
        there is a frame, the socket is readable when so much more of it has come.

        Raises ``BlockingIOError`` when more has yet to come, ``OSError``, ``WireError`` for a frame of no good size or
        place."""
        if not self._header:
            while self._prefix_filled < PREFIX_BYTES:
                self._prefix_filled += self._read([self._prefix[self._prefix_filled :]])
            size = int.from_bytes(self._prefix[:_SIZE_BYTES], "big")
            is_placed, size = bool(size & _IS_PLACE), size & ~_IS_PLACE
            limit = TAG_BYTES if self.link is None else MAX_CHUNK_BYTES + TAG_BYTES
            if not TAG_BYTES <= size <= limit:
                raise WireError(f"a bulk frame of {size} bytes")
            self._header, self._prefix_filled = bytes(self._prefix[_SIZE_BYTES:]), 0
            self._placed_bytes = size if is_placed else 0
            size = _PLACE_BYTES if is_placed else size
            if len(self._body) < size:
                self._body = memoryview(bytearray(size))
            self._body_bytes = self._body_left = size
        while self._body_left:
            rest = self._body[self._body_bytes - self._body_left : self._body_bytes]
            try:
                got = self._read([rest, self._prefix])
            except BlockingIOError:
                self._await(min(self._body_left, low_water_bytes))
                raise
            self._prefix_filled = max(0, got - self._body_left)
            self._body_left -= min(got, self._body_left)
        self._await(1)
        header, self._header = self._header, b""
        body = self._body[: self._body_bytes]
        return header, self._find(body) if self._placed_bytes else body

    def _find(self, place: memoryview) -> memoryview:
        memory = None if self.link is None else self.link.memory
        if memory is None:
            raise WireError("a place in memory that is not shared")
        self._lent = memory.reader
        return self._lent.find(int.from_bytes(place, "big"), self._placed_bytes)

    def release(self) -> None:
        """The last frame is not needed any more."""
        if self._lent is not None:
            self._lent.free()
            self._lent = None

    def _await(self, size: int) -> None:
        """The socket is readable from so many bytes on."""
        if size != self._awaited_bytes:
            self._awaited_bytes = size
            self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, size)

    def _read(self, places: list[memoryview]) -> int:
        got = self.socket.recvmsg_into(places)[0]
        if got == 0:
            raise ConnectionResetError("closed by the other side")
        self.received_bytes += got
        return got

    def put(self, link: Link, unsealed: Frame) -> int:
        """Seal a frame for sending; returns its bytes. Everything before must have been sent."""
        header = link.sealed.next_header(unsealed.stream, unsealed.chunk, unsealed.scope, unsealed.kind)
        size = unsealed.payload.nbytes + TAG_BYTES
        if size >= _WORTH_A_PLACE_BYTES and self._put_in_memory(link, header, unsealed.payload):
            return PREFIX_BYTES + size
        if len(self._sealed) < PREFIX_BYTES + size:
            self._sealed = bytearray(PREFIX_BYTES + size)
        frame = memoryview(self._sealed)[: PREFIX_BYTES + size]
        frame[:_SIZE_BYTES] = size.to_bytes(_SIZE_BYTES, "big")
        frame[_SIZE_BYTES:PREFIX_BYTES] = header
        link.sealed.seal(header, unsealed.payload, frame[PREFIX_BYTES:])
        self._unsent = frame
        return PREFIX_BYTES + size

    def _put_in_memory(self, link: Link, header: bytes, payload: memoryview) -> bool:
        """Seal it there, if there is room; the places of one direction go over one connection, in their order."""
        memory, size = link.memory, payload.nbytes + TAG_BYTES
        if memory is None or not memory.is_shared or self is not link.connections[0]:
            return False
        place = memory.writer.reserve(size)
        if place is None:
            return False
        link.sealed.seal(header, payload, place.memory)
        length = (_IS_PLACE | size).to_bytes(_SIZE_BYTES, "big")
        self._unsent = memoryview(length + header + place.start.to_bytes(_PLACE_BYTES, "big"))
        return True

    def send(self) -> None:
        """Send what is left of the last frame. Raises ``BlockingIOError``, ``OSError``."""
        while self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
