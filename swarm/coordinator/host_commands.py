"""Commands of the host on its run: invites, and whoever takes part. A running coordinator carries them out, or, while
none runs, whoever opens the journal.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.access_list import MAX_BANS, MAX_INVITES
from shoal.swarm.coordinator.access_trail import AccessTrail
from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.errors import CommandRefused, NotAdmitted
from shoal.swarm.protocol.access_records import AccessRecord
from shoal.swarm.protocol.identity import Identity, verify_signature
from shoal.swarm.protocol.invite_token import make_token
from shoal.swarm.protocol.messages import (
    MAX_PAGE,
    Acknowledged,
    AllowPeer,
    AmendRun,
    BanPeer,
    CoordinatorToHostAmended,
    CoordinatorToHostBanned,
    CoordinatorToHostInvite,
    CoordinatorToHostInvites,
    CoordinatorToHostMembers,
    CoordinatorToHostRecords,
    CreateInvite,
    HostCommand,
    InviteState,
    KickMember,
    ListInvites,
    ListMembers,
    ListRecords,
    MemberAccess,
    RevokeInvite,
    host_proof,
)
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Amendment, InviteTerms, Message, id_text

PRINTED = "the one that shoal host prints"
"""Note of the invite that the host prints and keeps in its folder."""


class HostCommands:
    """Carries out the host's commands in the run's own scope, and answers them; what they change is recorded there."""

    def __init__(self, scope: RoundScope | PipelineRun, identity: Identity) -> None:
        self._scope, self._identity = scope, identity
        self._list = scope.admission.access_list

    @property
    def _run(self) -> RunFile:
        return self._scope.run

    def check_proof(self, proof: bytes, curve_key: bytes) -> None:
        """Check that the host's identity has signed this connection's key. Raises ``NotAdmitted``."""
        if not verify_signature(self._identity.public_key, proof, host_proof(self._run.hash, curve_key)):
            raise NotAdmitted("only the run's host may do that, with the keys in its folder")

    def answer(self, command: HostCommand) -> Message:
        """Carry out a command. Raises ``CommandRefused`` that says why it cannot be."""
        match command:
            case CreateInvite():
                return self._create(command)
            case ListInvites(first=first):
                return self._invites(first)
            case RevokeInvite(id=invite):
                return self._revoke(invite)
            case ListMembers(first=first):
                return self._members(first)
            case KickMember(peer=peer, note=note):
                return self._kick(peer, note)
            case BanPeer():
                return self._ban(command)
            case AllowPeer(peer=peer):
                return self._allow(peer)
            case AmendRun():
                return self._amend(command)
            case ListRecords():
                raise AssertionError("records are read from the journal")

    # Invites ------------------------------------------------------------------------------------------------

    def printed_token(self) -> bytes:
        """Return the token of the invite that the host prints: the same one until it is revoked. Empty for an open
        run."""
        if self._run.access.admission == "open":
            return b""
        for use in self._list.invites.values():
            if use.terms.note == PRINTED and not use.is_revoked:
                return self._token(use.terms)
        return self._create(CreateInvite(role="trainer", note=PRINTED)).token

    def _create(self, command: CreateInvite) -> CoordinatorToHostInvite:
        if self._run.access.admission == "open" and command.role != "validator":
            raise CommandRefused(
                "anybody may join this run ([access] admission = 'open'), so only validators need invites"
            )
        if self._run.pipeline is not None and command.role == "validator":
            raise CommandRefused(
                "nobody scores work in a run with a [pipeline]: its stages compute each other's work again instead"
            )
        if len(self._list.invites) >= MAX_INVITES:
            raise CommandRefused(f"the run has {MAX_INVITES} invites, and cannot have more")
        id_ = id_text(secrets.token_bytes(5))
        while id_ in self._list.invites:
            id_ = id_text(secrets.token_bytes(5))
        now_s = self._scope.log.unix_s
        expires_s = min(int(now_s) + command.for_s, 2**32 - 1) if command.for_s else 0
        terms = InviteTerms(id=id_, role=command.role, uses=command.uses, expires_s=expires_s, note=command.note)
        self._scope.record(ev.InviteMade(terms=terms, at_s=now_s))
        return CoordinatorToHostInvite(terms=terms, token=self._token(terms))

    def _token(self, terms: InviteTerms) -> bytes:
        return make_token(terms, self._run.hash, self._identity.sign)

    def _invites(self, first: int) -> CoordinatorToHostInvites:
        uses = list(self._list.invites.values())
        page = tuple(
            InviteState(terms=one.terms, made_s=one.made_s, is_revoked=one.is_revoked, joined=one.joined)
            for one in uses[first : first + MAX_PAGE]
        )
        return CoordinatorToHostInvites(invites=page, more=first + MAX_PAGE < len(uses))

    def _revoke(self, invite: str) -> Message:
        use = self._list.invites.get(invite)
        if use is None:
            raise CommandRefused(f"the run has no invite {invite}: `shoal invite list` shows those that it has")
        if not use.is_revoked:
            self._scope.record(ev.InviteRevoked(id=invite, at_s=self._scope.log.unix_s))
            # Members show their contributions to whoever is a validator on the roster.
            members = self._scope.membership.members.items()
            for peer in [
                one for one, at in members if at.alive and at.entry.role == "validator" and at.invite == invite
            ]:
                self._scope.record(ev.MemberLost(peer=peer, reason="its invite was revoked"))
        return Acknowledged()

    # Members ------------------------------------------------------------------------------------------------

    def _members(self, first: int) -> CoordinatorToHostMembers:
        members = self._scope.membership.members
        known = [*members, *(peer for peer in (self._list.bans | self._list.allowed) if peer not in members)]
        page = tuple(map(self._member, known[first : first + MAX_PAGE]))
        return CoordinatorToHostMembers(members=page, more=first + MAX_PAGE < len(known))

    def _member(self, peer: str) -> MemberAccess:
        member, ban = self._scope.membership.members.get(peer), self._list.bans.get(peer)
        standing = self._scope.standing(peer)
        return MemberAccess(
            peer=peer,
            name=member.entry.name if member else "",
            role=member.entry.role if member else "",
            alive=member is not None and member.alive,
            state=(member.activity if member.alive else member.left) if member else "",
            since_s=member.joined_s if member else 0.0,
            invite=member.invite if member else "",
            network=member.network if member else "",
            rounds=standing.rounds,
            has_credit=standing.has_credit,
            credit=standing.credit,
            banned=ban is not None,
            banned_network=ban.network if ban else "",
            allowed=peer in self._list.allowed,
            note=ban.note if ban else "",
        )

    def _kick(self, peer: str, note: str) -> Message:
        member = self._scope.membership.members.get(peer)
        if member is None or not member.alive:
            raise CommandRefused(f"{peer} is no member at the moment: `shoal members` shows who is")
        self._scope.admission.kick(peer, note)
        return Acknowledged()

    def _ban(self, command: BanPeer) -> Message:
        member = self._scope.membership.members.get(command.peer)
        network = member.network if command.network and member is not None else ""
        if command.network and not network:
            raise CommandRefused(f"the network of {command.peer} is not known here: ban it without --network")
        if len(self._list.bans) >= MAX_BANS:
            raise CommandRefused(f"the run has {MAX_BANS} bans, and cannot have more")
        removed = self._scope.admission.ban(command.peer, network, command.note)
        return CoordinatorToHostBanned(network=network, removed=tuple(removed))

    def _allow(self, peer: str) -> Message:
        if peer not in self._list.bans and self._run.access.admission != "list":
            raise CommandRefused(f"{peer} is not banned, and this run has no list ([access] admission = 'list')")
        if len(self._list.allowed) >= MAX_BANS:
            raise CommandRefused(f"the host has allowed {MAX_BANS} peers, and cannot allow more")
        self._scope.record(ev.PeerAllowed(peer=peer, round=self._scope.round_number, at_s=self._scope.log.unix_s))
        return Acknowledged()

    # The run ----------------------------------------------------------------------------------------------

    def _amend(self, command: AmendRun) -> Message:
        scope, opened = self._scope, self._scope.round_number
        if scope.has_ended:
            raise CommandRefused("the run has ended")
        at_round = command.at_round or opened + 1
        made = tuple(Amendment(at_round=at_round, key=key, value=text) for key, text in command.changes)
        scope.settings.check(made, opened)
        scope.record(ev.RunAmended(amendments=made, round=opened, at_s=scope.log.unix_s))
        return CoordinatorToHostAmended(amendments=made, round=opened)


def command_journal(
    journal: LocalJournal,
    run: RunFile,
    identity: Identity,
    command: HostCommand,
    check: Callable[[LocalJournal], None],
) -> Message:
    """Carry out a command while no coordinator runs. ``journal``: one that is not leased yet; it is closed at the end.
    ``check``: called once it is leased.

    Raises as ``HostCommands.answer``, ``Journal.lease`` and ``check``."""
    epoch = journal.lease()
    try:
        check(journal)
        now_s = time.monotonic()
        machine, trail = resumed(run, identity, journal, now_s, epoch)
        scope = machine.scope if isinstance(machine, PlainRun) else machine
        machine.log.unix_offset_s = time.time() - now_s
        if isinstance(command, ListRecords):
            return read_records(journal, command.first)
        answer = HostCommands(scope, identity).answer(command)
        events = machine.log.take()
        events += trail.records(events, Counter(), machine.log.unix_s)
        if events:
            journal.append(journal.next_index, events)
        return answer
    finally:
        journal.close()


def read_records(journal: Journal, first: int) -> CoordinatorToHostRecords:
    """Read a page of access records, oldest first."""
    records = journal.access_records(first, MAX_PAGE)
    return CoordinatorToHostRecords(records=tuple(records), more=first + len(records) < journal.access_count)


def last_record(journal: Journal) -> AccessRecord | None:
    """Return the newest access record of a journal, if it has any."""
    count = journal.access_count
    return journal.access_records(count - 1, 1)[0] if count else None


def resumed(
    run: RunFile, identity: Identity, journal: Journal, now_s: float, epoch: int
) -> tuple[PlainRun | PipelineRun, AccessTrail]:
    """Return the coordinator's machine in the state that the journal tells, and the trail of access that goes on there.

    Takes as long as the journal is."""
    machine = replayed(run, identity.sign, journal.read(0), now_s, epoch)
    return machine, AccessTrail(run.hash, identity.sign, last_record(journal))


def replayed(
    run: RunFile, sign: Callable[[bytes], bytes], events: Sequence[JournalEvent], now_s: float, epoch: int
) -> PlainRun | PipelineRun:
    """Return the coordinator's machine in the state that a journal's events tell. It signs only what comes after."""
    machine = (PlainRun if run.pipeline is None else PipelineRun)(run, sign, now_s, epoch)
    machine.log.replay(machine.scope if isinstance(machine, PlainRun) else machine, events, now_s)
    return machine
