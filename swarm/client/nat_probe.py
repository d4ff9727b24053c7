"""Type of the NAT before this machine, from what others see of connections that leave one local port.

Relays tell in their first message from where a connection comes, and the coordinator in its answer to a join. A NAT
whose mapping is endpoint-independent shows the same outer port to all of them. Then the coordinator dials that port:
whether it gets through shows whom the NAT lets in. Words as in RFC 4787.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

from shoal.swarm.aio import task_scope
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.addresses import reach_of
from shoal.swarm.protocol.types import Address
from shoal.swarm.transport.relay.client import observe
from shoal.swarm.transport.tcp.sockets import share_port

log = logging.getLogger(__name__)

NatMapping = Literal["unknown", "independent", "dependent"]
"""Whether connections from one local port have the same outer port, whomever they are for."""

NatFiltering = Literal["unknown", "open", "address or open", "address", "address or port", "port"]
"""Whom a mapping lets in: everybody; whose address it was used for; whose address and port it was used for."""


@dataclass(frozen=True)
class Sighting:
    """Where a connection came from, as ``observer`` has seen it."""

    observer: str
    outer: tuple[str, int]


def mapping_of(sightings: Iterable[Sighting]) -> NatMapping:
    """Tell the mapping from what several observers saw; one alone shows nothing. Those within our own network, to
    which no NAT leads, do not count, and IPv4 and IPv6 are apart."""
    families: dict[bool, dict[str, tuple[str, int]]] = defaultdict(dict)
    for one in sightings:
        if reach_of(one.outer[0]) == "public":
            families[":" in one.outer[0]][one.observer] = one.outer
    compared = [set(seen.values()) for seen in families.values() if len(seen) > 1]
    if not compared:
        return "unknown"
    return "independent" if all(len(outer) == 1 for outer in compared) else "dependent"


def filtering_of(stranger: bool | None, other_port: bool | None) -> NatFiltering:
    """Tell the filtering from what came in: from an address that the port was not used for, and from another port of
    one that it was used for. None: not tried."""
    if stranger:
        return "open"
    if other_port is None:
        return "unknown" if stranger is None else "address or port"
    if not other_port:
        return "port"
    return "address or open" if stranger is None else "address"


class NatProbe:
    """One local TCP port from which observers are dialed. Use it as a context."""

    def __init__(self) -> None:
        self.sightings: list[Sighting] = []
        self._open = ExitStack()
        place = self._open.enter_context(sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM))
        share_port(place)
        place.bind(("0.0.0.0", 0))
        self.port = int(place.getsockname()[1])

    def __enter__(self) -> NatProbe:
        return self

    def __exit__(self, *about: object) -> None:
        self._open.close()

    async def ask(self, relay: Address) -> tuple[str, int] | None:
        """Have a relay tell from where this port comes; None if it does not answer. The connection stays."""
        try:
            socket, outer = await observe(relay, self.port)
        except LinkError as error:
            log.debug("the relay %s tells nothing: %s", relay, error)
            return None
        self._open.callback(socket.close)
        self.sightings.append(Sighting(f"relay {relay}", outer))
        return outer

    async def lets_in(self, dial: Callable[[], Awaitable[object]]) -> bool | None:
        """Whether a connection comes in at this port while ``dial`` has somebody dial it; None if nobody listens here.

        Nothing can be dialed from here afterwards."""
        loop = asyncio.get_running_loop()
        try:
            listener = self._open.enter_context(sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM))
            share_port(listener)
            listener.setblocking(False)
            listener.bind(("0.0.0.0", self.port))
            listener.listen(4)
        except OSError as error:
            log.debug("cannot listen at the port of the probe: %s", error)
            return None
        async with task_scope() as tasks:
            accepting = tasks.create_task(loop.sock_accept(listener))
            with suppress(LinkError):
                await dial()
            came = accepting.done()
            if came:
                accepting.result()[0].close()
            accepting.cancel()
        return came
