"""Networks and reaches of addresses, which addresses may be named and dialed, and HOST:PORT texts."""

import pytest

from shoal.swarm.errors import InviteError
from shoal.swarm.protocol.addresses import (
    Reach,
    join_host_port,
    least_reach,
    may_dial,
    may_name,
    network_of,
    parse_ip,
    plain_host,
    reach_of,
    split_host_port,
)


@pytest.mark.parametrize(
    ("host", "network", "reach"),
    [
        ("8.8.8.8", "8.8.8.0/24", "public"),
        ("::ffff:8.8.8.8", "8.8.8.0/24", "public"),
        ("64:ff9b::808:808", "8.8.8.0/24", "public"),
        ("2001:4860:4860:1:2:3:4:5", "2001:4860:4860::/48", "public"),
        ("10.1.2.3", "10.1.2.0/24", "private"),
        ("::ffff:10.1.2.3", "10.1.2.0/24", "private"),
        ("64:ff9b::a01:203", "10.1.2.0/24", "private"),
        ("::10.1.2.3", "10.1.2.0/24", "private"),
        ("192.168.1.7", "192.168.1.0/24", "private"),
        ("100.64.1.1", "100.64.1.0/24", "private"),
        ("fc00::1", "fc00::/48", "private"),
        ("169.254.169.254", "169.254.169.0/24", "link"),
        ("fe80::1%eth0", "fe80::/48", "link"),
        ("127.0.0.1", "127.0.0.0/24", "machine"),
        ("127.5.6.7", "127.5.6.0/24", "machine"),
        ("::1", "::/48", "machine"),
        ("::ffff:127.0.0.1", "127.0.0.0/24", "machine"),
        ("0.0.0.0", "0.0.0.0/24", "none"),
        ("::", "::/48", "none"),
        ("224.0.0.1", "224.0.0.0/24", "none"),
        ("ff02::1", "ff02::/48", "none"),
        ("255.255.255.255", "255.255.255.0/24", "none"),
        ("2002:a01:203::1", "2002:a01:203::/48", "none"),
        ("example.org", "example.org", "none"),
        ("", "", "none"),
    ],
)
def test_networks_and_reaches(host: str, network: str, reach: Reach) -> None:
    assert (network_of(host), reach_of(host)) == (network, reach)


@pytest.mark.parametrize(
    ("named", "observed", "may"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::ffff:192.168.1.7", "192.168.1.7", True),
        ("192.168.1.7", "::ffff:192.168.1.7", True),
        ("8.8.8.8", "9.9.9.9", True),
        ("8.8.8.8", "192.168.1.7", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("192.168.1.7", "127.0.0.1", False),
        ("192.168.1.8", "192.168.1.7", False),
        ("10.0.0.1", "192.168.1.7", False),
        ("127.0.0.1", "8.8.8.8", False),
        ("169.254.169.254", "8.8.8.8", False),
        ("0.0.0.0", "8.8.8.8", False),
        ("224.0.0.1", "8.8.8.8", False),
        ("example.org", "8.8.8.8", False),
        ("", "8.8.8.8", False),
    ],
)
def test_a_newcomer_names_its_own_address_or_a_public_one(named: str, observed: str, may: bool) -> None:
    assert may_name(named, observed) == may


def test_a_coordinator_sends_nobody_to_what_it_cannot_see() -> None:
    one = {"public": "8.8.8.8", "private": "10.0.0.1", "link": "169.254.1.1", "machine": "127.0.0.1", "none": "0.0.0.0"}
    order: list[Reach] = ["public", "private", "link", "machine"]
    for at, coordinator in enumerate(order):
        assert {reach for reach, host in one.items() if may_dial(host, coordinator)} == set(order[: at + 1])
    assert not may_dial("10.0.0.1", "none")


def test_addresses_are_written_plainly() -> None:
    hosts = ["::ffff:10.1.2.3", "10.1.2.3", "2001:db8::1", "64:ff9b::a01:203", "fe80::1%eth0", "example.org", ""]
    assert [plain_host(host) for host in hosts] == ["10.1.2.3", *hosts[1:]]


def test_of_several_addresses_the_one_counts_that_allows_least() -> None:
    assert least_reach(["127.0.0.1", "10.0.0.1"]) == "private"
    assert least_reach(["127.0.0.1", "8.8.8.8"]) == "public"
    assert least_reach(["::1", "127.0.0.1"]) == "machine"
    assert least_reach([]) == "none"


def test_host_and_port_are_split_and_joined() -> None:
    assert split_host_port("host") == ("host", 0)
    assert split_host_port("host", 7) == ("host", 7)
    assert split_host_port("0.0.0.0:80") == ("0.0.0.0", 80)
    assert split_host_port("[::1]:80") == ("::1", 80)
    for text in ["", ":80", "host:x", "host:99999", "a/b", "a?b", "a#b", "u@h:1", "[::1", "::1"]:
        with pytest.raises(InviteError):
            split_host_port(text)
    assert join_host_port("host", 1) == "host:1"
    assert join_host_port("::1", 80) == "[::1]:80"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("64:ff9b::7f00:1", False),  # NAT64 of 127.0.0.1
        ("64:ff9b::808:808", True),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert (reach_of(address) == "public") is public


@pytest.mark.parametrize("text", ["", "127.1", "example.org", "0177.0.0.1", "1.2.3.4 "])
def test_other_texts_are_no_addresses(text: str) -> None:
    assert parse_ip(text) is None
    assert reach_of(text) == "none"
