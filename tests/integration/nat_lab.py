"""An internet of network namespaces with real NATs between its machines (nftables), to try who can reach whom.

One Ethernet segment is the internet. Each machine that is not on it stands in a home network behind a gateway of its
own, or of its group; all home networks have the same addresses, as they do in the world. Addresses look public to a
program (44.128.0.0/16, never routed) and each machine lies in a /24 of its own. No packet leaves the namespaces.

    with NatLab({"host": Kind.PUBLIC, "ann": Kind.SYMMETRIC}) as lab:
        swarm.member(invite, "ann", (*lab.inside("ann"), *SHOAL))
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from enum import StrEnum

from tests.integration.namespaces import Namespaces, NoNamespaces, check_machine

INTERNET = "internet"
_PUBLIC, _HOME, _CARRIER = "44.128", "192.168.1", "100.64"
_FIRST_AT_HOME = 10
_MAPPING_S = 120
_KERNEL_S = 5.0


class Kind(StrEnum):
    """What stands between a machine and the internet. The four NATs are named as in RFC 3489; RFC 4787's words for
    their mapping and filtering are behind them."""

    PUBLIC = "public"
    FULL_CONE = "full-cone"
    """Endpoint-independent mapping and filtering."""
    RESTRICTED = "restricted"
    """Endpoint-independent mapping, address-dependent filtering."""
    PORT_RESTRICTED = "port-restricted"
    """Endpoint-independent mapping, address- and port-dependent filtering: most homes."""
    SYMMETRIC = "symmetric"
    """A port of its own for each destination, chosen at random; address- and port-dependent filtering."""
    CGNAT = "cgnat"
    """A port-restricted NAT at home behind one of the carrier, which the group shares."""
    INBOUND_BLOCKED = "inbound-blocked"
    """A public address behind a firewall that lets in what was asked for only."""
    UDP_BLOCKED = "udp-blocked"
    """A port-restricted NAT that drops UDP."""
    ONLY_443 = "only-443"
    """A port-restricted NAT that lets TCP to port 443 out, and nothing else."""


_OPEN = {Kind.PUBLIC, Kind.INBOUND_BLOCKED}
BEHIND_NAT = tuple(kind for kind in Kind if kind not in _OPEN)


class NatLab:
    """``machines``: what stands before each of them. ``together``: groups that share a gateway, or a carrier; of one
    kind each. Use it as a context; raises ``NoNamespaces``."""

    def __init__(self, machines: Mapping[str, Kind], together: Sequence[Sequence[str]] = ()) -> None:
        self._machines = dict(machines)
        self._sites = [list(group) for group in together]
        grouped = {name for group in together for name in group}
        self._sites += [[name] for name in machines if name not in grouped]
        assert all(len({machines[name] for name in site}) == 1 for site in self._sites), "one kind for each group"
        self._spaces = Namespaces()
        self._addresses: dict[str, str] = {}
        self._outside: dict[str, str] = {}
        self._gateways: dict[str, str] = {}
        self._ports = 0

    def __enter__(self) -> NatLab:
        check_machine(("nft",))
        try:
            self._build()
        except BaseException:
            self._spaces.close()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self._spaces.close()

    # Where machines are -------------------------------------------------------------------------------------

    def address(self, machine: str) -> str:
        """Return the address that a machine has itself."""
        return self._addresses[machine]

    def outside(self, machine: str) -> str:
        """Return the address under which the internet sees a machine."""
        return self._outside[machine]

    def gateway(self, machine: str) -> str:
        """Return the name of the namespace of a machine's home gateway."""
        return self._gateways[machine]

    def inside(self, name: str) -> tuple[str, ...]:
        """Return what to put before a command to run it on a machine, or on a gateway."""
        return self._spaces.inside(name)

    @property
    def spaces(self) -> Namespaces:
        """The namespaces themselves, by the names of machines and gateways."""
        return self._spaces

    def udp(self, machine: str, port: int = 0) -> socket.socket:
        return self._spaces.socket(machine, socket.SOCK_DGRAM, port)

    def tcp(self, machine: str, port: int = 0) -> socket.socket:
        return self._spaces.socket(machine, socket.SOCK_STREAM, port)

    # What can be done to them -------------------------------------------------------------------------------

    def forward(self, machine: str, *ports: int) -> None:
        """Forward TCP ports of a machine's gateway to it, as an owner does by hand."""
        if self._machines[machine] == Kind.CGNAT:
            raise ValueError("nobody forwards ports at a carrier's gateway")
        rules = [
            f'add rule ip lab inward iifname "wan" tcp dport {port} dnat to {self.address(machine)}\n' for port in ports
        ]
        self._nft(self.gateway(machine), "".join(rules))

    def unplug(self, machine: str) -> None:
        """Take a machine's gateway, or the machine where it has none, off the internet; packets are lost unseen."""
        space, device = self._uplink(machine)
        self._spaces.ip(space, f"link set {device} down")

    def plug_in(self, machine: str) -> None:
        """Connect it again. Its gateway has forgotten all mappings."""
        space, device = self._uplink(machine)
        if machine in self._gateways:
            self.forget(machine)
        self._spaces.ip(space, f"link set {device} up")
        if self._machines[machine] == Kind.CGNAT:
            self._spaces.ip(space, f"route replace default via {_CARRIER}.0.1")

    def part(self, machine: str, other: str) -> None:
        """Have a machine's gateway drop what comes from another machine, unseen by both."""
        self._nft(self.gateway(machine), f"insert rule ip lab passing ip saddr {self.outside(other)} drop\n")

    def forget(self, machine: str) -> None:
        """Have a machine's gateway forget all mappings, as after a restart: connections through it are dead."""
        self._spaces.call(self.gateway(machine), _flush_conntrack)

    def shape(self, machine: str, rate_mbit: float, one_way_ms: float = 0.0) -> None:
        """Limit what a machine sends and receives. A delay needs a kernel with netem. Raises ``NoNamespaces``."""
        delay = f"netem delay {one_way_ms}ms rate {rate_mbit}mbit limit 10000"
        rate = f"tbf rate {rate_mbit}mbit burst 64kb latency 200ms"
        queue = delay if one_way_ms else rate
        ends = [(machine, "eth0"), self._other_end[machine]]
        for space, device in ends:
            self._spaces.feed(space, ("tc", "qdisc", "replace", "dev", device, "root", *queue.split()))

    # How they are built -------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._other_end: dict[str, tuple[str, str]] = {}
        self._spaces.make(INTERNET, *self._machines)
        self._bridge(INTERNET)
        for number, site in enumerate(self._sites, 1):
            kind = self._machines[site[0]]
            if kind in _OPEN:
                for machine in site:
                    self._on_the_internet(machine, f"{_PUBLIC}.{number}.{site.index(machine) + 1}")
            elif kind == Kind.CGNAT:
                self._carrier(site, f"{_PUBLIC}.{number}.1")
            else:
                self._home(site, kind, INTERNET, f"{_PUBLIC}.{number}.1/16")
            for machine in site:
                self._outside[machine] = f"{_PUBLIC}.{number}.{site.index(machine) + 1 if kind in _OPEN else 1}"
                if kind == Kind.INBOUND_BLOCKED:
                    self._nft(machine, _FIREWALL)

    def _on_the_internet(self, machine: str, address: str) -> None:
        self._plug(machine, "eth0", f"{address}/16", INTERNET)
        self._addresses[machine] = address

    def _carrier(self, site: Sequence[str], address: str) -> None:
        carrier = f"carrier-{site[0]}"
        self._make_gateway(carrier, Kind.PORT_RESTRICTED, INTERNET, f"{address}/16", f"{_CARRIER}.0.1/10")
        for number, machine in enumerate(site, 1):
            self._home([machine], Kind.PORT_RESTRICTED, carrier, f"{_CARRIER}.{number}.1/10")
            self._spaces.ip(self.gateway(machine), f"route add default via {_CARRIER}.0.1")

    def _home(self, site: Sequence[str], kind: Kind, uplink: str, wan: str) -> None:
        gateway = f"gateway-{site[0]}"
        self._make_gateway(gateway, kind, uplink, wan, f"{_HOME}.1/24")
        for number, machine in enumerate(site, _FIRST_AT_HOME):
            self._addresses[machine] = f"{_HOME}.{number}"
            self._gateways[machine] = gateway
            self._plug(machine, "eth0", f"{_HOME}.{number}/24", gateway)
            self._spaces.ip(machine, f"route add default via {_HOME}.1")

    def _make_gateway(self, gateway: str, kind: Kind, uplink: str, wan: str, lan: str) -> None:
        self._spaces.make(gateway)
        self._bridge(gateway)
        self._plug(gateway, "wan", wan, uplink)
        self._spaces.ip(gateway, f"address add {lan} dev lan")
        self._spaces.feed(gateway, ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
        self._nft(gateway, _gateway_rules(kind))

    def _bridge(self, space: str) -> None:
        self._spaces.ip(space, "link add lan type bridge", "link set lan up")

    def _plug(self, space: str, device: str, address: str, into: str) -> None:
        """Connect a namespace to the bridge of another one."""
        self._ports += 1
        port = f"port{self._ports}"
        self._other_end[space] = (into, port)
        self._spaces.ip(
            into,
            f"link add {port} type veth peer name {device} netns {self._spaces.holder(space)}",
            f"link set {port} master lan up",
        )
        self._spaces.ip(space, f"address add {address} dev {device}", f"link set {device} up")

    def _uplink(self, machine: str) -> tuple[str, str]:
        return (machine, "eth0") if self._machines[machine] in _OPEN else (self.gateway(machine), "wan")

    def _nft(self, space: str, rules: str) -> None:
        self._spaces.feed(space, ("nft", "-f", "-"), rules)


def nat_lab(machines: Mapping[str, Kind], together: Sequence[Sequence[str]] = ()) -> NatLab:
    """Make a lab to be used as a context; skip the test, with the reason, where there can be none."""
    import pytest

    try:
        check_machine(("nft",))
    except NoNamespaces as error:
        pytest.skip(str(error))
    return NatLab(machines, together)


def _flush_conntrack() -> None:
    """Tell the kernel to forget the connections of this thread's namespace: IPCTNL_MSG_CT_DELETE for all of them."""
    netfilter, delete = 12, 1 << 8 | 2
    request_and_ack = 1 | 4
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netfilter) as kernel:
        kernel.settimeout(_KERNEL_S)
        kernel.send(struct.pack("=IHHIIBBH", 20, delete, request_and_ack, 1, 0, socket.AF_INET, 0, 0))
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error:
        raise NoNamespaces(f"connections cannot be flushed: {os.strerror(-error)}")


_FIREWALL = """
table inet lab {
  chain input {
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
  }
}
"""

_OUT_BY_KIND = {
    Kind.UDP_BLOCKED: "meta l4proto udp drop",
    Kind.ONLY_443: "tcp dport != 443 drop\n    meta l4proto != tcp drop",
}
_ANYBODY, _SAME_ADDRESS = "meta l4proto . th {port}", "meta l4proto . th {port} . ip {peer}"
_LETS_IN = {Kind.FULL_CONE: _ANYBODY, Kind.RESTRICTED: _SAME_ADDRESS}
_KEYS = {_ANYBODY: "inet_proto . inet_service", _SAME_ADDRESS: "inet_proto . inet_service . ipv4_addr"}


def _gateway_rules(kind: Kind) -> str:
    """Rules of a gateway between ``lan`` and ``wan``.

    Linux keeps a source port where it is free and lets in answers from where it sent to: port-restricted. The cones
    note what was sent from where to whom, and let in more by that."""
    lets_in = _LETS_IN.get(kind)
    note = inward = ""
    table = ""
    if lets_in:
        table = f"map sent {{ type {_KEYS[lets_in]} : ipv4_addr; flags dynamic,timeout; timeout {_MAPPING_S}s; }}"
        sent, asked = lets_in.format(port="sport", peer="daddr"), lets_in.format(port="dport", peer="saddr")
        note = f"meta l4proto {{ tcp, udp }} update @sent {{ {sent} : ip saddr }}"
        inward = f'iifname "wan" meta l4proto {{ tcp, udp }} dnat to {asked} map @sent'
    return f"""
table ip lab {{
  {table}
  chain note {{
    type filter hook forward priority mangle; policy accept;
    oifname "wan" jump outward
  }}
  chain outward {{
    {_OUT_BY_KIND.get(kind, "")}
    {note}
  }}
  chain passing {{
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    iifname "lan" accept
    ct status dnat accept
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname "wan" ct state new drop
  }}
  chain inward {{
    type nat hook prerouting priority dstnat; policy accept;
    {inward}
  }}
  chain masquerading {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "wan" masquerade {"fully-random" if kind == Kind.SYMMETRIC else ""}
  }}
}}
"""
