"""The guard follows connections to its own port only."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.swarm.network import HOST

from shoal.swarm.transport.limits.caller_guard import CallerGuard, _caller
from shoal.swarm.transport.limits.caller_limits import MEMBER_BACKLOG_BYTES
from shoal.swarm.transport.limits.origins import Origins
from shoal.swarm.transport.tcp.sockets import machine_received_bytes


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


def test_what_members_send_is_looked_at_as_soon_as_this_machine_has_received_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[int | None] = [10**12]
    monkeypatch.setattr("shoal.swarm.transport.limits.caller_guard.machine_received_bytes", lambda: received[0])

    async def main() -> None:
        guard = CallerGuard(2**20, lambda key: True, Origins())
        assert not guard._is_quiet(), "before the first look"
        guard._received_bytes = 10**12
        received[0] = 10**12 + MEMBER_BACKLOG_BYTES - 1
        assert guard._is_quiet()
        received[0] += 1
        assert not guard._is_quiet(), "all of it may be one member's"
        guard._received_bytes, guard._callers.waiting_bytes = received[0], MEMBER_BACKLOG_BYTES // 2
        assert guard._is_quiet()
        received[0] += MEMBER_BACKLOG_BYTES // 2
        assert not guard._is_quiet(), "it is added to what had not been read then"
        received[0] = 10**9
        assert not guard._is_quiet(), "an interface has gone, and its count with it"
        received[0] = None
        assert not guard._is_quiet(), "unknown"
        guard.ended.cancel()

    asyncio.run(main())


def test_this_machine_counts_what_it_receives() -> None:
    before = machine_received_bytes()
    with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()) as caller:
        called = server.accept()[0]
        caller.sendall(bytes(2**16))
        caller.shutdown(socket.SHUT_WR)
        while called.recv(2**16):
            pass
        called.close()
    after = machine_received_bytes()
    assert (before is None) == (after is None)
    assert before is None or after is None or after - before >= 2**16
