"""Network part of ``shoal doctor``: how others can reach this machine, and what would make that better.

Without an invite it knows this machine's addresses and asks the router for a mapping, which it deletes again. With one
it is a guest of the run for some seconds: the coordinator dials both ports from outside, and members send a few bytes.
The type of the NAT is found by what the coordinator and relays, of the run or named ones, see of one local port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import psutil
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from shoal.swarm.aio import task_scope
from shoal.swarm.client.bandwidth_probe import PROBE, ProbeSource, probe, witnesses
from shoal.swarm.client.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.client.nat_probe import NatFiltering, NatMapping, NatProbe, Sighting, filtering_of, mapping_of
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
_RELAY_S, _LOOK_S = 8.0, 1.0
"""Time for the relay beside a host, which may only be starting now, and between two looks for it."""

_MOST_RELAYS = 4

Step = Literal["direct", "mapped", "relayed", "outward", "unknown"]
"""The first way of joining that works: both ports are reached as they are; the router forwards them; over a relay of
the run; only over connections that this machine opens; not known without an invite."""


@dataclass(frozen=True)
class NetworkDiagnosis:
    """Findings. ``own``: this machine's addresses, the public ones first; ``ports``: those that were tried;
    ``seen_as``: the address that it comes from, as the coordinator or a relay sees it; ``trouble``: what does not work
    with these ports from outside, None if nobody has tried; ``attempts``: by protocol, what the router said;
    ``mapped_trouble``: the same of the mapped ports; ``outer``: the router's outer address, as far as it has told;
    ``mapping`` and ``filtering``: those of the NAT or firewall; ``rate_bps``: 0 if no member answered."""

    own: tuple[str, ...]
    ports: tuple[int, int]
    seen_as: str = ""
    trouble: str | None = None
    attempts: dict[str, str] = field(default_factory=dict)
    mapped: str = ""
    mapped_trouble: str | None = None
    outer: str = ""
    mapping: NatMapping = "unknown"
    filtering: NatFiltering = "unknown"
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


async def examine_network(
    invite: Invite | None, bind: tuple[str, int], relays: Sequence[Address] = (), *, maps_ports: bool = True
) -> NetworkDiagnosis:
    """Look at this machine's network from inside and, with an invite, from outside. ``bind``: as for ``shoal join``.

    ``relays``: further ones that tell from where this machine comes; ``maps_ports``: whether the router may be asked.
    Raises the errors of a join, and ``Unreachable`` for a port that is taken."""
    keys = CurveKeys.fresh()

    async def admit(key: bytes) -> bool:
        return invite is not None and key == invite.key

    ports = (bind[1], bind[1] + 1 if bind[1] else 0)
    async with Node.open(keys, bind[0], ports, admit) as node:
        node.publish(PROBE, ProbeSource())
        mapper = PortMapper((node.control_port, node.data_port))
        try:
            with NatProbe() as nat:
                if invite is None:
                    return await _look_alone(node, mapper, nat, relays, maps_ports=maps_ports)
                me = MemberInfo("doctor", "observer", _NOBODY)
                client = CoordinatorClient(node, Identity.generate(), keys, invite, me, from_port=nat.port)
                await client.join()
                async with task_scope() as tasks:
                    beats = tasks.create_task(keep_place(client))
                    try:
                        return await _look_from_outside(client, mapper, nat, relays, maps_ports=maps_ports)
                    finally:
                        beats.cancel()
                        await client.leave("observed")
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await mapper.close()


async def _look_alone(
    node: Node, mapper: PortMapper, nat: NatProbe, relays: Sequence[Address], *, maps_ports: bool
) -> NetworkDiagnosis:
    mapping = await mapper.open() if maps_ports else None
    await asyncio.gather(*(nat.ask(relay) for relay in relays[:_MOST_RELAYS]))
    return NetworkDiagnosis(
        own=own_addresses(),
        ports=(node.control_port, node.data_port),
        seen_as=next((one.outer[0] for one in nat.sightings), ""),
        attempts=dict(mapper.attempts),
        mapped=str(mapping or ""),
        outer=mapper.outer_host,
        mapping=mapping_of(nat.sightings),
    )


async def _look_from_outside(
    client: CoordinatorClient, mapper: PortMapper, nat: NatProbe, others: Sequence[Address], *, maps_ports: bool
) -> NetworkDiagnosis:
    node = client.node
    own = Address(host="", control_port=node.control_port, data_port=node.data_port)
    trouble = await client.try_address(own)
    mapped_trouble, mapping = None, await mapper.open() if trouble and maps_ports else None
    if mapping is not None:
        control, data = mapping.control.port, mapping.data.port
        at = Address(kind="mapped", host=mapping.host, control_port=control, data_port=data)
        mapped_trouble = await client.try_address(at)
    relays = await _relays(client, _RELAY_S if trouble else 0.0)
    filtering: NatFiltering = "unknown"
    if trouble or client.observed_host not in own_addresses():
        filtering = await _look_at_nat(client, nat, (*relays, *others))
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
        mapping=mapping_of(nat.sightings),
        filtering=filtering,
        relays=len(relays),
        round_trip_s=client.round_trip_s,
        rate_bps=rate_bps,
    )


async def _relays(client: CoordinatorClient, wait_s: float) -> tuple[Address, ...]:
    """The run's relays; the one beside its host may be starting only now."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + wait_s
    while True:
        answer = await client.ask(PeerToCoordinatorGetRelays(), CoordinatorToPeerRelays)
        if answer.relays or loop.time() >= give_up_s:
            return tuple(relay.address for relay in answer.relays)
        await asyncio.sleep(_LOOK_S)


async def _look_at_nat(client: CoordinatorClient, nat: NatProbe, relays: Sequence[Address]) -> NatFiltering:
    """Have the coordinator and relays tell from where one port comes, and the coordinator dial it there.

    From an address that a port was never used for, if there is a relay elsewhere; and from another port of one that
    it was used for."""
    usable = relays[:_MOST_RELAYS]
    await asyncio.gather(*(nat.ask(relay) for relay in usable))
    is_direct = client.observed_port > 0
    elsewhere = [relay for relay in usable if not is_direct or relay.host != client.coordinator_host]
    stranger, other_port = None, None

    async def dial(outer: tuple[str, int]) -> None:
        await client.try_address(Address(host=outer[0], control_port=outer[1], data_port=outer[1]))

    for relay in elsewhere[:1]:
        with NatProbe() as fresh:
            outer = await fresh.ask(relay)
            if outer is not None:
                stranger = await fresh.lets_in(partial(dial, outer))
    if is_direct:
        outer = client.observed_host, client.observed_port
        nat.sightings.append(Sighting("the coordinator", outer))
        if not stranger:
            other_port = await nat.lets_in(partial(dial, outer))
    return filtering_of(stranger, other_port)


# What is said -----------------------------------------------------------------------------------------------------

_STEPS: dict[Step, str] = {
    "direct": "both ports are reached from outside: nothing else is needed",
    "mapped": "the router forwards both ports: `shoal join` does that by itself",
    "relayed": "over a relay of the run, for whatever others have to send here",
    "outward": "only over connections that this machine opens: it takes part while another member can be reached",
    "unknown": "nobody has tried from outside: give a run's invite, `shoal doctor INVITE`",
}


_MAPPINGS: dict[NatMapping, str] = {
    "independent": "one outer port for everybody (endpoint-independent mapping)",
    "dependent": "another outer port for each destination (endpoint-dependent mapping, a symmetric NAT)",
    "unknown": "not known, as fewer than two others have told from where this machine comes",
}
_FILTERINGS: dict[NatFiltering, str] = {
    "open": "lets in everybody (a full cone)",
    "address or open": "lets in at least all ports of an address that it was used for (a cone)",
    "address": "lets in all ports of an address that it was used for (a restricted cone)",
    "address or port": "lets in only whom it was used for",
    "port": "lets in only the address and port that it was used for (port-restricted)",
    "unknown": "",
}
_MEANINGS: dict[NatMapping, str] = {
    "independent": "two machines behind such NATs meet directly, as both dial at the same moment",
    "dependent": (
        "nobody knows which port to dial here: it meets directly whoever can be dialed, and cones; others over a relay"
    ),
    "unknown": "",
}


def _nat_type(found: NetworkDiagnosis) -> list[tuple[str, str]]:
    """Say what kind of NAT or firewall this is, and what that means; nothing where there is none."""
    is_own = found.seen_as in found.own
    if not found.seen_as or (is_own and found.trouble == "") or reach_of(found.seen_as) != "public":
        return []
    mapping = "this machine's own ports, behind a firewall" if is_own else _MAPPINGS[found.mapping]
    meaning = _MEANINGS["independent" if is_own else found.mapping]
    rows = [("NAT type", "; ".join(filter(None, (mapping, _FILTERINGS[found.filtering]))))]
    return [*rows, ("", meaning)] if meaning else rows


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
    is_reached = found.step in ("direct", "mapped")
    if found.mapping == "dependent" and not is_reached:
        yield (
            "Many routers have a setting for their NAT, such as cone or moderate instead of symmetric or strict: with "
            "it others are met directly."
        )
    if found.mapping == "unknown" and found.seen_as and found.seen_as not in found.own and not is_reached:
        yield "The type of the NAT is found with a relay at another address: --relay 'shoal-relay://…'."
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
        *_nat_type(found),
        ("ports", f"{found.ports[0]} and {found.ports[1]}: {answers}"),
    ]
    rows += [("mapping", f"{way}: {what}") for way, what in found.attempts.items()]
    if found.mapped and found.mapped_trouble == "":
        rows.append(("mapping", f"{found.mapped}: reached from outside"))
    if found.trouble is not None:
        rows.append(("relays", str(found.relays) if found.relays else "the run has none"))
        rows.append(("round trip", f"{1000 * found.round_trip_s:.1f} ms to the coordinator"))
        rate = f"{found.rate_bps / 1e6:,.0f} Mbit/s from members" if found.rate_bps else "no member answered"
        rows.append(("rate", rate))
    return [*rows, ("joins", _STEPS[found.step])]
