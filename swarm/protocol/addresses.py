"""Checks of hosts and IP addresses: text forms, the network of an address, and from where it can be reached.

A member's address as messages carry it is ``types.Address``.

A member names the address at which others reach it, and the coordinator and other members connect there. Without
these checks, a stranger could make them connect to machines inside their own private networks.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from shoal.swarm.errors import InviteError

MAX_ADDRESSES = 8
"""Most addresses of one machine, or of a coordinator in an invite."""

_WRAPPED = [ipaddress.IPv6Network(one) for one in ("::ffff:0:0/96", "64:ff9b::/96", "::/96")]
"""IPv6 addresses that end with an IPv4 address: mapped, translated (NAT64, RFC 6052) and IPv4-compatible ones."""

_REMEMBERED = 4096
"""Hosts whose answers are kept: each message of a caller asks again."""

_IP = ipaddress.IPv4Address | ipaddress.IPv6Address

_NETWORK_BITS = {4: 24, 6: 48}
"""Prefix lengths. The addresses of one subscriber usually lie within one such network."""

Reach = Literal["public", "private", "link", "machine", "none"]
"""From where an address can be reached: everywhere, its private network, its link, or its own machine.

``none``: not an IP address, or not that of one machine (multicast, unspecified, reserved, tunnels)."""


def parse_ip(host: str) -> _IP | None:
    """Parse an IP address, unwrapping IPv4 addresses from IPv6 ones; None if ``host`` is not an IP address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and int(address) > 1 and any(address in one for one in _WRAPPED):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


@functools.lru_cache(_REMEMBERED)
def plain_host(host: str) -> str:
    """Write an IPv4-mapped IPv6 address, as a dual-stack socket shows it, as IPv4; leave other hosts unchanged."""
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or host)


@functools.lru_cache(_REMEMBERED)
def network_of(host: str) -> str:
    """The network of an address: an IPv4 /24 or an IPv6 /48. A host that is not an IP address is its own network."""
    address = parse_ip(host)
    if address is None:
        return host
    return str(ipaddress.ip_network(f"{address.compressed.partition('%')[0]}/{_NETWORK_BITS[address.version]}", False))


def reach_of(host: str) -> Reach:
    """Classify from where an address can be reached."""
    address = parse_ip(host)
    if address is None or address.is_multicast or address.is_unspecified:
        return "none"
    if address.is_loopback:
        return "machine"
    if address.is_link_local:
        return "link"
    if isinstance(address, ipaddress.IPv6Address) and (address.sixtofour or address.teredo):
        return "none"  # an IPv4 address behind a third party's tunnel
    if address.is_global:
        return "public"
    return "none" if address.is_reserved else "private"


def may_name(named: str, observed: str) -> bool:
    """Whether a newcomer that connects from ``observed`` may be listed under ``named``.

    ``named`` must be the observed address or a public one: other peers would look for any other private address inside
    their own networks."""
    address = parse_ip(named)
    return address is not None and (address == parse_ip(observed) or reach_of(named) == "public")


_REACHED_FROM: dict[Reach, set[Reach]] = {
    "machine": {"public", "private", "link", "machine"},
    "link": {"public", "private", "link"},
    "private": {"public", "private"},
    "public": {"public"},
    "none": {"public"},
}
_LEAST_FIRST: tuple[Reach, ...] = ("public", "private", "link", "machine")


def least_reach(hosts: Iterable[str]) -> Reach:
    """The reach among a coordinator's addresses with which it may vouch for the fewest other addresses."""
    found = {reach_of(host) for host in hosts}
    return next((reach for reach in _LEAST_FIRST if reach in found), "none")


def may_dial(host: str, coordinator: Reach) -> bool:
    """Whether to connect to a member at ``host`` on the word of a coordinator that has this reach.

    A coordinator on the internet knows nothing of our private network and must not make us connect into it."""
    return reach_of(host) in _REACHED_FROM[coordinator]


def join_host_port(host: str, port: int | str) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str, default_port: int = 0) -> tuple[str, int]:
    """Split ``HOST``, ``HOST:PORT`` or ``[V6]:PORT``. Raises ``InviteError``."""
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise InviteError(f"{text!r} is not an address: {error}; write HOST:PORT, or [IPV6]:PORT") from error
    if not host or split.netloc != text or "@" in text:
        raise InviteError(f"{text!r} is not an address; write HOST:PORT, or [IPV6]:PORT")
    return host, default_port if port is None else port
