"""The guard follows connections to its own port only."""

from __future__ import annotations

import socket

from tests.swarm.network import HOST

from shoal.swarm.transport.limits.caller_guard import _caller
from shoal.swarm.transport.limits.origins import Origins


def test_sockets_of_other_ports_are_no_callers() -> None:
    """By the time that the guard hears of a connection, its descriptor may be another socket's."""
    with (
        socket.create_server((HOST, 0)) as ours,
        socket.create_server((HOST, 0)) as other,
        socket.create_connection(ours.getsockname()),
        socket.create_connection(other.getsockname()),
        ours.accept()[0] as called,
        other.accept()[0] as elsewhere,
    ):
        port = ours.getsockname()[1]
        assert _caller(called.fileno(), port, Origins()) is not None
        assert _caller(elsewhere.fileno(), port, Origins()) is None
        assert _caller(elsewhere.fileno(), 0, Origins()) is not None, "while the port is not known"
