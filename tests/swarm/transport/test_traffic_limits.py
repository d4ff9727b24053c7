"""Limits on a process's traffic: the token buckets on a virtual clock, and real sockets that keep to them."""

import asyncio
import time

import pytest
from tests.swarm.network import STATE, Member, Sink, Source, fetch, run, swarm_of

from shoal.swarm.transport.limits.traffic_limits import RateLimit, TrafficLimits

MBIT = 1e6


def moved_in(limit: RateLimit, seconds: float, ask: int, control: int = 0) -> int:
    """Move data as fast as the limit allows, with ``control`` bytes of messages each 10 ms; returns its bytes."""
    moved, now_s = 0, 100.0
    for step in range(round(seconds * 100)):
        now_s = 100.0 + step / 100
        limit.count_control(control)
        while allowed := min(ask, limit.allowed_bytes(now_s) or 0):
            limit.count_data(allowed)
            moved += allowed
    return moved


def test_without_a_limit_all_may_move_and_is_counted() -> None:
    limit = RateLimit()
    limit.count_data(10**9)
    limit.count_control(10**6)
    assert limit.allowed_bytes(0.0) is None
    assert limit.wait_s(0.0) == 0.0
    assert limit.total_bytes == pytest.approx(1.036 * 1.001e9, rel=0.01)


@pytest.mark.parametrize("mbit", [0.1, 8, 40])
@pytest.mark.parametrize("ask", [1448, 2**17])
def test_as_much_moves_as_the_limit_says_with_headers(mbit: float, ask: int) -> None:
    bytes_s = mbit * MBIT / 8
    moved = moved_in(RateLimit(mbit * MBIT), 10.0, ask) * 1500 / 1448
    assert 10 * bytes_s * 0.98 <= moved <= 10 * bytes_s * 1.011 + 4096


def test_what_control_messages_take_is_missing_to_the_data() -> None:
    alone = moved_in(RateLimit(8 * MBIT), 10.0, 2**17)
    beside = moved_in(RateLimit(8 * MBIT), 10.0, 2**17, control=2000)  # 200 kB/s of 1 MB/s
    assert beside == pytest.approx(alone - 2_000_000, rel=0.02)


def test_control_messages_put_data_back_a_second_at_most() -> None:
    limit = RateLimit(8 * MBIT)
    limit.allowed_bytes(0.0)
    limit.count_control(10**9)
    assert limit.allowed_bytes(0.001) == 0
    assert 0.9 <= limit.wait_s(0.001) <= 1.1
    assert limit.allowed_bytes(1.1) > 0  # type: ignore[operator]


def test_rest_is_not_saved_up() -> None:
    limit = RateLimit(8 * MBIT)
    limit.allowed_bytes(0.0)
    assert (limit.allowed_bytes(3600.0) or 0) <= 100_000


def test_a_limit_may_be_set_changed_and_lifted_while_bytes_move() -> None:
    limit = RateLimit()
    limit.count_data(10**9)
    limit.bps = 8 * MBIT
    assert limit.allowed_bytes(5.0) == pytest.approx(96_500, rel=0.01)  # what moved before does not count
    limit.count_data(10**6)
    assert limit.allowed_bytes(5.0) == 0
    limit.bps = 0.0
    assert limit.allowed_bytes(5.0) is None
    limit.bps = 8 * MBIT
    assert limit.allowed_bytes(6.0)


def test_the_lower_limit_is_what_rounds_are_planned_by() -> None:
    limits = TrafficLimits(20 * MBIT, 50 * MBIT)
    assert limits.usable_bps(100 * MBIT) == 20 * MBIT
    assert limits.usable_bps(10 * MBIT) == 10 * MBIT
    assert limits.usable_bps(0.0) == 20 * MBIT
    assert TrafficLimits(0.0, 50 * MBIT).usable_bps(100 * MBIT) == 50 * MBIT
    assert TrafficLimits().usable_bps(100 * MBIT) == 100 * MBIT
    assert TrafficLimits().usable_bps(0.0) == 0.0


@pytest.mark.parametrize(
    ("sender", "receiver"), [(8 * MBIT, 0.0), (0.0, 8 * MBIT), (8 * MBIT, 8 * MBIT)], ids=["up", "down", "both"]
)
@run
async def test_real_sockets_keep_to_the_limits(sender: float, receiver: float) -> None:
    """1.6 MB at 1 MB a second, to one that would take them at once: 1.5 seconds and more."""
    source, sink = Source(20, size=80_000), Sink()
    one, other = Member(TrafficLimits(sender, 0.0)), Member(TrafficLimits(0.0, receiver))
    async with swarm_of(one, other):
        one.node.publish(STATE, source)
        await fetch(other, one, sink, range(1))  # the link is open, the burst is used up
        start_s = time.monotonic()
        await fetch(other, one, sink, range(20))
        took_s = time.monotonic() - start_s
        assert sink.holds(source, range(20))
        assert 1.4 <= took_s <= 10.0
        assert one.node.bandwidth_bps <= (sender or 1e12)
        limits = one.limits
        assert limits is not None
        assert limits.upload.total_bytes >= 1_650_000
        assert limits.download.total_bytes > 0


@run
async def test_several_receivers_share_the_limit_evenly() -> None:
    source, sinks = Source(10, size=80_000), [Sink() for _ in range(3)]
    donor, readers = Member(TrafficLimits(16 * MBIT, 0.0)), [Member() for _ in range(3)]
    async with swarm_of(donor, *readers):
        donor.node.publish(STATE, source)
        ended_s: list[float] = []

        async def read(reader: Member, sink: Sink) -> None:
            await fetch(reader, donor, sink, range(10))
            ended_s.append(time.monotonic())

        for reader in readers:  # the links are open before anything is measured
            await fetch(reader, donor, Sink(), range(1))
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for reader, sink in zip(readers, sinks, strict=True):
                tasks.create_task(read(reader, sink))
        assert all(sink.holds(source, range(10)) for sink in sinks)
        assert 1.0 <= ended_s[-1] - start_s <= 10.0  # 2.4 MB at 2 MB a second
        assert ended_s[0] - start_s >= 0.5 * (ended_s[-1] - start_s)  # one after the other: 0.33


@run
async def test_a_link_that_is_held_back_can_be_closed() -> None:
    source, sink = Source(20, size=80_000), Sink()
    one, other = Member(TrafficLimits(MBIT, MBIT)), Member(TrafficLimits(0.0, MBIT))
    async with swarm_of(one, other):
        one.node.publish(STATE, source)
        stream = other.node.fetch(one.peer, STATE, range(20), sink, 20)
        assert await anext(stream) == 0
        await stream.aclose()
    # Both ends have closed while more was waiting; the threads have ended without an error.
