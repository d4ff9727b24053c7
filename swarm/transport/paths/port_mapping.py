"""Port mappings at the router of a home network, by PCP (RFC 6887), NAT-PMP (RFC 6886) or UPnP.

PCP and NAT-PMP are a few datagrams to the default gateway and are spoken here; UPnP needs ``miniupnpc``, if that is
installed (``shoal[nat]``). Mappings are leases: they are renewed while they are used, and deleted at the end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket as sockets
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shoal.swarm.aio import in_thread
from shoal.swarm.protocol.addresses import join_host_port, reach_of

log = logging.getLogger(__name__)

LEASE_S = 3600
"""Length of a lease that is asked for. After a crash a mapping stays for so long."""

_SERVER_PORT = 5351
_WAITS_S = (0.25, 0.5, 1.0)
"""Waits for an answer, each after another datagram (RFC 6886, 3.1, which goes on for a minute)."""

_MOST_BYTES = 1100
_TCP = 6
_ANY_ADDRESS = bytes(10) + b"\xff\xff" + bytes(4)
_DISCOVER_MS = 2000
_DESCRIPTION = "shoal"


class NoMapping(Exception):
    """A router maps no port in this way; the message says why."""


@dataclass(frozen=True)
class MappedPort:
    """A port of the router that is forwarded to this machine. ``lease_s``: 0 for ever."""

    host: str
    port: int
    lease_s: float


@dataclass(frozen=True)
class Mapping:
    """Both ports of a peer, mapped. ``method``: by which protocol."""

    method: str
    control: MappedPort
    data: MappedPort

    @property
    def host(self) -> str:
        return self.control.host

    def __str__(self) -> str:
        ports = f"{join_host_port(self.host, self.control.port)} and {self.data.port}"
        return f"{ports} by {self.method}"


class Router(Protocol):
    """A way to ask the router for mappings. Both methods raise ``NoMapping``."""

    name: str

    async def map_port(self, port: int, wanted: int, lease_s: int) -> MappedPort: ...

    async def delete(self, port: int, mapped: MappedPort) -> None: ...


# PCP and NAT-PMP ---------------------------------------------------------------------------------------------------


def default_gateway(routes: str | None = None) -> str:
    """Return the IPv4 address of the default gateway; empty if there is none.

    ``routes``: the kernel's table of routes, as in ``/proc/net/route``. Elsewhere than on Linux the first address of
    this machine's /24 is taken for it, as nearly all home routers have that."""
    if routes is None and sys.platform == "linux":
        with suppress(OSError):
            routes = Path("/proc/thread-self/net/route").read_text()
    if routes is not None:
        for line in routes.splitlines()[1:]:
            _, target, gateway, flags, *_ = line.split()
            if int(target, 16) == 0 and int(flags, 16) & 2:
                return str(ipaddress.IPv4Address(struct.pack("<I", int(gateway, 16))))
        return ""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(ipaddress.ip_network(f"{probe.getsockname()[0]}/24", strict=False)[1])
    return ""


class _Datagrams:
    """Requests to a server of the gateway, from one socket, which hears that server alone."""

    def __init__(self, gateway: str, port: int = _SERVER_PORT) -> None:
        self._at = gateway, port

    async def ask(self, request: Callable[[str], bytes], is_answer: Callable[[bytes], bool]) -> bytes:
        """Send until an answer comes. ``request``: made for this machine's own address. Raises ``NoMapping``."""
        loop = asyncio.get_running_loop()
        with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as socket:
            socket.setblocking(False)
            try:
                socket.connect(self._at)
                data = request(socket.getsockname()[0])
                for wait_s in _WAITS_S:
                    await loop.sock_sendall(socket, data)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            while not is_answer(answer := await loop.sock_recv(socket, _MOST_BYTES)):
                                pass
                            return answer
            except OSError as error:
                raise NoMapping(f"the router refuses: {error}") from error
        raise NoMapping("the router does not answer")


_PCP_RESULTS = {2: "not authorised", 4: "it has no resources", 8: "it has no resources", 9: "unsupported protocol"}


class Pcp:
    """The Port Control Protocol, version 2."""

    name = "PCP"

    def __init__(self, gateway: str, port: int = _SERVER_PORT) -> None:
        self._datagrams = _Datagrams(gateway, port)
        self._nonces: dict[int, bytes] = {}

    async def map_port(self, port: int, wanted: int, lease_s: int) -> MappedPort:
        nonce = self._nonces.setdefault(port, secrets.token_bytes(12))

        def request(own_host: str) -> bytes:
            own = bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(own_host).packed
            header = struct.pack(">BBHI", 2, 1, 0, lease_s) + own
            return header + nonce + struct.pack(">B3xHH", _TCP, port, wanted) + _ANY_ADDRESS

        def is_answer(data: bytes) -> bool:
            if len(data) < 24 or data[:2] != b"\x02\x81":
                return data[:1] == b"\x00"  # a server of NAT-PMP alone says so
            return data[3] != 0 or (len(data) >= 60 and data[24:36] == nonce)

        answer = await self._datagrams.ask(request, is_answer)
        if answer[0] != 2:
            raise NoMapping("the router does not speak it")
        if result := answer[3]:
            raise NoMapping(f"the router refuses: {_PCP_RESULTS.get(result, f'error {result}')}")
        (granted_s,) = struct.unpack_from(">I", answer, 4)
        (external,) = struct.unpack_from(">H", answer, 42)
        address = ipaddress.IPv6Address(answer[44:60])
        return MappedPort(str(address.ipv4_mapped or address), external, granted_s)

    async def delete(self, port: int, mapped: MappedPort) -> None:
        await self.map_port(port, mapped.port, 0)


class NatPmp:
    """The NAT Port Mapping Protocol."""

    name = "NAT-PMP"

    def __init__(self, gateway: str, port: int = _SERVER_PORT) -> None:
        self._datagrams = _Datagrams(gateway, port)

    async def map_port(self, port: int, wanted: int, lease_s: int) -> MappedPort:
        host = str(ipaddress.IPv4Address((await self._ask(b"\x00\x00", 0, 12))[8:12])) if lease_s else ""
        answer = await self._ask(struct.pack(">BBHHHI", 0, 2, 0, port, wanted, lease_s), 2, 16)
        external, granted_s = struct.unpack_from(">HI", answer, 10)
        return MappedPort(host, external, granted_s)

    async def _ask(self, request: bytes, operation: int, size: int) -> bytes:
        def is_answer(data: bytes) -> bool:
            return len(data) >= 8 and data[:2] == bytes([0, 128 + operation])

        answer = await self._datagrams.ask(lambda own_host: request, is_answer)
        if result := int.from_bytes(answer[2:4], "big"):
            raise NoMapping(f"the router refuses: error {result}")
        if len(answer) < size:
            raise NoMapping("the router's answer is too short")
        return answer

    async def delete(self, port: int, mapped: MappedPort) -> None:
        await self.map_port(port, 0, 0)


# UPnP --------------------------------------------------------------------------------------------------------------


class Upnp:
    """UPnP's Internet Gateway Device, through ``miniupnpc``. Its calls block, so threads make them."""

    name = "UPnP"

    def __init__(self) -> None:
        self._device: Any = None

    async def map_port(self, port: int, wanted: int, lease_s: int) -> MappedPort:
        return await in_thread(self._map_port, port, wanted, lease_s)

    def _map_port(self, port: int, wanted: int, lease_s: int) -> MappedPort:
        device = self._device = self._device or _find_device()
        trouble: Exception | None = None
        for seconds in (lease_s, 0):  # some routers know permanent mappings only
            try:
                device.addportmapping(wanted, "TCP", device.lanaddr, port, _DESCRIPTION, "", seconds)
                return MappedPort(device.externalipaddress(), wanted, seconds)
            except Exception as error:  # noqa: BLE001 - it raises plain exceptions
                trouble = error
        raise NoMapping(f"the router refuses: {trouble}") from trouble

    async def delete(self, port: int, mapped: MappedPort) -> None:
        await in_thread(self._delete, mapped.port)

    def _delete(self, external: int) -> None:
        try:
            self._device.deleteportmapping(external, "TCP")
        except Exception as error:
            raise NoMapping(str(error)) from error


def _find_device() -> Any:
    try:
        import miniupnpc
    except ImportError as error:
        raise NoMapping("not tried, it needs pip install 'shoal[nat]'") from error
    device = miniupnpc.UPnP()
    device.discoverdelay = _DISCOVER_MS
    try:
        if not device.discover():
            raise NoMapping("no router answers")
        device.selectigd()
    except NoMapping:
        raise
    except Exception as error:  # it raises plain exceptions
        raise NoMapping(f"no router answers: {error}") from error
    return device


# Both ports --------------------------------------------------------------------------------------------------------


def routers() -> list[Router]:
    """The ways to try on this machine, in order."""
    gateway = default_gateway()
    ways: list[Router] = [Pcp(gateway), NatPmp(gateway)] if gateway else []
    return [*ways, Upnp()]


@dataclass
class PortMapper:
    """Mappings of a peer's two ports. ``attempts``: by way, what came of it, for people; ``outer_host``: the
    router's outer address, once it has told that."""

    ports: tuple[int, int]
    ways: list[Router] = field(default_factory=routers)
    mapping: Mapping | None = None
    attempts: dict[str, str] = field(default_factory=dict)
    outer_host: str = ""
    _way: Router | None = None

    async def open(self) -> Mapping | None:
        """Map both ports in the first way that works; None if none does. See ``attempts``."""
        for way in self.ways:
            try:
                mapping = await self._map_both(way, self.ports)
            except NoMapping as error:
                self.attempts[way.name] = str(error)
                continue
            self._way, self.mapping, self.outer_host = way, mapping, mapping.host
            if reach_of(mapping.host) == "public":
                self.attempts[way.name] = f"maps {mapping}"
                return mapping
            # A router behind another one, of the house or of the carrier.
            self.attempts[way.name] = f"maps {mapping}, but that address is not public: there is another NAT behind it"
            await self.close()
        return None

    async def renew(self) -> bool:
        """Renew the leases; returns whether the ports or the address are others now. Raises ``NoMapping``."""
        assert self._way is not None
        assert self.mapping is not None
        before, wanted = self.mapping, (self.mapping.control.port, self.mapping.data.port)
        self.mapping = await self._map_both(self._way, wanted)
        return [_place(before.control), _place(before.data)] != [
            _place(self.mapping.control),
            _place(self.mapping.data),
        ]

    @property
    def renew_after_s(self) -> float:
        """Time until the leases have to be renewed: half of the shorter one."""
        assert self.mapping is not None
        leases_s = [one.lease_s for one in (self.mapping.control, self.mapping.data) if one.lease_s]
        return max(1.0, min(leases_s, default=LEASE_S) / 2)

    async def close(self) -> None:
        """Delete the mappings, as far as the router lets us."""
        way, mapping, self._way, self.mapping = self._way, self.mapping, None, None
        if way is not None and mapping is not None:
            for port, mapped in zip(self.ports, (mapping.control, mapping.data), strict=True):
                try:
                    await way.delete(port, mapped)
                except NoMapping as error:
                    log.info("the router keeps the mapping of port %d until its lease ends: %s", mapped.port, error)

    async def _map_both(self, way: Router, wanted: tuple[int, int]) -> Mapping:
        control = await way.map_port(self.ports[0], wanted[0], LEASE_S)
        try:
            return Mapping(way.name, control, await way.map_port(self.ports[1], wanted[1], LEASE_S))
        except NoMapping:
            with suppress(NoMapping):
                await way.delete(self.ports[0], control)
            raise


def _place(mapped: MappedPort) -> tuple[str, int]:
    return mapped.host, mapped.port
