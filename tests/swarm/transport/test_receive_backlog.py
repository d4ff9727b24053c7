"""Dialed connections whose received bytes pile up unread are shut down, those with the most first."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from tests.swarm.network import HOST

from shoal.swarm.transport.limits import receive_backlog
from shoal.swarm.transport.limits.receive_backlog import ReceiveBacklog

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a connection has received")


class Connections:
    """Connections of which the one end is looked after, as if it were libzmq's."""

    def __init__(self) -> None:
        self.backlog = ReceiveBacklog()
        self._listening = socket.create_server((HOST, 0))
        self.ends: list[tuple[socket.socket, socket.socket]] = []

    def open(self, waiting_bytes: int) -> socket.socket:
        there = socket.create_connection(self._listening.getsockname())
        here, _ = self._listening.accept()
        self.ends.append((there, here))
        self.backlog.add(here.fileno(), self)
        there.sendall(bytes(waiting_bytes))
        return here

    def is_open(self, here: socket.socket) -> bool:
        here.setblocking(False)
        try:
            while data := here.recv(2**16):
                del data
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self._listening.close()
        for there, here in self.ends:
            there.close()
            here.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setattr(receive_backlog, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(receive_backlog, "SHARE_BYTES", 250)
    return Connections()


@linux
def test_who_sends_more_than_may_wait_is_cut_off(connections: Connections) -> None:
    much, little, taken = connections.open(1001), connections.open(900), connections.open(5000)
    connections.backlog.count_read(taken.fileno(), 4900)
    connections.backlog.check()
    assert [connections.is_open(one) for one in (much, little, taken)] == [False, True, True]
    connections.close()


@linux
def test_of_many_the_one_with_the_most_is_cut_off_first(connections: Connections) -> None:
    several = [connections.open(size) for size in (700, 900, 600, 600)]
    connections.backlog.check()
    assert [connections.is_open(one) for one in several] == [True, False, True, True]
    connections.close()


@linux
def test_what_was_counted_too_much_is_not_saved_up(connections: Connections) -> None:
    one = connections.open(10)
    connections.backlog.count_read(one.fileno(), 10**6)
    connections.backlog.check()
    connections.ends[0][0].sendall(bytes(1001))
    connections.backlog.check()
    assert not connections.is_open(one)
    connections.close()


@linux
def test_another_connection_of_the_same_number_is_left_alone(connections: Connections) -> None:
    first = connections.open(10)
    number = first.detach()
    other_there = socket.create_connection(connections._listening.getsockname())
    other, _ = connections._listening.accept()
    os.dup2(other.fileno(), number)
    other_there.sendall(bytes(5000))
    connections.backlog.check()
    assert connections.is_open(other)
    for one in (other, other_there):
        one.close()
    os.close(number)
    connections.close()


@linux
def test_whose_connection_was_lost_ends_none_that_has_its_number_now(connections: Connections) -> None:
    """A channel's descriptor is known for a while after its connection has ended."""
    lost, table = object(), connections.backlog
    here = connections.open(10)
    table.remove(here.fileno(), lost)
    table.shut_down(here.fileno(), lost)
    assert connections.is_open(here)
    connections.ends[0][0].sendall(bytes(5000))
    table.check()
    assert not connections.is_open(here), "it is still looked after"
    connections.close()


def test_callers_of_a_closed_descriptor_do_no_harm() -> None:
    table = ReceiveBacklog()
    table.add(10**6, table)
    table.count_read(10**6, 5)
    table.check()
    table.remove(10**6, table)
    table.remove(10**6, table)
