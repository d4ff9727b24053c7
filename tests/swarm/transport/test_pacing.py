import asyncio
import random
import socket as sockets
import struct
import sys
import threading
import time

import pytest
from tests.swarm.network import HOST, STATE, Sink, Source, fetch, swarm, until

from shoal.swarm.transport.bulk.data_connection import DataConnection
from shoal.swarm.transport.bulk.link import Link
from shoal.swarm.transport.bulk.pacing import TICK_S, Pacing, Uplink, divide_pace
from shoal.swarm.transport.tcp.sockets import acked_bytes, pace, renew_model, shortest_round_trip_s, tune_stream

MBIT = 1e6


def a_round(uplink: Uplink, link_bps: float, seconds: float = 3.0, noise: float = 0.0, seed: int = 0) -> None:
    """The link carries what it can, or its pace if that is less."""
    draw, arrived, now_s = random.Random(seed), 0.0, 100.0
    while now_s < 100.0 + seconds:
        uplink.record(now_s, int(arrived), is_waiting=True)
        rate = min(link_bps, uplink.pace_bps or link_bps) * (1 - noise * draw.random())
        arrived += rate / 8 * TICK_S
        now_s += TICK_S
    uplink.end_round()


def settled(link_bps: float, noise: float = 0.0) -> Uplink:
    uplink = Uplink()
    for number in range(6):
        a_round(uplink, link_bps, noise=noise, seed=number)
    return uplink


def pace_of(uplink: Uplink) -> float:
    assert uplink.pace_bps is not None
    return uplink.pace_bps


def test_nothing_is_paced_before_a_round_has_shown_what_the_link_carries() -> None:
    uplink = Uplink()
    assert uplink.pace_bps is None
    a_round(uplink, 20 * MBIT)
    assert uplink.pace_bps is not None


@pytest.mark.parametrize("link_bps", [0.3 * MBIT, 20 * MBIT, 500 * MBIT])
def test_pace_settles_just_above_what_the_link_carries(link_bps: float) -> None:
    uplink, paces = settled(link_bps), []
    for _ in range(33):
        a_round(uplink, link_bps)
        paces.append(uplink.pace_bps)
    assert all(0.99 * link_bps <= pace <= 1.05 * link_bps for pace in paces if pace is not None)
    assert paces.count(None) == 3, "now and then TCP is left alone"


def test_what_gets_lost_does_not_wear_the_pace_down() -> None:
    uplink, paces = settled(20 * MBIT, noise=0.06), []
    for number in range(200):
        a_round(uplink, 20 * MBIT, noise=0.06, seed=number)
        paces.append(uplink.pace_bps or 20 * MBIT)
    assert min(paces) >= 0.85 * 20 * MBIT
    assert max(paces) <= 1.05 * 20 * MBIT


@pytest.mark.parametrize("seen_bps", [5 * MBIT, 18.9 * MBIT])
def test_one_bad_round_changes_nothing(seen_bps: float) -> None:
    uplink = settled(20 * MBIT)
    for _ in range(2):
        a_round(uplink, seen_bps)
        assert pace_of(uplink) >= 20 * MBIT
        for _ in range(2):
            a_round(uplink, 20 * MBIT)
    a_round(uplink, seen_bps)
    a_round(uplink, seen_bps)
    assert 0.9 * 20 * MBIT <= pace_of(uplink) <= 0.97 * 20 * MBIT, "two are no chance"


def test_the_second_round_may_have_less_than_the_first() -> None:
    """Both go without a right pace: what either has shown the link can carry."""
    uplink = Uplink()
    a_round(uplink, 19 * MBIT)
    a_round(uplink, 17 * MBIT)
    assert pace_of(uplink) >= 19 * MBIT


def test_a_link_that_got_slower_is_known_for_it_after_a_while() -> None:
    uplink, rounds = settled(20 * MBIT), 0
    while (uplink.pace_bps or 20 * MBIT) > 1.05 * 10 * MBIT:
        a_round(uplink, 10 * MBIT)
        rounds += 1
    assert rounds <= 20


def test_a_link_that_got_faster_is_soon_used() -> None:
    uplink = settled(5 * MBIT)
    rounds = 0
    while (uplink.pace_bps or 0.0) < 20 * MBIT:
        a_round(uplink, 20 * MBIT)
        rounds += 1
    assert rounds <= 8
    for _ in range(3):
        a_round(uplink, 20 * MBIT)
    assert pace_of(uplink) <= 1.05 * 20 * MBIT


def test_a_link_that_is_not_too_fast_any_more_is_paced() -> None:
    uplink = settled(3e9)
    for _ in range(3):
        a_round(uplink, 20 * MBIT)
    assert pace_of(uplink) <= 1.5 * 20 * MBIT


def test_only_moments_in_which_more_was_waiting_tell_of_the_link() -> None:
    uplink, arrived = Uplink(), 0
    for step in range(100):  # two tenths of a second of work, and then a pause
        uplink.record(step * TICK_S, arrived, is_waiting=step % 4 < 2)
        arrived += 1000
    uplink.end_round()
    assert uplink.pace_bps is None


def test_links_that_are_faster_than_processors_are_not_paced() -> None:
    assert settled(3e9).pace_bps is None


# Who gets how much -----------------------------------------------------------------------------------------

A, B, C = b"a", b"b", b"c"
THIRDS = {A: 1 / 3, B: 1 / 3, C: 1 / 3}


@pytest.mark.parametrize("link_bps", [2 * MBIT, 100 * MBIT, 900 * MBIT])
def test_what_arrives_lies_for_a_moment_only(link_bps: float) -> None:
    uplink = Uplink()
    assert uplink.sleep_s == 0.0
    a_round(uplink, link_bps)
    assert 0 < uplink.sleep_s <= 0.003
    assert uplink.sleep_s * link_bps / 8 <= 2**17 / 4


def test_a_link_that_is_faster_than_processors_gives_no_rest() -> None:
    uplink = Uplink()
    a_round(uplink, 5e9)
    assert uplink.sleep_s == 0.0


def test_all_is_shared_by_those_to_whom_there_is_more_to_send() -> None:
    arrived = {A: 1000, B: 1000, C: 1000}
    assert divide_pace(90 * MBIT, THIRDS, arrived, [A, B, C]) == pytest.approx(dict.fromkeys(THIRDS, 30 * MBIT))
    assert divide_pace(90 * MBIT, THIRDS, arrived, [A, B]) == pytest.approx({A: 45 * MBIT, B: 45 * MBIT, C: 30 * MBIT})
    uneven = {A: 0.5, B: 0.3, C: 0.2}
    given = divide_pace(90 * MBIT, uneven, {A: 500, B: 300, C: 200}, [A, B, C])
    assert given == pytest.approx({key: share * 90 * MBIT for key, share in uneven.items()})


def test_a_connection_that_stood_still_makes_it_up_and_the_others_give_it_what_they_had_more() -> None:
    arrived = dict.fromkeys(THIRDS, 3750000.0)  # of a second, at 30 Mbit/s
    arrived[C] -= 0.3 * 3.75e6
    for _ in range(200):
        given = divide_pace(90 * MBIT, THIRDS, {key: int(size) for key, size in arrived.items()}, [A, B, C])
        assert sum(given.values()) == pytest.approx(90 * MBIT)
        arrived = {key: arrived[key] + given[key] * TICK_S / 8 for key in arrived}
    assert max(arrived.values()) - min(arrived.values()) < 1e-3 * min(arrived.values())


def test_a_way_that_is_slower_than_our_link_takes_nothing_from_the_others() -> None:
    given = divide_pace(90 * MBIT, THIRDS, {A: 11_250_000, B: 11_250_000, C: 1_000_000}, [A, B, C])
    assert given == pytest.approx(dict.fromkeys(THIRDS, 30 * MBIT))


# On real sockets ------------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces connections one by one")


def limit_bytes_s(socket: sockets.socket) -> int:
    return int(struct.unpack("I", socket.getsockopt(sockets.SOL_SOCKET, 47, 4))[0])


@on_linux
def test_a_paced_connection_is_slower() -> None:
    with sockets.create_server((HOST, 0)) as server, sockets.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            pace(one, 8 * MBIT)
            assert 1e6 <= limit_bytes_s(one) <= 1.1e6
            one.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(other.recv(2**16))
            while acked_bytes(one) < 100_000:
                time.sleep(0.001)
            pace(one, None)
            assert limit_bytes_s(one) == 2**32 - 1


def unsent_bytes(socket: sockets.socket) -> int:
    """What may wait in the kernel to be sent."""
    return socket.getsockopt(sockets.IPPROTO_TCP, 25)


@on_linux
@pytest.mark.parametrize("bps", [0.1 * MBIT, 3 * MBIT, 100 * MBIT])
def test_a_request_does_not_wait_long_for_what_is_before_it(bps: float) -> None:
    """On a slow connection what usually waits there would take a third of a second."""
    with sockets.create_server((HOST, 0)) as server, sockets.create_connection(server.getsockname()) as one:
        tune_stream(one)
        usual = unsent_bytes(one)
        pace(one, bps)
        assert 8192 <= unsent_bytes(one) <= usual
        assert unsent_bytes(one) == 8192 or 8 * unsent_bytes(one) / bps < 0.055
        assert (unsent_bytes(one) < usual) == (bps < 10 * MBIT)
        pace(one, None)
        assert unsent_bytes(one) == usual == 2**17


def bbr_bytes_s(socket: sockets.socket) -> int:
    """What BBR has seen the way of a connection carry (``tcp_bbr_info``)."""
    return int(struct.unpack("Q", socket.getsockopt(sockets.IPPROTO_TCP, 26, 8))[0])


def governs(socket: sockets.socket) -> bytes:
    """The name of its congestion control."""
    return socket.getsockopt(sockets.IPPROTO_TCP, 13, 16).rstrip(b"\0")


@on_linux
def test_bbr_learns_the_way_anew_and_others_are_left_alone() -> None:
    with sockets.create_server((HOST, 0)) as server, sockets.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            one.setsockopt(sockets.IPPROTO_TCP, 13, b"reno")
            renew_model(one)
            assert governs(one) == b"reno"
            try:
                one.setsockopt(sockets.IPPROTO_TCP, 13, b"bbr")
            except OSError:
                pytest.skip("this kernel has no BBR, or does not allow it")
            size = 2**24
            reader = threading.Thread(target=lambda: [other.recv(2**20, sockets.MSG_WAITALL) for _ in range(16)])
            reader.start()
            one.sendall(bytes(size))
            reader.join()
            while acked_bytes(one) < size:
                time.sleep(0.001)
            assert bbr_bytes_s(one) > 0
            renew_model(one)
            assert governs(one) == b"bbr"
            assert bbr_bytes_s(one) == 0


def test_closed_sockets_and_others_are_left_alone() -> None:
    closed = sockets.socket()
    closed.close()
    pace(closed, 1e6)
    renew_model(closed)
    assert acked_bytes(closed) == shortest_round_trip_s(closed) == 0
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as datagrams:
        assert acked_bytes(datagrams) == shortest_round_trip_s(datagrams) == 0


@on_linux
def test_every_connection_of_a_round_gets_its_share() -> None:
    async def scenario() -> None:
        async with swarm() as (a, b):
            a.node.connections_per_link = 2
            source = Source(4)
            b.node.publish(STATE, source)
            await fetch(a, b, Sink(), range(4))
            (link,) = a.node._data._links.values()
            pacing = Pacing(local_trip_s=0.0)
            for number in range(2):  # one round to learn, one to pace
                pacing.begin_round({link.remote_key: 0.25})
                for step in range(20):
                    pacing._uplink.record(step * TICK_S, step * 125_000, is_waiting=True)  # 10 Mbit/s
                pacing.update(1000.0 * number, {link.sealed.link: link})
                assert (pacing.sleep_s > 0.0) == (number > 0)
            limits = {limit_bytes_s(connection.socket) for connection in link.connections}
            assert len(link.connections) == 2
            (limit,) = limits
            assert 10 * MBIT / 8 * 0.25 / 2 <= limit <= 2 * 10 * MBIT / 8 * 0.25 / 2
            pacing.begin_round({})
            assert pacing.sleep_s == 0.0
            assert {limit_bytes_s(connection.socket) for connection in link.connections} == {2**32 - 1}

    asyncio.run(scenario())


@on_linux
def test_ways_within_a_house_are_not_paced() -> None:
    """However slow they were: their ends have been busy."""

    async def scenario() -> None:
        async with swarm() as (a, b):
            b.node.publish(STATE, Source(4))
            await fetch(a, b, Sink(), range(4))
            (link,) = b.node._data._links.values()
            pacing = Pacing()
            pacing.begin_round({link.remote_key: 1.0})
            for step in range(20):
                pacing._uplink.record(step * TICK_S, step * 125_000, is_waiting=True)  # 10 Mbit/s
            pacing.begin_round({link.remote_key: 1.0})
            assert pacing._uplink.pace_bps is not None
            pacing.update(1000.0, {link.sealed.link: link})
            (connection,) = link.connections
            assert 0 < shortest_round_trip_s(connection.socket) < 0.001
            assert limit_bytes_s(connection.socket) == 2**32 - 1
            assert pacing.sleep_s == 0.0

    asyncio.run(scenario())


@on_linux
def test_a_thread_that_rests_reads_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(Pacing, "sleep_s", 0.002)
    monkeypatch.setattr("shoal.swarm.transport.bulk.io_thread.time.sleep", rests.append)
    marks: list[int] = []
    receive = DataConnection.receive

    def marked(connection: DataConnection, low_water_bytes: int) -> tuple[bytes, memoryview]:
        marks.append(low_water_bytes)
        return receive(connection, low_water_bytes)

    monkeypatch.setattr(DataConnection, "receive", marked)

    async def scenario() -> None:
        async with swarm() as (a, b):
            b.node.publish(STATE, Source(4))
            await fetch(a, b, Sink(), range(4))

    asyncio.run(scenario())
    assert set(rests) == {0.002}
    assert set(marks) == {1}


@on_linux
def test_sharing_reaches_the_thread_that_moves_the_bytes() -> None:
    async def scenario() -> None:
        async with swarm() as (a, b):
            b.node.publish(STATE, Source(4))
            await fetch(a, b, Sink(), range(4))
            pacing = b.node._data._io_thread._pacing
            link: Link = next(iter(b.node._data._links.values()))
            b.node.share_uplink({a.peer: 1.0, "nobody": 1.0})
            await until(lambda: bool(pacing._acked))
            assert set(pacing._acked) == set(link.connections)
            b.node.share_uplink({})
            await until(lambda: not pacing.is_on)

    asyncio.run(scenario())
