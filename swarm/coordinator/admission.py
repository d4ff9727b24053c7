"""Admission to a scope: members join and leave, and every request's key has to be a member's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal.swarm.coordinator.access import OBSERVERS, OBSERVERS_PER_NETWORK, Access, choose_evicted
from shoal.swarm.coordinator.access_list import MAX_BANS, AccessList
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.events import (
    InviteMade,
    JournalEvent,
    MemberExpelled,
    MemberJoined,
    MemberKicked,
    MemberLost,
    MemberMoved,
    PeerBanned,
    ProcessBanned,
)
from shoal.swarm.coordinator.membership import Membership
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import NotAdmitted, Removed, RunEnded, Superseded, TryLater
from shoal.swarm.protocol.identity import peer_id, verify_certificate
from shoal.swarm.protocol.invite_token import TokenClaims, admits, check_signature
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Certificate, DeviceInfo, InviteTerms, Role, RosterEntry

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

KICKED, BANNED = "removed by the host", "banned by the host"
"""Reasons of the loss of members that the host has removed."""

EXPELLED = "expelled for a wrong mean"
"""Reason of the loss of a member against which there is evidence."""

_MAX_UNPROVEN_S = 86_400.0
"""For how long a newcomer keeps its place by reports of progress alone, without any work in a round: a very large state
over a slow link takes a day."""


_FEW = 64
"""Members of whom each is looked at in every tick; of more, once a second."""


class Standing(NamedTuple):
    """Reasons to keep a member: credit, committed rounds with its work, a place in a pipeline.

    ``credit``: its share of the credit of all that are here, in a pipeline that in the stage where it is largest."""

    has_credit: bool
    rounds: int
    credit: float = 0.0
    has_place: bool = False


class AdmittingScope(Protocol):
    """Scope to which members are admitted, as far as admission needs it."""

    @property
    def run(self) -> RunFile: ...
    @property
    def membership(self) -> Membership: ...
    @property
    def has_ended(self) -> bool: ...
    def walls(self) -> Mapping[str, str]: ...
    def standing(self, peer: str) -> Standing: ...
    def record(self, event: JournalEvent) -> None: ...


class Admission:
    """Decides who joins a scope and who loses its place there. Part of a run's own scope and of each stage's.

    Typed errors tell whoever asked why not. ``access`` holds the limits on joins, ``access_list`` who may join."""

    def __init__(self, run: RunFile, log: EventLog, scope: AdmittingScope) -> None:
        self.access = Access(run.access)
        self.access_list = AccessList()
        self.refusals: Counter[str] = Counter()
        """Joins that were refused, by reason, since they were last recorded (``access_trail.py``)."""
        self.refused: Counter[str] = Counter()
        """The same since this process has hosted the run."""
        self.sent_bytes = SentBytes()
        self._log = log
        self._scope = scope
        self._deadlines = Deadlines(run.round.patience_s)
        self._looks_idle_s = 0.0

    @contextmanager
    def counted_refusals(self) -> Iterator[None]:
        """Count a join that is refused within this context, by its reason."""
        try:
            yield
        except NotAdmitted as error:
            self._count_refusal(error.reason)
            raise
        except Removed:
            self._count_refusal("banned")
            raise
        except TryLater:
            self._count_refusal("too many")
            raise

    def _count_refusal(self, reason: str) -> None:
        self.refusals[reason] += 1
        self.refused[reason] += 1

    @contextmanager
    def joining(
        self,
        certificate: Certificate,
        role: Role,
        network: str,
        now_s: float,
        token: bytes = b"",
        host_key: bytes = b"",
    ) -> Iterator[str]:
        """Hold one of the places for joins under way, and yield the peer that the certificate proves.

        What a token says, and then the limits of ``[access]``, are asked before any signature is verified. For an
        identity that the run knows the limits come last, so that nobody else uses up its joins. ``host_key``: whose
        signature tokens need. Raises ``TryLater``, ``NotAdmitted``, ``RunEnded``, ``Superseded`` and ``Removed``."""
        self.access.follow(self._scope.run.access)
        self.refuse_replaced(certificate.curve_key)
        self._refuse_after_end(role)
        claimed, is_observer = peer_id(certificate.identity_key), role == "observer"
        claims = self._check_access(claimed, role, network, token)
        member = self._scope.membership.members.get(claimed)
        is_known = self._scope.standing(claimed).has_credit or (member is not None and member.alive)
        with self.access.under_way(certificate.curve_key, network, is_known):
            if not is_known:
                self.access.take(network, is_observer, now_s)
                self._make_room(claimed, role, network)
            peer = verify_certificate(certificate)
            if claims is not None:
                check_signature(token, self._scope.run.hash, host_key)
            if is_known:
                self.access.take_known(peer, now_s)
            yield peer

    def _check_access(self, peer: str, role: Role, network: str, token: bytes) -> TokenClaims | None:
        """Return the terms by which a peer may join; None if it needs no token. Raises ``Removed`` for one that is
        banned, and ``NotAdmitted``.

        An identity that was let in once is let in again for what its invite was for, whatever has become of that; a
        validator only while it is not revoked. Validators need an invite in any run."""
        self.access_list.refuse_banned(peer, network)
        admission = self._scope.run.access.admission
        if self._was_let_in(peer, role) or (admission == "open" and role != "validator"):
            return None
        if admission == "list" and role not in ("observer", "validator"):
            if peer in self.access_list.allowed:
                return None
            raise NotAdmitted(
                f"this run admits only peers that its host has allowed. Tell the host your peer id, {peer}: "
                f"`shoal allow RUN {peer}` lets you in",
                "not on the list",
            )
        return self.access_list.check_token(token, peer, role, self._log.unix_s)

    def _was_let_in(self, peer: str, role: Role) -> bool:
        """Whether this identity was let in before, for this role or for more."""
        member = self._scope.membership.members.get(peer)
        if member is None or role == "observer":
            return False
        if role == "validator":
            return self.access_list.makes_validators(member.invite)
        use = self.access_list.invites.get(member.invite)
        return use is None or admits(use.terms.role, role)

    def join(
        self, entry: RosterEntry, device: DeviceInfo, now_s: float, network: str = "", token: bytes | None = None
    ) -> None:
        """Admit a member. The same identity with another key is a new process; the samples of the old one are freed.

        ``token``: of its invite, whose signature ``joining`` has checked; None for a peer that may join in any case,
        such as a member of the run to one of its stages."""
        self._log.now_s = now_s
        membership, record = self._scope.membership, self._scope.record
        self.refuse_replaced(entry.certificate.curve_key)
        self._refuse_after_end(entry.role)
        # Once more: others may have used the invite while this peer was being dialed.
        claims = None if token is None else self._check_access(entry.peer, entry.role, network, token)
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
        invite = claims.id if claims is not None and entry.role != "observer" else ""
        if claims is not None and invite and invite not in self.access_list.invites:
            terms = InviteTerms(id=invite, role=claims.role, uses=claims.uses, expires_s=claims.expires_s)
            record(InviteMade(terms=terms, at_s=self._log.unix_s))
        record(MemberJoined(entry=entry, device=device, network=network, invite=invite, at_s=self._log.unix_s))

    def _refuse_after_end(self, role: Role) -> None:
        if self._scope.has_ended and role != "observer":
            raise RunEnded(f"the run {self._scope.run.run.name} is over; `shoal export` still gives its model")

    def _make_room(self, peer: str, role: Role, network: str) -> str | None:
        """Return the member that has to leave for this one; None if there is a free place. Raises ``TryLater``."""
        is_observer, membership = role == "observer", self._scope.membership
        limits, collective = self._scope.run.access, self._scope.run.collective
        fewest = min(limits.members_per_network, limits.newcomers(0), membership.places)
        if not is_observer and collective is None and len(membership.live) < fewest:
            return None  # there is room whoever is here
        standings = {
            other: self._scope.standing(other)
            for other, one in membership.live.items()
            if other != peer and (one.entry.role == "observer") == is_observer
        }
        newcomers = [
            (other, membership.members[other].network, standing.rounds + standing.has_place)
            for other, standing in standings.items()
            if is_observer or not standing.has_credit
        ]
        most, of_network = OBSERVERS, OBSERVERS_PER_NETWORK
        if not is_observer:
            most, of_network = limits.newcomers(len(standings) - len(newcomers)), limits.members_per_network
        kind = "guests" if is_observer else "members without credit"
        is_full = not membership.places_left(role)
        if collective is not None and role in ("trainer", "contributor"):
            is_full = sum(membership.members[other].is_trainer for other in standings) >= collective.members
        if self._scope.standing(peer).has_credit:
            if not is_full:
                return None
        elif sum(of == network for _, of, _ in newcomers) >= of_network:
            raise TryLater(
                f"the run {self._scope.run.run.name} has {of_network} {kind} from the network {network}, "
                "and takes no more from there: try again in a few minutes"
            )
        elif len(newcomers) < most and not is_full:
            return None
        evicted = choose_evicted(network, newcomers)
        if evicted is None:
            raise TryLater(
                f"the run {self._scope.run.run.name} is full: it takes no more than {len(newcomers)} {kind}; "
                "try again in a few minutes"
            )
        return evicted

    def move(self, peer: str, entry: RosterEntry) -> None:
        """Take over how a live member is reached."""
        before = self._scope.membership.members[peer].entry
        if (before.addresses, before.reachable) != (entry.addresses, entry.reachable):
            self._scope.record(MemberMoved(peer=peer, addresses=entry.addresses, reachable=entry.reachable))

    def leave(self, peer: str, reason: str, now_s: float, trouble: str = "") -> None:
        self._log.now_s = now_s
        if self._scope.membership.members[peer].alive:
            self._scope.record(MemberLost(peer=peer, reason=reason, trouble=trouble))

    def kick(self, peer: str, note: str) -> None:
        """Remove a live member at once, whose process may not come back."""
        member = self._scope.membership.members[peer]
        key, at_s = member.entry.certificate.curve_key, self._log.unix_s
        self._scope.record(MemberKicked(peer=peer, curve_key=key, note=note, at_s=at_s))
        self._scope.record(MemberLost(peer=peer, reason=KICKED))

    def ban(self, peer: str, network: str, note: str) -> list[str]:
        """Ban an identity, and a network if one is named; returns the members that were removed."""
        self._scope.record(PeerBanned(peer=peer, network=network, note=note, at_s=self._log.unix_s))
        removed = []
        for other, member in list(self._scope.membership.live.items()):
            if other == peer or (network and member.network == network):
                self._scope.record(ProcessBanned(curve_key=member.entry.certificate.curve_key))
                self._scope.record(MemberLost(peer=other, reason=BANNED))
                removed.append(other)
        return removed

    def expel(self, peer: str, evidence: bytes, accuser: str, round_number: int) -> None:
        """Ban an identity that evidence proves to have signed a wrong mean; whoever shows more of it changes
        nothing."""
        if peer in self.access_list.bans or len(self.access_list.bans) >= MAX_BANS:
            return
        at_s = self._log.unix_s
        self._scope.record(MemberExpelled(peer=peer, evidence=evidence, accuser=accuser, round=round_number, at_s=at_s))
        member = self._scope.membership.members.get(peer)
        if member is not None and member.alive:
            self._scope.record(ProcessBanned(curve_key=member.entry.certificate.curve_key))
            self._scope.record(MemberLost(peer=peer, reason=EXPELLED))

    def lose_silent(self, now_s: float) -> None:
        """Lose members that have not been heard for too long."""
        for peer in self._scope.membership.silent(now_s, self._deadlines.dead_s):
            self._scope.record(MemberLost(peer=peer, reason="silent"))

    def lose_idle(self, now_s: float) -> None:
        """Lose members without credit that make no progress, so that others get their places. They may join again.

        A member with a place in a pipeline is left to ``stall_detector.py``, which takes its place away first."""
        if self._scope.has_ended or now_s < self._looks_idle_s:
            return
        if len(self._scope.membership.live) > _FEW:
            self._looks_idle_s = now_s + 1.0  # a thousandth of that patience
        patience_s = self._deadlines.newcomer_s(self._scope.run.round.max_s)
        for peer in self._scope.walls():  # it cannot make any progress, whatever it does
            self._scope.membership.members[peer].progress_s = now_s
        for peer, one in list(self._scope.membership.live.items()):
            is_idle = now_s - one.progress_s > patience_s or now_s - one.worked_s > _MAX_UNPROVEN_S
            if is_idle and one.entry.role != "observer":
                standing = self._scope.standing(peer)
                if not (standing.has_credit or standing.has_place):
                    self._scope.record(MemberLost(peer=peer, reason="idle"))

    def require_member(self, curve_key: bytes) -> str:
        """Return the live member that holds this key.

        Raises ``NotAdmitted``; ``Superseded`` for a replaced process, ``Removed`` for that of a removed member."""
        self.refuse_replaced(curve_key)
        peer = self._scope.membership.holder(curve_key)
        if peer is None:
            raise NotAdmitted("not a member of this run (any more): join again")
        return peer

    def refuse_replaced(self, curve_key: bytes) -> None:
        """Raises ``Removed`` for the process of a removed member, which would come back by itself, and ``Superseded``,
        or two processes of one identity would replace each other for ever."""
        self.access_list.refuse_removed(curve_key)
        if curve_key in self._scope.membership.replaced:
            raise Superseded
