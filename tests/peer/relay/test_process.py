"""A relay beside a host or peer: started when it is needed, again when it has ended, with longer and longer pauses."""

import asyncio
import itertools
import logging
from pathlib import Path

import pytest
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.relay.offer import RelayOffer
from shoal.peer.relay.process import RelayProcess, serve_orders
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits


def starts(lasts_s: float, within_s: float) -> list[float]:
    """Return when a relay is started whose process ends after a time, again and again."""
    began: list[float] = []

    async def main() -> None:
        relay, loop = RelayProcess(Path("key"), ("127.0.0.1", 0), bytes(32)), asyncio.get_running_loop()

        async def run_once() -> str:
            began.append(loop.time())
            await asyncio.sleep(lasts_s)
            return "for a test"

        relay._run_once = run_once  # type: ignore[method-assign]
        running = asyncio.create_task(relay.run())
        await asyncio.sleep(10.0)
        assert not began, "nobody needs it yet"
        for _ in range(5):
            assert relay.url() is None
        await asyncio.sleep(within_s)
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())
    return began


def test_a_relay_that_cannot_start_is_tried_less_and_less_often_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    began = starts(1.0, 1000.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert pauses == pytest.approx([3.0, 5.0, 9.0, 17.0, 33.0, 65.0, 129.0, 257.0, 301.0])
    assert [one.levelname for one in caplog.records].count("WARNING") == 1


def test_one_that_has_run_for_long_is_back_soon(caplog: pytest.LogCaptureFixture) -> None:
    began = starts(100.0, 350.0)
    assert began == pytest.approx([10.0, 112.0, 214.0, 316.0])
    assert len(caplog.records) == 3


def test_orders_are_rates_and_their_end_is_the_relays() -> None:
    rates, stops = list[float](), list[bool]()
    for data in (b"1000\n", b"nonsense\n2000\n", b""):
        serve_orders(lambda data=data: data, rates.append, lambda: stops.append(True))
    assert rates == [1000.0, 2000.0]
    assert stops == [True]


def test_what_is_offered_to_others_leaves_half_of_the_limits_and_counts_in_them() -> None:
    limits = TrafficLimits()
    offer = RelayOffer(Path("key"), ("127.0.0.1", 0), 80e6, limits)
    assert offer.bytes_s == 10e6
    limits.download.bps = 100e6
    assert offer.bytes_s == 100e6 / 16
    limits.upload.bps = 40e6
    assert offer.bytes_s == 40e6 / 16
    offer._count(1448)
    assert limits.upload.total_bytes == limits.download.total_bytes == 1500
