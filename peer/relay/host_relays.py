"""Relays of one hosted run, each signed by the host: the one beside it, or those over which it is reached itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from shoal.peer.relay.process import RelayProcess
from shoal.swarm.errors import Unreachable
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.paths import SignedRelay, sign_relay
from shoal.swarm.protocol.relay_url import RelayUrl
from shoal.swarm.protocol.types import Address, RelayLoad
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.relay.client import RelayCredentials, measure

_MEASURE_EVERY_S = 30.0


def _same(credentials: RelayCredentials) -> RelayCredentials:
    return credentials


class HostRelays:
    """The relays that a host names to the members of its run, with what they carry."""

    def __init__(self, identity: Identity, run_hash: bytes, node: Node) -> None:
        self._identity, self._run_hash, self._node = identity, run_hash, node
        self._signed: dict[Address, SignedRelay] = {}
        self._via: tuple[Address, ...] = ()
        self._loads: dict[Address, RelayLoad] = {}
        self._beside: tuple[RelayProcess, str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def run_beside(self, relay: RelayProcess, advertised: str) -> None:
        """Name this relay to members, at the host ``advertised``; it runs from their first question for it on."""
        self._beside = relay, advertised
        self._tasks.append(asyncio.create_task(relay.run()))

    async def register(self, urls: tuple[RelayUrl, ...], wait_s: float) -> None:
        """Have the coordinator reached over these relays. Raises ``Unreachable`` if none has answered in time."""
        changed = asyncio.Event()
        certificate = self._identity.certify(self._node.control.keys)
        registrations = []
        for url in urls:
            mine = RelayCredentials(self._identity, self._node.control.keys, certificate, None, url.token)
            registration, task = self._node.relays.register(url.address, partial(_same, mine), changed.set)
            registrations.append(registration)
            self._tasks.append(task)
        self._via = tuple(url.address for url in urls)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not any(one.is_registered for one in registrations) and not all(
                    one.trouble for one in registrations
                ):
                    changed.clear()
                    await changed.wait()
        if not any(one.is_registered for one in registrations):
            troubles = "; ".join(f"{one.relay}: {one.trouble or 'no answer'}" for one in registrations)
            raise Unreachable(f"this host is not registered with any relay of --via ({troubles})")
        self._tasks.append(asyncio.create_task(self._measure()))

    async def close(self) -> None:
        """Withdraw the registrations, and end the relay beside."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _measure(self) -> None:
        """Look now and then what the relays elsewhere carry."""
        while True:
            for address in self._via:
                measured = await measure(address)
                if measured is None:
                    self._loads.pop(address, None)
                else:
                    self._loads[address] = measured.load
            await asyncio.sleep(_MEASURE_EVERY_S)

    def named(self) -> tuple[SignedRelay, ...]:
        """The run's relays that are the host's, for members who ask; the one beside is started if it does not run."""
        addresses = list(self._via)
        if self._beside is not None and (url := self._beside[0].url()) is not None:
            addresses.append(url.address.model_copy(update={"host": self._beside[1]}))
        for address in addresses:
            if address not in self._signed:
                assert address.relay_key is not None
                place = address.host, address.control_port
                self._signed[address] = sign_relay(self._identity.sign, self._run_hash, address.relay_key, place)
        return tuple(self._signed[address] for address in addresses)

    def loads(self) -> tuple[tuple[Address, RelayLoad | None], ...]:
        """What each of them carries, as far as it is known; none is started for that."""
        found: list[tuple[Address, RelayLoad | None]] = [(one, self._loads.get(one)) for one in self._via]
        if self._beside is not None and (url := self._beside[0].running_at) is not None:
            address = url.address.model_copy(update={"host": self._beside[1]})
            found.append((address, self._beside[0].load))
        return tuple(found)
