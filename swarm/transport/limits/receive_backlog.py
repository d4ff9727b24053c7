"""Limits on control bytes that were received over dialed connections and wait to be read.

libzmq's own limit, the high-water mark, must not be used: a connection that is reset while libzmq has stopped reading
it at the mark ends the process (``!_io_error``; libzmq #3937, #4364, #4767) as soon as a heartbeat is due, or if a PING
is in the data already read. Without the mark libzmq always reads on, so this module bounds the memory: the kernel
reports how many bytes a connection has received, whatever they are, including parts of a message that never ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shoal.swarm.transport.limits.caller_limits import FRAME_BYTES, excessive_backlogs
from shoal.swarm.transport.tcp.sockets import inode_of, received_bytes_on, shut_down

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 2**24
"""For one connection: two of the largest messages. The same for all together, plus ``SHARE_BYTES`` for each; the one
with the most is closed first. In libzmq's memory the smallest messages take five times their size on the wire."""

SHARE_BYTES = 2**18
"""Enough for several reports of each member of a full run at the same moment."""

_PERIOD_S = 0.05
"""Between two checks of up to ``_CONNECTIONS`` connections, longer for more. A gigabit link brings 6 MB meanwhile."""

_CONNECTIONS = 256


@dataclass
class _Connection:
    inode: int | None
    """Tells the connection from a later one with the same descriptor."""
    owner: object
    read_bytes: int = 0


class ReceiveBacklog:
    """The dialed connections of one process, by descriptor. libzmq owns them: they are shut down here, not closed."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}

    @property
    def period_s(self) -> float:
        """Time between two checks."""
        return _PERIOD_S * max(1.0, len(self._connections) / _CONNECTIONS)

    def add(self, descriptor: int, owner: object) -> None:
        """Add a connection; ``owner`` is the object that will remove it."""
        self._connections[descriptor] = _Connection(inode_of(descriptor), owner)

    def remove(self, descriptor: int, owner: object) -> _Connection | None:
        """Remove an owner's connection, unless the descriptor belongs to another owner's by now."""
        connection = self._connections.get(descriptor)
        return self._connections.pop(descriptor) if connection is not None and connection.owner is owner else None

    def count_read(self, descriptor: int, size_bytes: int) -> None:
        """Count a message that was taken from a connection."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.read_bytes += size_bytes + FRAME_BYTES

    def check(self) -> None:
        """Shut down the connections with excessive backlogs."""
        waiting: dict[int, int] = {}
        for descriptor, connection in self._connections.items():
            received = 0 if connection.inode is None else received_bytes_on(descriptor, connection.inode)
            # The size of framing is an estimate, which must not add up to an allowance.
            connection.read_bytes = min(connection.read_bytes, received)
            waiting[descriptor] = received - connection.read_bytes
        most_bytes = MAX_WAITING_BYTES + SHARE_BYTES * len(self._connections)
        for descriptor in excessive_backlogs(waiting, MAX_WAITING_BYTES, most_bytes):
            log.warning("closing a connection that sends faster than it is read: %d bytes wait", waiting[descriptor])
            self.shut_down(descriptor, self._connections[descriptor].owner)

    def shut_down(self, descriptor: int, owner: object) -> None:
        """End an owner's connection; libzmq then connects anew."""
        connection = self.remove(descriptor, owner)
        if connection is not None and connection.inode is not None:
            shut_down(descriptor, connection.inode)
