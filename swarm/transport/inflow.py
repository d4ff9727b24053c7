"""Limits on received control bytes that wait to be read, by connection and in all.

libzmq's own limit, a high-water mark, must not be used: a connection that is reset while libzmq has stopped reading it
at the mark ends the process (``!_io_error``; libzmq #3937, #4364, #4767) as soon as a heartbeat falls due, or a PING
lies in what was read before. Without a mark libzmq reads on, and memory has to be bounded here: the kernel says how
many bytes a connection has received, whatever they are, and parts of a message that never ends count as well.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shoal.swarm.transport.sockets import borrowed, inode_of, received_bytes, shut_down

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 2**24
"""Of one connection: two of the largest messages. Of all together no more either, but for ``SHARE_BYTES`` for each: the
one with the most is closed first. In libzmq's memory the smallest messages take five times what they do on the wire."""

SHARE_BYTES = 2**18
"""Bytes that each member of a full run may report at the same moment, some times over."""

_LOOK_S = 0.05
"""Between two looks at up to ``_MANY`` connections, and longer for more: a gigabit link brings 6 MB in that time."""

_MANY = 256

_FRAME_BYTES = 80
"""Of a message on the wire beside its content: CURVE, framing, acknowledgements of the handshake."""


@dataclass
class _Connection:
    inode: int | None
    """Tells it from any other connection that has the same descriptor later."""
    owner: object
    read_bytes: int = 0


class Inflow:
    """All connections of one process, by descriptor. They belong to libzmq: here they are shut down, never closed."""

    def __init__(self) -> None:
        self._open: dict[int, _Connection] = {}

    @property
    def pause_s(self) -> float:
        """Until the next ``look``."""
        return _LOOK_S * max(1.0, len(self._open) / _MANY)

    def opened(self, descriptor: int, owner: object) -> None:
        """A connection was made; ``owner``: whoever says later that it is closed."""
        self._open[descriptor] = _Connection(inode_of(descriptor), owner)

    def closed(self, descriptor: int, owner: object) -> None:
        """It is gone, unless the number is of another owner's connection by now."""
        connection = self._open.get(descriptor)
        if connection is not None and connection.owner is owner:
            del self._open[descriptor]

    def read(self, descriptor: int, size_bytes: int) -> None:
        """A message that came over it has been taken."""
        connection = self._open.get(descriptor)
        if connection is not None:
            connection.read_bytes += size_bytes + _FRAME_BYTES

    def look(self) -> None:
        """Shut down connections over which more has come than may wait."""
        waiting: dict[int, int] = {}
        for descriptor, connection in self._open.items():
            received = _received_bytes(descriptor)
            # What frames take was estimated: nothing is saved up by that for later.
            connection.read_bytes = min(connection.read_bytes, received)
            if (rest := received - connection.read_bytes) > 0:
                waiting[descriptor] = rest
        total, most = sum(waiting.values()), MOST_WAITING_BYTES + SHARE_BYTES * len(self._open)
        for descriptor, rest in sorted(waiting.items(), key=lambda one: -one[1]):
            if rest <= MOST_WAITING_BYTES and total <= most:
                break
            log.warning("closing a connection that sends faster than it can be read: %d bytes wait", rest)
            self.shut_down(descriptor, self._open[descriptor].owner)
            total -= rest

    def shut_down(self, descriptor: int, owner: object) -> None:
        """End a connection, if it still is the one that this owner has opened; libzmq then makes another."""
        connection = self._open.get(descriptor)
        if connection is not None and connection.owner is owner:
            del self._open[descriptor]
            if connection.inode is not None:
                shut_down(descriptor, connection.inode)


def _received_bytes(descriptor: int) -> int:
    try:
        with borrowed(descriptor) as socket:
            return received_bytes(socket)
    except OSError:  # closed meanwhile
        return 0
