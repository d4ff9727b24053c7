"""Rosters of the members of each scope (a run or a stage) that this process is a member of."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.identity import verify_certificate
from shoal.swarm.protocol.types import Address, RosterEntry

log = logging.getLogger(__name__)

_Address = tuple[bytes, Address]


class Rosters:
    """The rosters of all scopes. Every peer on any of them may connect to this process."""

    def __init__(self) -> None:
        self._by_scope: dict[int, dict[str, RosterEntry]] = {}
        self._peers_by_key: dict[bytes, str] = {}

    def update(self, roster: tuple[RosterEntry, ...], scope: int) -> set[bytes]:
        """Replace a scope's roster; entries with a wrong certificate are left out.

        Returns the keys to disconnect: of peers that left all rosters, or have another address to dial. Relays that are
        added or lost disconnect nobody."""
        return self._replace({**self._by_scope, scope: {entry.peer: entry for entry in self._checked(roster)}})

    def leave(self, scope: int) -> set[bytes]:
        """Forget a scope's roster; returns the keys to disconnect."""
        return self._replace({of: entries for of, entries in self._by_scope.items() if of != scope})

    def entry(self, peer: str, scope: int) -> RosterEntry | None:
        """A peer's entry in this scope's roster, otherwise in any other's, the run's first."""
        own = self._by_scope.get(scope, {}).get(peer)
        return own or next((entries[peer] for entries in self._in_order() if peer in entries), None)

    def peer_with(self, curve_key: bytes) -> str | None:
        """The member of any scope that holds a transport key."""
        return self._peers_by_key.get(curve_key)

    def is_observer(self, peer: str) -> bool:
        """Whether a peer is only an observer, in every scope that lists it."""
        return all(entries[peer].role == "observer" for entries in self._by_scope.values() if peer in entries)

    def trainers(self, scope: int) -> list[str]:
        """The members that train, in the roster's order: the longest-standing first."""
        entries = self._by_scope.get(scope, {})
        return [peer for peer, entry in entries.items() if entry.role in ("trainer", "contributor")]

    def reachable_owners(self, scope: int) -> list[str]:
        """The trainers that can be dialed and may reduce parts, in the roster's order."""
        entries = self._by_scope.get(scope, {})
        return [peer for peer, entry in entries.items() if entry.role == "trainer" and entry.reachable]

    def processes(self, scope: int) -> dict[str, bytes]:
        """The transport key of each member's process."""
        return {peer: entry.certificate.curve_key for peer, entry in self._by_scope.get(scope, {}).items()}

    def __contains__(self, peer: str) -> bool:
        return any(peer in entries for entries in self._by_scope.values())

    def _in_order(self) -> list[dict[str, RosterEntry]]:
        return [self._by_scope[scope] for scope in sorted(self._by_scope)]

    def _checked(self, roster: tuple[RosterEntry, ...]) -> Iterator[RosterEntry]:
        # Known certificates are not verified again, which would take long for hundreds of members.
        known = {entry.peer: entry.certificate for entries in self._by_scope.values() for entry in entries.values()}
        for entry in roster:
            try:
                if known.get(entry.peer) == entry.certificate or verify_certificate(entry.certificate) == entry.peer:
                    yield entry
            except NotAdmitted as error:
                log.warning("ignored %s, which the roster lists with a bad certificate: %s", entry.peer, error)

    def _replace(self, by_scope: dict[int, dict[str, RosterEntry]]) -> set[bytes]:
        earlier = self._addresses()
        self._by_scope = by_scope
        now = self._addresses()
        self._peers_by_key = {address[0]: peer for address, peer in now.items()}
        return {address[0] for address in earlier.keys() - now.keys()}

    def _addresses(self) -> dict[_Address, str]:
        return {_address(entry): peer for entries in self._in_order() for peer, entry in entries.items()}


def _address(entry: RosterEntry) -> _Address:
    return entry.certificate.curve_key, entry.address
