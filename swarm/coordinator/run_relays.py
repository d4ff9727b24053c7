"""Relays of a run: those of its host, and those that members with a public address offer to the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.swarm.protocol.paths import RELAY_OFFER_S, SignedRelay
from shoal.swarm.protocol.types import MAX_RUN_RELAYS, Address, RelayLoad, RelayStatus

_MAX_OFFERS = 64
_FULL = 0.9
"""A relay as busy as that is named after all others."""


class HostRelaySource(Protocol):
    """The relays that a host names itself."""

    def named(self) -> tuple[SignedRelay, ...]:
        """Return them; called when a member asks, so that one may be started only then."""
        ...

    def loads(self) -> tuple[tuple[Address, RelayLoad | None], ...]:
        """Return what each that runs carries, as far as it is known."""
        ...


class NoRelays:
    """A host without relays."""

    def named(self) -> tuple[SignedRelay, ...]:
        return ()

    def loads(self) -> tuple[tuple[Address, RelayLoad | None], ...]:
        return ()


@dataclass(frozen=True)
class _Offer:
    relay: SignedRelay
    load: RelayLoad
    until_s: float


class RunRelays:
    """Relays that are named to a run's members. Moments are on any one clock."""

    def __init__(self) -> None:
        self.host: HostRelaySource = NoRelays()
        self._offers: dict[str, _Offer] = {}

    def offer(self, peer: str, relay: SignedRelay, load: RelayLoad, now_s: float) -> bool:
        """Take a member's relay over that has just answered; returns False if there are too many."""
        if peer not in self._offers and len(self._offers) >= _MAX_OFFERS:
            return False
        self._offers[peer] = _Offer(relay, load, now_s + RELAY_OFFER_S)
        return True

    def withdraw(self, peer: str) -> None:
        self._offers.pop(peer, None)

    def named(self, members: Mapping[str, bool], now_s: float) -> tuple[SignedRelay, ...]:
        """The relays to name to members, the host's first, then those of the longest-standing members.

        ``members``: whether each is here and can be dialed, in that order."""
        offers = sorted(self._current(members, now_s), key=lambda one: one[1].load.busy >= _FULL)
        return (*self.host.named(), *(one.relay for _, one in offers))[:MAX_RUN_RELAYS]

    def known(self, members: Mapping[str, bool], now_s: float) -> set[Address]:
        """The addresses of all of them, with which members may say that they are registered."""
        offered = {one.relay.address for _, one in self._current(members, now_s)}
        return offered | {relay.address for relay in self.host.named()}

    def statuses(self, members: Mapping[str, bool], now_s: float) -> tuple[RelayStatus, ...]:
        """What each of them carries, for people."""
        hosts = [RelayStatus(host=at.host, port=at.control_port, load=load) for at, load in self.host.loads()]
        offered = [
            RelayStatus(host=one.relay.host, port=one.relay.port, peer=peer, load=one.load)
            for peer, one in self._current(members, now_s)
        ]
        return (*hosts, *offered)[:MAX_RUN_RELAYS]

    def _current(self, members: Mapping[str, bool], now_s: float) -> list[tuple[str, _Offer]]:
        for peer in [peer for peer, one in self._offers.items() if one.until_s <= now_s or peer not in members]:
            del self._offers[peer]
        return [(peer, self._offers[peer]) for peer, is_met in members.items() if is_met and peer in self._offers]
