"""What `shoal doctor` says of a network. With real NATs: ``tests/integration/test_behind_nat.py``."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from shoal.peer.cli.doctor_network import (
    NetworkDiagnosis,
    Step,
    examine_network,
    network_advice,
    network_report,
    own_addresses,
)
from shoal.swarm.protocol.addresses import reach_of

HOME, PUBLIC, CARRIER = "192.168.1.10", "44.128.3.1", "100.64.0.7"
PORTS = (7800, 7801)
HALF = "its control port answers, but its data port, 44.128.3.1:7801, does not: others need both"
NONE = "nothing answers at its control port, 44.128.3.1:7800"
MAPPED = "44.128.3.1:7800 and 7801 by PCP"


def found(own: str = HOME, **more: object) -> NetworkDiagnosis:
    return NetworkDiagnosis(own=(own,), ports=PORTS, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "step", "nat", "advice"),
    [
        (found(PUBLIC, seen_as=PUBLIC, trouble=""), "direct", "none", ""),
        (found(PUBLIC, seen_as=PUBLIC, trouble=NONE), "outward", "none", "A firewall keeps others out"),
        (found(seen_as=PUBLIC, trouble=NONE), "outward", "a NAT", "--advertise 44.128.3.1:PORT"),
        (found(seen_as=PUBLIC, trouble=HALF), "outward", "a NAT", "One port is open and the other is not"),
        (found(seen_as=PUBLIC, trouble=NONE, relays=1), "relayed", "a NAT", "Forward two TCP ports"),
        (found(seen_as=PUBLIC, trouble=NONE, mapped=MAPPED, mapped_trouble="", outer=PUBLIC), "mapped", "a NAT", ""),
        (
            found(seen_as=PUBLIC, trouble=NONE, mapped=MAPPED, mapped_trouble=NONE, outer=PUBLIC),
            "outward",
            "a NAT",
            f"forwards {MAPPED}, but nothing answers",
        ),
        (found(seen_as=PUBLIC, trouble=NONE, outer=CARRIER), "outward", "two or more NATs", "Your provider has a NAT"),
        (found(seen_as=HOME, trouble="", own=HOME), "direct", "none", ""),
        (found(), "unknown", "no address of it is public", "Forward two TCP ports"),
        (found(outer=CARRIER), "unknown", "two or more NATs", "Your provider has a NAT"),
        (found(PUBLIC), "unknown", "perhaps none", "Forward two TCP ports"),
        (found(mapped=MAPPED, outer=PUBLIC), "unknown", "a NAT", ""),
        (found(attempts={"UPnP": "not tried, it needs pip install 'shoal[nat]'"}), "unknown", "a NAT", "by UPnP: pip"),
    ],
)
def test_which_step_works_and_what_would_help(what: NetworkDiagnosis, step: Step, nat: str, advice: str) -> None:
    assert what.step == step
    assert nat in what.nat
    said = " ".join(network_advice(what))
    assert advice in said if advice else not said


def test_the_report_says_what_was_found() -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    diagnosis = found(
        seen_as=PUBLIC,
        trouble=NONE,
        attempts={"PCP": f"maps {MAPPED}"},
        mapped=MAPPED,
        mapped_trouble="",
        outer=PUBLIC,
        round_trip_s=0.0123,
        rate_bps=45e6,
    )
    with console.capture() as capture:
        console.print(network_report(diagnosis))
    said = " ".join(capture.get().split())
    for words in ("192.168.1.10; from outside 44.128.3.1", "7800 and 7801: nothing answers", "12.3 ms", "45 Mbit/s"):
        assert words in said
    assert "the router forwards both ports: `shoal join` does that by itself" in said


@pytest.mark.parametrize(
    ("what", "type_words", "meaning", "advice"),
    [
        (
            found(seen_as=PUBLIC, trouble=NONE, mapping="independent", filtering="port"),
            "port-restricted",
            "meet dir",
            "",
        ),
        (
            found(seen_as=PUBLIC, trouble=NONE, mapping="dependent"),
            "a symmetric NAT",
            "over a relay",
            "cone or moderate",
        ),
        (found(seen_as=PUBLIC, trouble=NONE), "fewer than two others", "", "--relay 'shoal-relay://"),
        (found(seen_as=PUBLIC, mapping="independent"), "one outer port for everybody", "meet directly", ""),
        (found(PUBLIC, seen_as=PUBLIC, trouble=NONE, filtering="port"), "behind a firewall; lets in", "meet dir", ""),
        (found(PUBLIC, seen_as=PUBLIC, trouble=""), "", "", ""),
        (found(seen_as=HOME, trouble=""), "", "", ""),
        (found(), "", "", ""),
    ],
)
def test_the_type_of_the_nat_is_said_with_what_it_means(
    what: NetworkDiagnosis, type_words: str, meaning: str, advice: str
) -> None:
    console = Console(width=300, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(network_report(what))
    said = " ".join(capture.get().split())
    for words in (type_words, meaning, advice):
        assert words in said
    assert ("NAT type" in said) == bool(type_words)


def test_alone_and_without_the_router_nothing_is_sent() -> None:
    diagnosis = asyncio.run(examine_network(None, ("127.0.0.1", 0), maps_ports=False))
    assert diagnosis.step == "unknown"
    assert not diagnosis.attempts
    assert 0 not in diagnosis.ports
    assert all(reach_of(host) in ("public", "private") for host in own_addresses())
