"""Admission to a scope: members join and leave, and every request's key has to be a member's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal.swarm.coordinator.access import OBSERVERS, OBSERVERS_PER_NETWORK, Access, choose_evicted
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.events import JournalEvent, MemberJoined, MemberLost
from shoal.swarm.coordinator.membership import Membership
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import NotAdmitted, RunEnded, Superseded, TryLater
from shoal.swarm.protocol.identity import peer_id, verify_certificate
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Certificate, DeviceInfo, Role, RosterEntry

# Bytes that members sent ------------------------------------------------------------------------------------

_MAX_BYTES = 2**62
"""Largest number of bytes that a message can report."""


@dataclass
class SentBytes:
    """Sum of the bytes that members sent since the last verdict, from their heartbeats.

    A member's counter belongs to one process, named by its CURVE key: a member that starts again begins at 0."""

    _reported: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """By peer: the process's key, and the last count that this process reported."""
    _since_verdict: int = 0

    def start_process(self, peer: str, curve_key: bytes) -> None:
        """Count everything that this new process will report."""
        self._reported[peer] = (curve_key, 0)

    def add(self, peer: str, curve_key: bytes, sent_bytes: int) -> None:
        """Add a heartbeat's count, less what the same process reported before.

        The first count of a process that is older than this coordinator adds nothing: when it was sent is unknown."""
        key, before = self._reported.get(peer, (curve_key, sent_bytes))
        if key != curve_key:
            before = sent_bytes
        self._since_verdict += max(0, sent_bytes - before)
        self._reported[peer] = (curve_key, max(before, sent_bytes))

    def forget(self, peer: str) -> None:
        self._reported.pop(peer, None)

    def take(self) -> int:
        """Return the sum since it was taken last."""
        taken, self._since_verdict = min(self._since_verdict, _MAX_BYTES), 0
        return taken


# Admission --------------------------------------------------------------------------------------------------

_MAX_UNPROVEN_S = 86_400.0
"""For how long a newcomer keeps its place by reports of progress alone, without any work in a round: a very large state
over a slow link takes a day."""


class Standing(NamedTuple):
    """Reasons to keep a member: a record, committed rounds with its work, a place in a pipeline."""

    has_record: bool
    rounds: int
    has_place: bool = False


class AdmittingScope(Protocol):
    """Scope to which members are admitted, as far as admission needs it."""

    @property
    def membership(self) -> Membership: ...
    @property
    def has_ended(self) -> bool: ...
    def standing(self, peer: str) -> Standing: ...
    def record(self, event: JournalEvent) -> None: ...


class Admission:
    """Decides who joins a scope and who loses its place there. Part of a run's own scope and of each stage's.

    Typed errors tell whoever asked why not. ``access`` holds the limits on joins."""

    def __init__(self, run: RunFile, log: EventLog, scope: AdmittingScope) -> None:
        self.access = Access(run.access)
        self.sent_bytes = SentBytes()
        self._run = run
        self._log = log
        self._scope = scope
        self._deadlines = Deadlines(run.round.patience_s)

    @contextmanager
    def joining(self, certificate: Certificate, role: Role, network: str, now_s: float) -> Iterator[str]:
        """Hold one of the places for joins under way, and yield the peer that the certificate proves.

        The limits of ``[access]`` are asked before the certificate is verified. For an identity that the run knows it
        is the other way round, so that nobody else uses up its joins. Raises ``TryLater``, ``NotAdmitted``,
        ``RunEnded`` and ``Superseded``."""
        self.refuse_replaced(certificate.curve_key)
        self._refuse_after_end(role)
        claimed, is_observer = peer_id(certificate.identity_key), role == "observer"
        member = self._scope.membership.members.get(claimed)
        is_known = self._scope.standing(claimed).has_record or (member is not None and member.alive)
        with self.access.under_way(certificate.curve_key, network, is_known):
            if not is_known:
                self.access.take(network, is_observer, now_s)
                self._make_room(claimed, role, network)
            peer = verify_certificate(certificate)
            if is_known:
                self.access.take_known(peer, now_s)
            yield peer

    def join(self, entry: RosterEntry, device: DeviceInfo, now_s: float, network: str = "") -> None:
        """Admit a member. The same identity with another key is a new process; the samples of the old one are freed."""
        self._log.now_s = now_s
        membership, record = self._scope.membership, self._scope.record
        self.refuse_replaced(entry.certificate.curve_key)
        self._refuse_after_end(entry.role)
        known = membership.members.get(entry.peer)
        if known is not None and known.entry.role != "observer" and entry.role == "observer":
            raise NotAdmitted("this identity trains in the run: look at the run with another identity")
        if known is not None and known.alive:
            if known.entry.certificate.curve_key == entry.certificate.curve_key:
                known.heard_s = now_s
                return
            record(MemberLost(peer=entry.peer, reason="joined again"))
        evicted = self._make_room(entry.peer, entry.role, network)
        if evicted is not None:
            record(MemberLost(peer=evicted, reason="made room for another network"))
        is_new = known is None or known.entry.certificate.curve_key != entry.certificate.curve_key
        if is_new and entry.role != "observer":
            self.sent_bytes.start_process(entry.peer, entry.certificate.curve_key)
        record(MemberJoined(entry=entry, device=device, network=network))

    def _refuse_after_end(self, role: Role) -> None:
        if self._scope.has_ended and role != "observer":
            raise RunEnded(f"the run {self._run.run.name} is over; `shoal export` still gives its model")

    def _make_room(self, peer: str, role: Role, network: str) -> str | None:
        """Return the member that has to leave for this one; None if there is a free place. Raises ``TryLater``."""
        is_observer, membership = role == "observer", self._scope.membership
        standings = {
            other: self._scope.standing(other)
            for other, one in membership.members.items()
            if one.alive and other != peer and (one.entry.role == "observer") == is_observer
        }
        newcomers = [
            (other, membership.members[other].network, standing.rounds + standing.has_place)
            for other, standing in standings.items()
            if is_observer or not standing.has_record
        ]
        limits = self._run.access
        most, of_network = OBSERVERS, OBSERVERS_PER_NETWORK
        if not is_observer:
            most, of_network = limits.newcomers(len(standings) - len(newcomers)), limits.members_per_network
        kind = "guests" if is_observer else "members without a record of committed work"
        is_full = not membership.places_left(role)
        if self._scope.standing(peer).has_record:
            if not is_full:
                return None
        elif sum(of == network for _, of, _ in newcomers) >= of_network:
            raise TryLater(
                f"the run {self._run.run.name} has {of_network} {kind} from the network {network}, "
                "and takes no more from there: try again in a few minutes"
            )
        elif len(newcomers) < most and not is_full:
            return None
        evicted = choose_evicted(network, newcomers)
        if evicted is None:
            raise TryLater(
                f"the run {self._run.run.name} is full: it takes no more than {len(newcomers)} {kind}; "
                "try again in a few minutes"
            )
        return evicted

    def leave(self, peer: str, reason: str, now_s: float, trouble: str = "") -> None:
        self._log.now_s = now_s
        if self._scope.membership.members[peer].alive:
            self._scope.record(MemberLost(peer=peer, reason=reason, trouble=trouble))

    def lose_silent(self, now_s: float) -> None:
        """Lose members that have not been heard for too long."""
        for peer in self._scope.membership.silent(now_s, self._deadlines.dead_s):
            self._scope.record(MemberLost(peer=peer, reason="silent"))

    def lose_idle(self, now_s: float) -> None:
        """Lose members without a record that make no progress, so that others get their places. They may join again.

        A member with a place in a pipeline is left to ``stall_detector.py``, which takes its place away first."""
        if self._scope.has_ended:
            return
        patience_s = self._deadlines.newcomer_s(self._run.round.max_s)
        for peer, one in list(self._scope.membership.members.items()):
            is_idle = now_s - one.progress_s > patience_s or now_s - one.worked_s > _MAX_UNPROVEN_S
            if is_idle and one.alive and one.entry.role != "observer":
                standing = self._scope.standing(peer)
                if not (standing.has_record or standing.has_place):
                    self._scope.record(MemberLost(peer=peer, reason="idle"))

    def require_member(self, curve_key: bytes) -> str:
        """Return the live member that holds this key. Raises ``NotAdmitted``; ``Superseded`` for a replaced process."""
        self.refuse_replaced(curve_key)
        peer = self._scope.membership.holder(curve_key)
        if peer is None:
            raise NotAdmitted("not a member of this run (any more): join again")
        return peer

    def refuse_replaced(self, curve_key: bytes) -> None:
        """Raises ``Superseded``, or two processes of one identity would replace each other for ever."""
        if curve_key in self._scope.membership.replaced:
            raise Superseded
