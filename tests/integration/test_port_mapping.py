"""Ports that a home's router (``miniupnpd``) maps: each protocol, and members that others reach only by that."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.harness import CALM, ROUNDS_S, SHOAL, START_S, Swarm, eventually, run_toml
from tests.integration.mapping_router import mapping_router, missing
from tests.integration.nat_lab import Kind, NatLab, nat_lab

from shoal.swarm.transport.paths.port_mapping import MappedPort, NatPmp, Pcp, PortMapper, Router, Upnp, default_gateway

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(missing()), reason=missing())]

PORT, WAIT_S, NEVER_S = 7800, 5.0, 0.3
HAS_UPNP = importlib.util.find_spec("miniupnpc") is not None
needs_upnp = pytest.mark.skipif(not HAS_UPNP, reason="UPnP needs miniupnpc: pip install 'shoal[nat]'")


def dials(lab: NatLab, host: str, port: int, within_s: float) -> bool:
    with closing(lab.tcp("near")) as dialler:
        dialler.settimeout(within_s)
        try:
            dialler.connect((host, port))
        except OSError:
            return False
        return True


def is_up(log: Path, word: str) -> None:
    eventually("the router is up", lambda: word in log.read_text(errors="replace"), 10.0)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Pcp(default_gateway()), id="pcp"),
        pytest.param(lambda: NatPmp(default_gateway()), id="nat-pmp"),
        pytest.param(Upnp, id="upnp", marks=needs_upnp),
    ],
)
def test_a_mapped_port_is_reached_from_outside_until_it_is_deleted(make: Callable[[], Router], tmp_path: Path) -> None:
    with nat_lab({"ann": Kind.PORT_RESTRICTED, "near": Kind.PUBLIC}) as lab:
        listener = lab.tcp("ann", PORT)
        listener.listen()
        with mapping_router(lab, "ann", tmp_path) as log:
            is_up(log, "HTTP listening")
            router = lab.spaces.call("ann", make)
            outside = lab.outside("ann")
            assert not dials(lab, outside, PORT, NEVER_S)
            mapped: MappedPort = lab.spaces.call("ann", lambda: asyncio.run(router.map_port(PORT, PORT, 600)))
            assert mapped.host == outside
            assert dials(lab, mapped.host, mapped.port, WAIT_S)
            again = lab.spaces.call("ann", lambda: asyncio.run(router.map_port(PORT, mapped.port, 600)))
            assert (again.host, again.port) == (mapped.host, mapped.port)
            lab.spaces.call("ann", lambda: asyncio.run(router.delete(PORT, mapped)))
            assert not dials(lab, mapped.host, mapped.port, NEVER_S)


def test_behind_a_carrier_the_router_at_home_is_of_no_use(tmp_path: Path) -> None:
    with nat_lab({"ann": Kind.CGNAT, "near": Kind.PUBLIC}) as lab, mapping_router(lab, "ann", tmp_path) as log:
        is_up(log, "HTTP listening")
        mapper = lab.spaces.call("ann", lambda: PortMapper((PORT, PORT + 1), [NatPmp(default_gateway())]))
        assert lab.spaces.call("ann", lambda: asyncio.run(mapper.open())) is None
        assert mapper.attempts


@pytest.mark.slow
def test_a_member_whose_router_maps_its_ports_makes_a_run_possible(swarm: Swarm) -> None:
    """Nobody else can be reached. When it leaves, the mapping goes."""
    kinds = {"host": Kind.PUBLIC, "ann": Kind.PORT_RESTRICTED, "ben": Kind.SYMMETRIC, "near": Kind.PUBLIC}
    with nat_lab(kinds) as lab, mapping_router(lab, "ann", swarm.folder) as log:
        is_up(log, "HTTP listening")
        toml = run_toml(max_s=0.5, patience_s=4.0)
        host = swarm.host(
            toml, launcher=(*lab.inside("host"), *SHOAL), bind=f"{lab.address('host')}:0", extra=["--no-relay"]
        )
        bind = ["--bind", f"0.0.0.0:{PORT}"]
        ann = swarm.member(host.invite, "ann", (*lab.inside("ann"), *CALM), extra=bind)
        ann.says(f"other peers reach this machine at {lab.outside('ann')}:{PORT}", START_S)
        ben = swarm.member(host.invite, "ben", (*lab.inside("ben"), *CALM), extra=["--bind", "0.0.0.0"])
        ben.event("committed", START_S + ROUNDS_S, included=True, members=2)
        assert dials(lab, lab.outside("ann"), PORT, WAIT_S)
        ann.leave()
        assert not dials(lab, lab.outside("ann"), PORT, NEVER_S)
        assert not dials(lab, lab.outside("ann"), PORT + 1, NEVER_S)
