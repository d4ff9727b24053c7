"""Bulk frames on a TCP connection: a length, a header, a sealed body; received and sent without blocking or copying."""

from __future__ import annotations

import socket as sockets

from shoal.swarm.errors import WireError
from shoal.swarm.frames import Frame
from shoal.swarm.links import Link
from shoal.swarm.sealing import HEADER_BYTES, TAG_BYTES

MAX_CHUNK_BYTES = 2**22 + 2**16
"""Of one chunk's payload: 4 MiB (2**20 float32, 2**22 int8 elements) and some room for scales and its header."""

_SIZE_BYTES = 4
PREFIX_BYTES = _SIZE_BYTES + HEADER_BYTES
"""In front of every sealed body: its length, then its header."""

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
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._prefix_filled = 0
        self._header = b""
        self._body = memoryview(bytearray(TAG_BYTES))
        self._body_bytes = self._body_left = 0
        self._awaited_bytes = 1
        self._sealed = bytearray()
        self._unsent = memoryview(b"")

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def receive(self, low_water_bytes: int = READ_BYTES) -> tuple[bytes, memoryview]:
        """The next frame's header and sealed body, good until the next call; until there is one, the socket is readable
        when so much more of it has come.

        Raises ``BlockingIOError`` when more has yet to come, ``OSError``, ``WireError`` for a frame of no good size."""
        if not self._header:
            while self._prefix_filled < PREFIX_BYTES:
                self._prefix_filled += self._read([self._prefix[self._prefix_filled :]])
            size = int.from_bytes(self._prefix[:_SIZE_BYTES], "big")
            limit = TAG_BYTES if self.link is None else MAX_CHUNK_BYTES + TAG_BYTES
            if not TAG_BYTES <= size <= limit:
                raise WireError(f"a bulk frame of {size} bytes")
            self._header, self._prefix_filled = bytes(self._prefix[_SIZE_BYTES:]), 0
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
        return header, self._body[: self._body_bytes]

    def _await(self, size: int) -> None:
        """The socket is readable from so many bytes on."""
        if size != self._awaited_bytes:
            self._awaited_bytes = size
            self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, size)

    def _read(self, places: list[memoryview]) -> int:
        got = self.socket.recvmsg_into(places)[0]
        if got == 0:
            raise ConnectionResetError("closed by the other side")
        return got

    def put(self, link: Link, unsealed: Frame) -> int:
        """Seal a frame for sending; returns its bytes. Everything before must have been sent."""
        header = link.sealed.next_header(unsealed.stream, unsealed.chunk, unsealed.scope, unsealed.kind)
        size = unsealed.payload.nbytes + TAG_BYTES
        if len(self._sealed) < PREFIX_BYTES + size:
            self._sealed = bytearray(PREFIX_BYTES + size)
        frame = memoryview(self._sealed)[: PREFIX_BYTES + size]
        frame[:_SIZE_BYTES] = size.to_bytes(_SIZE_BYTES, "big")
        frame[_SIZE_BYTES:PREFIX_BYTES] = header
        link.sealed.seal(header, unsealed.payload, frame[PREFIX_BYTES:])
        self._unsent = frame
        return PREFIX_BYTES + size

    def send(self) -> None:
        """Send what is left of the last frame. Raises ``BlockingIOError``, ``OSError``."""
        while self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
