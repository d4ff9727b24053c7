"""A member's use of the run's relays: a fresh pass, registrations if nobody can dial it, dialing others on request."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import FINAL_ERRORS, LinkError, NotAdmitted, Unreachable
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerDial,
    CoordinatorToPeerRelays,
    PeerToCoordinatorGetRelays,
    PeerToCoordinatorRequestDial,
)
from shoal.swarm.protocol.paths import PASS_S, check_relay
from shoal.swarm.protocol.types import Address, Message, RosterEntry
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.relay.choice import choose
from shoal.swarm.transport.relay.client import Registration, RelayCredentials, measure

log = logging.getLogger(__name__)

_RENEW_S = 600.0
"""A pass is renewed this long before it expires."""

_LOOK_S, _FIRST_LOOK_S = 60.0, 1.0
"""Time between two looks at which relays there are, and at first, while none of them has answered."""

_MOST_USED = 2
"""Relays that a member is registered with, so that one that dies costs its links a reconnect."""

_FIRST_PASS_S = 5.0
_REQUEST_DIAL_S, _AGAIN_S = 2.0, 3.0


class RelayAccess:
    """Access of one membership to the run's relays. ``credentials`` is for ``RelayPaths``; ``run`` for a task."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._credentials: RelayCredentials | None = None
        self._relays: tuple[Address, ...] = ()
        self._of_members: set[Address] = set()
        """Those relays that members run."""
        self._expires_s = 0.0
        """On the monotonic clock: the host's clock, which the pass names, may differ from this machine's."""
        self._renewing = asyncio.Lock()
        self._asked_s: dict[str, float] = {}
        client.node.control.handle(CoordinatorToPeerDial, self._on_dial)
        client.node.request_dial, client.node.is_met_by = self.request_dial, self._is_met_by

    async def credentials(self) -> RelayCredentials | None:
        """What this member shows to relays. Raises ``LinkError``.

        The coordinator is asked only if there is no valid pass: it may be away."""
        if time.monotonic() > self._expires_s:
            try:
                async with asyncio.timeout(_FIRST_PASS_S), self._renewing:
                    if time.monotonic() > self._expires_s:
                        await self._renew()
            except TimeoutError as error:
                raise Unreachable("the coordinator does not answer, and there is no pass for relays") from error
        return self._credentials

    async def _renew(self) -> None:
        client, asked_s = self._client, time.monotonic()
        answer = await client.ask(PeerToCoordinatorGetRelays(), CoordinatorToPeerRelays)
        known = []
        for relay in answer.relays:
            try:
                check_relay(relay, client.invite.run_hash, client.coordinator_key)
            except NotAdmitted as error:
                log.warning("ignored the relay %s: %s", relay.address, error)
            else:
                known.append(relay)
        self._relays = tuple(relay.address for relay in known)
        self._of_members = {relay.address for relay in known if relay.of_member}
        self._credentials = RelayCredentials(client.identity, client.keys, client.certificate, answer.relay_pass)
        self._expires_s = asked_s + PASS_S

    def held_credentials(self) -> RelayCredentials | None:
        """The pass that is here, if it is still valid."""
        return self._credentials if time.monotonic() <= self._expires_s else None

    def _current(self) -> RelayCredentials:
        assert self._credentials is not None, "asked before registering"
        return self._credentials

    # Being dialed -----------------------------------------------------------------------------------------

    def _is_met_by(self, entry: RosterEntry) -> bool:
        """Whether a member that cannot be dialed from here gets further than we do: over our relay only if its own
        address is what we cannot reach, as otherwise its relay leads to it just as well."""
        return self._client.reachable or (entry.reachable and bool(self._client.relays))

    async def request_dial(self, peer: str) -> None:
        """Ask over the coordinator that a member dials this one. Raises ``LinkError``."""
        now_s = time.monotonic()
        if now_s - self._asked_s.get(peer, -_AGAIN_S) < _AGAIN_S:
            return
        self._asked_s = {other: at_s for other, at_s in self._asked_s.items() if now_s - at_s < _AGAIN_S}
        self._asked_s[peer] = now_s
        await self._client.request_dial(PeerToCoordinatorRequestDial(peer=peer), _REQUEST_DIAL_S)

    async def _on_dial(self, channel: Channel, message: Message) -> None:
        assert isinstance(message, CoordinatorToPeerDial)
        if self._client.is_coordinator(channel):
            self._client.node.dial_back(message.peer)

    # Registering ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Be registered with relays as long as nobody can dial this member, until cancelled."""
        client, changed = self._client, asyncio.Event()
        registrations: dict[Address, tuple[Registration, asyncio.Task[None]]] = {}
        pause_s = _FIRST_LOOK_S
        try:
            while True:
                wanted = await self._wanted()
                for relay in registrations.keys() - set(wanted):
                    registrations.pop(relay)[1].cancel()
                for relay in wanted:
                    if relay not in registrations:
                        registrations[relay] = client.node.relays.register(
                            relay, self._current, changed.set, names_callers=relay not in self._of_members
                        )
                changed.clear()
                await self._show([relay for relay in wanted if registrations[relay][0].is_registered])
                is_met = client.reachable or bool(client.relays)
                pause_s = _LOOK_S if is_met else min(2 * pause_s, _LOOK_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await changed.wait()
        finally:
            for _, task in registrations.values():
                task.cancel()

    async def _wanted(self) -> tuple[Address, ...]:
        """The relays to be registered with: none for a member that can be dialed, otherwise the best ones.

        A pass that was needed once is renewed in time."""
        client = self._client
        is_met = client.reachable or client.me.role == "observer"
        if is_met and (self._credentials is None or time.monotonic() < self._expires_s - _RENEW_S):
            return ()
        try:
            async with self._renewing:
                await self._renew()
        except FINAL_ERRORS:
            raise
        except LinkError as error:
            log.debug("the run's relays are not known: %s", error)
        if is_met:
            return ()
        if len(self._relays) < 2:
            return self._relays
        measures = await asyncio.gather(*(measure(relay) for relay in self._relays))
        return choose(dict(zip(self._relays, measures, strict=True)), client.relays, _MOST_USED)

    async def _show(self, relays: list[Address]) -> None:
        """Tell the coordinator over which relays this member is reached now."""
        client = self._client
        if tuple(relays) == client.relays:
            return
        client.relays = tuple(relays)
        try:
            await client.show_addresses()
        except FINAL_ERRORS:
            raise
        except LinkError as error:  # the coordinator is away, or refuses
            client.relays = ()  # the next look tries again
            log.debug("the coordinator did not take over the relays: %s", error)
        else:
            where = " and ".join(map(str, relays))
            if relays:
                log.info("other peers reach this machine over the relay %s", where)
            elif not client.reachable:
                log.warning("this machine has lost its relays: other peers cannot reach it now")
