"""Network part of ``shoal doctor``: how others can reach this machine, and what would make that better.

Without an invite it knows this machine's addresses and asks the router for a mapping, which it deletes again. With one
it is a guest of the run for some seconds: the coordinator dials both ports from outside, and members send a few bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import psutil
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from shoal.swarm.aio import task_scope
from shoal.swarm.client.bandwidth_probe import PROBE, ProbeSource, probe, witnesses
from shoal.swarm.client.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.client.observer import keep_place
from shoal.swarm.errors import ShoalError
from shoal.swarm.protocol.addresses import parse_ip, reach_of
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerRelays,
    PeerToCoordinatorGetRelays,
)
from shoal.swarm.protocol.types import Address, DeviceInfo
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.paths.port_mapping import PortMapper

_NOBODY = DeviceInfo(kind="none", name="doctor", memory_bytes=0)
_CLOSE_S, _PROBE_S = 5.0, 5.0

Step = Literal["direct", "mapped", "relayed", "outward", "unknown"]
"""The first way of joining that works: both ports are reached as they are; the router forwards them; over a relay of
the run; only over connections that this machine opens; not known without an invite."""


@dataclass(frozen=True)
class NetworkDiagnosis:
    """Findings. ``own``: this machine's addresses, the public ones first; ``seen_as``: the address that it comes from,
    as the coordinator sees it; ``ports``: those that were tried; ``trouble``: what does not work with them from
    outside, None if nobody has tried; ``attempts``: by protocol, what the router said; ``mapped_trouble``: the same of
    the mapped ports; ``outer``: the router's outer address, as far as it has told; ``rate_bps``: 0 if no member
    answered."""

    own: tuple[str, ...]
    ports: tuple[int, int]
    seen_as: str = ""
    trouble: str | None = None
    attempts: dict[str, str] = field(default_factory=dict)
    mapped: str = ""
    mapped_trouble: str | None = None
    outer: str = ""
    relays: int = 0
    round_trip_s: float = 0.0
    rate_bps: float = 0.0

    @property
    def step(self) -> Step:
        if self.trouble == "":
            return "direct"
        if self.mapped and self.mapped_trouble == "":
            return "mapped"
        if self.trouble is None:
            return "unknown"
        return "relayed" if self.relays else "outward"

    @property
    def nat(self) -> str:
        """Say what stands between this machine and the internet, as far as that can be told."""
        if self.seen_as:
            if self.seen_as in self.own:
                return "none: outside it has its own address"
            if reach_of(self.seen_as) != "public":
                return "not on this way: it reaches the host within a private network"
            if self.outer and self.outer != self.seen_as:
                return "two or more NATs, such as a carrier's behind the router at home"
            return "a NAT"
        if any(reach_of(host) == "public" for host in self.own):
            return "perhaps none: it has a public address"
        if self.outer:
            return "a NAT" if reach_of(self.outer) == "public" else "two or more NATs: the router's address is private"
        return "a NAT, as no address of it is public"


def own_addresses() -> tuple[str, ...]:
    """This machine's IP addresses but loopback and link-local ones, those that everybody can reach first."""
    hosts = [one.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for one in addresses]
    found = [host for host in dict.fromkeys(hosts) if parse_ip(host) is not None]
    usable = [host for host in found if reach_of(host) in ("public", "private")]
    return tuple(sorted(usable, key=lambda host: (reach_of(host) != "public", ":" in host)))


async def examine_network(invite: Invite | None, bind: tuple[str, int], *, maps_ports: bool = True) -> NetworkDiagnosis:
    """Look at this machine's network from inside and, with an invite, from outside. ``bind``: as for ``shoal join``.

    ``maps_ports``: whether the router may be asked. Raises the errors of a join, and ``Unreachable`` for a port that
    is taken."""
    keys = CurveKeys.fresh()

    async def admit(key: bytes) -> bool:
        return invite is not None and key == invite.key

    ports = (bind[1], bind[1] + 1 if bind[1] else 0)
    async with Node.open(keys, bind[0], ports, admit) as node:
        node.publish(PROBE, ProbeSource())
        mapper = PortMapper((node.control_port, node.data_port))
        try:
            if invite is None:
                return await _look_alone(node, mapper, maps_ports=maps_ports)
            me = MemberInfo("doctor", "observer", _NOBODY)
            client = CoordinatorClient(node, Identity.generate(), keys, invite, me)
            await client.join()
            async with task_scope() as tasks:
                beats = tasks.create_task(keep_place(client))
                try:
                    return await _look_from_outside(client, mapper, maps_ports=maps_ports)
                finally:
                    beats.cancel()
                    await client.leave("observed")
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await mapper.close()


async def _look_alone(node: Node, mapper: PortMapper, *, maps_ports: bool) -> NetworkDiagnosis:
    mapping = await mapper.open() if maps_ports else None
    return NetworkDiagnosis(
        own=own_addresses(),
        ports=(node.control_port, node.data_port),
        attempts=dict(mapper.attempts),
        mapped=str(mapping or ""),
        outer=mapper.outer_host,
    )


async def _look_from_outside(client: CoordinatorClient, mapper: PortMapper, *, maps_ports: bool) -> NetworkDiagnosis:
    node = client.node
    own = Address(host="", control_port=node.control_port, data_port=node.data_port)
    trouble = await client.try_address(own)
    mapped_trouble, mapping = None, await mapper.open() if trouble and maps_ports else None
    if mapping is not None:
        control, data = mapping.control.port, mapping.data.port
        at = Address(kind="mapped", host=mapping.host, control_port=control, data_port=data)
        mapped_trouble = await client.try_address(at)
    relays = (await client.ask(PeerToCoordinatorGetRelays(), CoordinatorToPeerRelays)).relays
    rate_bps = 0.0
    with suppress(ShoalError, TimeoutError):
        async with asyncio.timeout(_PROBE_S):
            rate_bps = await probe(node, witnesses(node.trainers(), client.peer))
    return NetworkDiagnosis(
        own=own_addresses(),
        ports=(node.control_port, node.data_port),
        seen_as=client.observed_host,
        trouble=trouble,
        attempts=dict(mapper.attempts),
        mapped=str(mapping or ""),
        mapped_trouble=mapped_trouble,
        outer=mapper.outer_host,
        relays=len(relays),
        round_trip_s=client.round_trip_s,
        rate_bps=rate_bps,
    )


# What is said -----------------------------------------------------------------------------------------------------

_STEPS: dict[Step, str] = {
    "direct": "both ports are reached from outside: nothing else is needed",
    "mapped": "the router forwards both ports: `shoal join` does that by itself",
    "relayed": "over a relay of the run, for whatever others have to send here",
    "outward": "only over connections that this machine opens: it takes part while another member can be reached",
    "unknown": "nobody has tried from outside: give a run's invite, `shoal doctor INVITE`",
}


def network_advice(found: NetworkDiagnosis) -> Iterator[str]:
    """Advice to the owner of this machine, the most important first."""
    if found.step in ("outward", "relayed") or (found.step == "unknown" and not found.mapped):
        if found.trouble and found.trouble.startswith("its control port answers"):
            yield "One port is open and the other is not: forward or open both, PORT and PORT + 1."
        elif found.seen_as and found.seen_as in found.own:
            yield "A firewall keeps others out: let in TCP to two ports, and give the first with --bind 0.0.0.0:PORT."
        elif "two or more" in found.nat:
            yield "Your provider has a NAT of its own: ask it for a public address, or use IPv6 or a relay."
        else:
            yield (
                "Forward two TCP ports to this machine in the router, and join with --bind 0.0.0.0:PORT --advertise "
                f"{found.seen_as or 'ADDRESS'}:PORT; or switch UPnP or NAT-PMP on in the router."
            )
    if "pip install" in found.attempts.get("UPnP", "") and found.step not in ("direct", "mapped"):
        yield "Most routers map ports by UPnP: pip install 'shoal\\[nat]'."
    if found.mapped_trouble:
        yield f"The router says that it forwards {escape(found.mapped)}, but {escape(found.mapped_trouble)}."


def network_report(found: NetworkDiagnosis) -> RenderableType:
    """Render the findings for a terminal of 80 columns or more."""
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in _facts(found):
        facts.add_row(name, escape(value))
    lines = Table(box=None, pad_edge=False, show_header=False)
    lines.add_column(style="yellow", no_wrap=True)
    lines.add_column()
    for line in network_advice(found):
        lines.add_row("•", line)
    return Group(facts, lines)


def _facts(found: NetworkDiagnosis) -> Sequence[tuple[str, str]]:
    seen = f"; from outside {found.seen_as}" if found.seen_as else ""
    answers = {None: "not tried from outside", "": "reached from outside"}.get(found.trouble, found.trouble or "")
    rows = [
        ("address", (", ".join(found.own) or "none but this machine's own") + seen),
        ("NAT", found.nat),
        ("ports", f"{found.ports[0]} and {found.ports[1]}: {answers}"),
    ]
    rows += [("mapping", f"{way}: {what}") for way, what in found.attempts.items()]
    if found.mapped and found.mapped_trouble == "":
        rows.append(("mapping", f"{found.mapped}: reached from outside"))
    if found.seen_as:
        rows.append(("relays", str(found.relays) if found.relays else "the run has none"))
        rows.append(("round trip", f"{1000 * found.round_trip_s:.1f} ms to the coordinator"))
        rate = f"{found.rate_bps / 1e6:,.0f} Mbit/s from members" if found.rate_bps else "no member answered"
        rows.append(("rate", rate))
    return [*rows, ("joins", _STEPS[found.step])]
