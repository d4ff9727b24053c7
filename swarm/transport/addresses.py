"""IP addresses as limits and refusals see them: which network one is of, and who may be asked to connect to which.

A member names the address at which others reach it, and the coordinator and other members connect there. Unchecked,
that would let anybody have them knock on doors inside their own networks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Literal

_WRAPPED = [ipaddress.IPv6Network(one) for one in ("::ffff:0:0/96", "64:ff9b::/96", "::/96")]
"""IPv6 addresses whose last 32 bits are the IPv4 address that is meant: mapped, translated (RFC 6052), compatible."""

_IP = ipaddress.IPv4Address | ipaddress.IPv6Address

_NETWORK_BITS = {4: 24, 6: 48}
"""Prefix lengths: the addresses of one subscriber are usually inside one such network."""

Reach = Literal["public", "private", "link", "machine", "none"]
"""From where an address can be reached: from everywhere, from its own network, from its own link, from its own machine;
``none``: it is no address of one machine (multicast, unspecified, reserved, a tunnel's), or no address at all."""


def parse_address(host: str) -> _IP | None:
    """The address, an IPv4 one where IPv6 only wraps it; None for a name or for nonsense."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and int(address) > 1 and any(address in one for one in _WRAPPED):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def plain_text(host: str) -> str:
    """The address as people write it: an IPv4 one that a socket for both kinds shows as an IPv6 one is no such."""
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or host)


def network_of(host: str) -> str:
    """The network of an address, as text: an IPv4 /24 or an IPv6 /48. Anything else is a network of its own."""
    address = parse_address(host)
    if address is None:
        return host
    return str(ipaddress.ip_network(f"{address.compressed.partition('%')[0]}/{_NETWORK_BITS[address.version]}", False))


def reach_of(host: str) -> Reach:
    """From where the address can be reached."""
    address = parse_address(host)
    if address is None or address.is_multicast or address.is_unspecified:
        return "none"
    if address.is_loopback:
        return "machine"
    if address.is_link_local:
        return "link"
    if isinstance(address, ipaddress.IPv6Address) and (address.sixtofour or address.teredo):
        return "none"  # an IPv4 address in disguise, behind somebody's relay
    if address.is_global:
        return "public"
    return "none" if address.is_reserved else "private"


def may_name(named: str, observed: str) -> bool:
    """Whether a newcomer that comes from ``observed`` may be known under the address ``named``: its own, or a public
    one. Another private address is one that whoever connects to it would find in a network of its own."""
    address = parse_address(named)
    return address is not None and (address == parse_address(observed) or reach_of(named) == "public")


_REACHED_FROM: dict[Reach, set[Reach]] = {
    "machine": {"public", "private", "link", "machine"},
    "link": {"public", "private", "link"},
    "private": {"public", "private"},
    "public": {"public"},
    "none": {"public"},
}
_LEAST_FIRST: tuple[Reach, ...] = ("public", "private", "link", "machine")


def least_reach(hosts: Iterable[str]) -> Reach:
    """Of several addresses of one machine, the reach that allows least."""
    found = {reach_of(host) for host in hosts}
    return next((reach for reach in _LEAST_FIRST if reach in found), "none")


def may_dial(host: str, coordinator: Reach) -> bool:
    """Whether to connect to a member at ``host`` that a coordinator vouches for which is itself reached so: one out in
    the internet knows nothing of our private network and must not have us connect to anything in it."""
    return reach_of(host) in _REACHED_FROM[coordinator]
