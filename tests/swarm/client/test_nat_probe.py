"""The type of a NAT, told from what others have seen. With real NATs: ``tests/integration/test_behind_nat.py``."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from tests.swarm.network import HOST, run
from tests.swarm.transport.test_relay import relay_of

from shoal.swarm.client.nat_probe import NatFiltering, NatMapping, NatProbe, Sighting, filtering_of, mapping_of
from shoal.swarm.errors import Unreachable
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.transport.tcp.sockets import connect

OUTER, OTHER, LAN, SIX = ("44.128.3.1", 700), ("44.128.3.1", 701), ("192.168.1.10", 9), ("2a00::1", 700)


@pytest.mark.parametrize(
    ("outer", "mapping"),
    [
        ((), "unknown"),
        ((OUTER,), "unknown"),
        ((OUTER, OUTER), "independent"),
        ((OUTER, OUTER, OTHER), "dependent"),
        ((OUTER, LAN), "unknown"),
        ((OUTER, OUTER, LAN), "independent"),
        ((OUTER, SIX), "unknown"),
        ((OUTER, OUTER, SIX), "independent"),
    ],
)
def test_the_mapping(outer: tuple[tuple[str, int], ...], mapping: NatMapping) -> None:
    sightings = [Sighting(f"observer {number}", one) for number, one in enumerate(outer)]
    assert mapping_of(sightings) == mapping
    assert mapping_of([*sightings, *sightings]) == mapping, "who tells it twice is still one"


@pytest.mark.parametrize(
    ("stranger", "other_port", "filtering"),
    [
        (None, None, "unknown"),
        (True, None, "open"),
        (True, False, "open"),
        (False, None, "address or port"),
        (False, True, "address"),
        (False, False, "port"),
        (None, True, "address or open"),
        (None, False, "port"),
    ],
)
def test_the_filtering(stranger: bool | None, other_port: bool | None, filtering: NatFiltering) -> None:
    assert filtering_of(stranger, other_port) == filtering


@run
async def test_relays_tell_from_where_one_port_comes_and_who_dials_it_gets_in() -> None:
    host = Identity.generate()
    async with relay_of(host) as first, relay_of(host) as second:
        with NatProbe() as probe:
            for relay in (first, second):
                assert await probe.ask(relay.address) == (HOST, probe.port)
            assert len({one.observer for one in probe.sightings}) == 2

            async def nobody() -> None:
                raise Unreachable("nobody dials")

            async def dial() -> None:
                with closing(await connect(HOST, probe.port)):
                    await asyncio.sleep(0.05)

            assert await probe.lets_in(dial) is True
        with NatProbe() as other:
            assert await other.lets_in(nobody) is False


@run
async def test_a_relay_that_does_not_answer_tells_nothing() -> None:
    async with relay_of(Identity.generate()) as relay:
        pass
    with NatProbe() as probe:
        assert await probe.ask(relay.address) is None
        assert not probe.sightings
