"""Who may join by which invite, on a virtual clock; commands of the host; what a restarted coordinator knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.memory_coordinator import curve_keys, identity
from tests.swarm.coordinator.world import CPU, World, entry, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.access_list import AccessList
from shoal.swarm.coordinator.admission import BANNED, KICKED
from shoal.swarm.coordinator.host_commands import PRINTED, HostCommands, command_journal
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.errors import CommandRefused, FolderInUse, NotAdmitted, Removed, TryLater
from shoal.swarm.protocol.identity import Identity, verify_certificate
from shoal.swarm.protocol.invite import TOKEN_BYTES
from shoal.swarm.protocol.invite_token import make_token, read_token
from shoal.swarm.protocol.messages import (
    MAX_PAGE,
    AllowPeer,
    BanPeer,
    CoordinatorToHostBanned,
    CoordinatorToHostInvite,
    CoordinatorToHostInvites,
    CoordinatorToHostMembers,
    CreateInvite,
    InviteState,
    KickMember,
    ListInvites,
    ListMembers,
    RevokeInvite,
    host_proof,
)
from shoal.swarm.protocol.run_file import AccessSection, RunFile
from shoal.swarm.protocol.types import Role

HOST = identity(77)
NEAR, FAR = "10.0.0.0/24", "10.0.1.0/24"
DAY_S = 86_400


def run_with(**access: Any) -> RunFile:
    return run_file().model_copy(update={"access": AccessSection.model_validate(access)})


class Door:
    """A machine whose members come with tokens, as the service has them come, and its host."""

    def __init__(self, **access: Any) -> None:
        self.world = World(run_with(**access))

    @property
    def scope(self) -> Any:
        return self.world.machine.scope

    @property
    def host(self) -> HostCommands:
        return HostCommands(self.scope, HOST)

    def invite(self, role: Any = "trainer", uses: int = 0, for_s: int = 0, note: str = "") -> CoordinatorToHostInvite:
        made = self.host.answer(CreateInvite(role=role, uses=uses, for_s=for_s, note=note))
        assert isinstance(made, CoordinatorToHostInvite)
        self.world.settle()
        return made

    def invites(self) -> dict[str, InviteState]:
        answer = self.host.answer(ListInvites())
        assert isinstance(answer, CoordinatorToHostInvites)
        return {one.terms.id: one for one in answer.invites}

    def come(
        self, number: int, token: bytes, role: Role = "trainer", process: int = 0, network: str = NEAR, late: Any = None
    ) -> str:
        """``late`` is called while the newcomer is being dialed."""
        shown, admission = identity(number).certify(curve_keys(number + 50 * process)), self.scope.admission
        with admission.joining(shown, role, network, self.world.now_s, token, HOST.public_key) as peer:
            if late is not None:
                late()
            known = entry(0, role=role).model_copy(update={"peer": peer, "certificate": shown})
            admission.join(known, CPU, self.world.now_s, network, token)
        if role == "trainer":
            self.world.settle()
        return str(peer)

    def refusal(self, number: int, token: bytes, **how: Any) -> str:
        before = set(self.scope.membership.members)
        with pytest.raises(NotAdmitted) as refused:
            self.come(number, token, **how)
        assert set(self.scope.membership.members) == before
        assert not token or token.hex() not in str(refused.value)
        return str(refused.value)

    def leave(self, peer: str) -> None:
        self.scope.admission.leave(peer, "done", self.world.now_s)
        self.world.settle()


def test_a_run_lets_in_who_has_a_token_and_nobody_else_by_default() -> None:
    door = Door()
    assert "who has an invite with a token" in door.refusal(1, b"")
    invite = door.invite()
    peer = door.come(1, invite.token)
    assert door.scope.membership.members[peer].invite == invite.terms.id
    assert door.come(2, invite.token)
    assert door.invites()[invite.terms.id].joined == 2


def test_an_open_run_needs_no_token_and_makes_none() -> None:
    door = Door(admission="open")
    assert door.come(1, b"")
    assert door.host.printed_token() == b""
    with pytest.raises(CommandRefused, match="anybody may join"):
        door.invite()


def test_an_expired_invite_lets_nobody_new_in() -> None:
    door = Door()
    invite = door.invite(for_s=DAY_S)
    inside = door.come(1, invite.token)
    door.world.now_s += DAY_S + 1
    door.scope.log.now_s = door.world.now_s
    assert f"the invite {invite.terms.id} has expired" in door.refusal(2, invite.token)
    door.leave(inside)
    assert door.come(1, invite.token, process=1) == inside, "it was let in already"


def test_a_revoked_invite_lets_nobody_new_in_and_puts_nobody_out() -> None:
    door = Door()
    invite, other = door.invite(), door.invite()
    inside = door.come(1, invite.token)
    door.host.answer(RevokeInvite(id=invite.terms.id))
    assert "has revoked the invite" in door.refusal(2, invite.token)
    assert "has revoked the invite" in door.refusal(3, invite.token, role="observer")
    assert door.scope.membership.members[inside].alive
    assert door.come(1, invite.token, process=1) == inside
    assert door.come(2, other.token)
    with pytest.raises(CommandRefused, match="no invite zzzzzzzz"):
        door.host.answer(RevokeInvite(id="zzzzzzzz"))


def test_an_invite_for_one_belongs_to_the_first_identity_that_joins_by_it() -> None:
    door = Door()
    invite = door.invite(uses=1)
    first = door.come(1, invite.token)
    door.leave(first)
    assert "another identity has joined by it" in door.refusal(2, invite.token)
    assert door.come(1, invite.token, process=1) == first
    assert door.invites()[invite.terms.id].joined == 1


def test_an_invite_for_three_lets_three_identities_in_however_often() -> None:
    door = Door()
    invite = door.invite(uses=3)
    for process in range(2):
        for number in (1, 2, 3):
            door.come(number, invite.token, process=process)
    assert "3 identities have joined" in door.refusal(4, invite.token)


def test_two_that_come_at_once_do_not_share_an_invite_for_one() -> None:
    door = Door()
    invite = door.invite(uses=1)
    with pytest.raises(NotAdmitted, match="used up"):
        door.come(1, invite.token, late=lambda: door.come(2, invite.token, network=FAR))
    assert [one.entry.peer for one in door.scope.membership.members.values()] == [identity(2).peer_id]


def test_an_invite_that_is_revoked_while_its_holder_is_dialed_does_not_let_it_in() -> None:
    door = Door()
    invite = door.invite()
    with pytest.raises(NotAdmitted, match="revoked"):
        door.come(1, invite.token, late=lambda: door.host.answer(RevokeInvite(id=invite.terms.id)))


@pytest.mark.parametrize(
    ("invited", "admitted"),
    [
        ("trainer", {"trainer", "contributor", "follower", "observer"}),
        ("contributor", {"contributor", "follower", "observer"}),
        ("validator", {"validator", "follower", "observer"}),
        ("observer", {"follower", "observer"}),
    ],
)
def test_an_invite_admits_to_its_role_and_to_less(invited: str, admitted: set[Role]) -> None:
    door = Door()
    invite = door.invite(role=invited)
    roles: tuple[Role, ...] = ("trainer", "contributor", "validator", "follower", "observer")
    for number, role in enumerate(roles, 1):
        if role in admitted:
            door.come(number, invite.token, role=role)
        else:
            assert f"is for the role {invited}" in door.refusal(number, invite.token, role=role)


def test_guests_use_up_no_invite() -> None:
    door = Door()
    invite = door.invite(uses=1)
    for number in range(1, 4):
        door.leave(door.come(number, invite.token, role="observer"))
    door.come(9, invite.token)
    door.come(4, invite.token, role="observer")
    assert door.invites()[invite.terms.id].joined == 1


@pytest.mark.parametrize("at", [0, 1, 6, 7, 10, 14, 29, TOKEN_BYTES - 1])
def test_an_altered_token_is_refused(at: int) -> None:
    door = Door()
    token = bytearray(door.invite(role="observer", uses=1, for_s=DAY_S).token)
    token[at] ^= 1
    altered = bytes(token)
    door.refusal(1, altered, role="follower")
    door.refusal(1, altered[:-1], role="follower")
    door.refusal(1, altered + b"0", role="follower")


def test_a_token_of_another_run_or_host_is_refused() -> None:
    door = Door()
    terms = door.invite().terms
    for run_hash, signer in ((b"o" * 32, HOST), (door.world.run.hash, identity(5))):
        assert "not made for this run" in door.refusal(1, make_token(terms, run_hash, signer.sign))
    assert door.come(1, make_token(terms, door.world.run.hash, HOST.sign))


def test_a_valid_token_that_the_journal_does_not_know_counts_as_unused() -> None:
    door, other = Door(), Door()
    invite = other.invite(uses=1, note="made before the journal was lost")
    door.come(1, invite.token)
    assert "used up" in door.refusal(2, invite.token)
    door.host.answer(RevokeInvite(id=invite.terms.id))
    assert door.invites()[invite.terms.id].is_revoked


def test_what_a_token_says_is_looked_at_before_any_signature_and_takes_no_join(monkeypatch: Any) -> None:
    door = Door(joins_per_minute_per_network=1)
    invite = door.invite(for_s=1)
    door.world.now_s += 2
    door.scope.log.now_s = door.world.now_s

    def verified(*_: Any) -> Any:
        raise AssertionError("a signature was verified")

    with monkeypatch.context() as patched:
        for name in ("verify_certificate", "check_signature"):
            patched.setattr(f"shoal.swarm.coordinator.admission.{name}", verified)
        for number in range(1, 50):
            door.refusal(number, invite.token)
            door.refusal(number, b"")
    good = door.invite()
    door.come(1, good.token)
    with pytest.raises(TryLater):
        door.come(2, good.token)


def test_forged_tokens_use_up_the_joins_of_their_own_network() -> None:
    door = Door(joins_per_minute_per_network=2)
    good = door.invite()
    forged = good.token[:-1] + bytes([good.token[-1] ^ 1])
    for number in range(1, 3):
        door.refusal(number, forged)
    with pytest.raises(TryLater):
        door.come(3, forged)
    door.come(4, good.token, network=FAR)


def test_on_a_list_only_the_allowed_join_and_others_look_with_a_token() -> None:
    door = Door(admission="list")
    invite = door.invite()
    assert f"`shoal allow RUN {identity(1).peer_id}`" in door.refusal(1, invite.token)
    door.come(2, invite.token, role="observer")
    door.refusal(3, b"", role="observer")


# Members ----------------------------------------------------------------------------------------------------


def test_a_kicked_member_leaves_now_and_its_owner_may_join_again() -> None:
    door = Door()
    token = door.invite(uses=1).token
    peer, key = door.come(1, token), curve_keys(1).public
    door.host.answer(KickMember(peer=peer, note="stuck"))
    assert not door.scope.membership.members[peer].alive
    assert door.scope.membership.members[peer].left == KICKED
    with pytest.raises(Removed, match="has removed this peer from the run"):
        door.scope.admission.require_member(key)
    with pytest.raises(Removed):
        door.come(1, token)
    with pytest.raises(CommandRefused, match="no member at the moment"):
        door.host.answer(KickMember(peer=peer))
    assert door.come(1, token, process=1) == peer
    assert door.scope.admission.require_member(curve_keys(51).public) == peer


def test_a_banned_identity_is_out_for_good_until_it_is_allowed() -> None:
    door = Door()
    token = door.invite().token
    peer, other = door.come(1, token), door.come(2, token)
    answer = door.host.answer(BanPeer(peer=peer, note="sends noise"))
    assert answer == CoordinatorToHostBanned(network="", removed=(peer,))
    assert door.scope.membership.members[other].alive
    with pytest.raises(Removed, match="has banned this peer"):
        door.scope.admission.require_member(curve_keys(1).public)
    for role in ("trainer", "observer"):
        with pytest.raises(Removed, match=f"its id is {peer}"):
            door.come(1, token, process=1, role=role)  # type: ignore[arg-type]
    door.host.answer(AllowPeer(peer=peer))
    assert door.come(1, token, process=2) == peer
    with pytest.raises(CommandRefused, match="is not banned"):
        door.host.answer(AllowPeer(peer=peer))


def test_a_banned_network_lets_nobody_in_under_any_identity() -> None:
    door = Door()
    token = door.invite().token
    peer, neighbour, far = door.come(1, token), door.come(2, token), door.come(3, token, network=FAR)
    answer = door.host.answer(BanPeer(peer=peer, network=True))
    assert answer == CoordinatorToHostBanned(network=NEAR, removed=(peer, neighbour))
    for number in (2, 4):
        with pytest.raises(Removed, match=f"has banned the network {NEAR}"):
            door.come(number, token, process=1)
    assert door.scope.membership.members[far].alive
    assert door.come(2, token, process=2, network=FAR) == neighbour
    door.host.answer(AllowPeer(peer=peer))
    assert door.come(4, token)


def test_somebody_who_never_came_can_be_banned_but_not_its_network() -> None:
    door = Door()
    stranger = identity(9).peer_id
    with pytest.raises(CommandRefused, match="is not known here"):
        door.host.answer(BanPeer(peer=stranger, network=True))
    door.host.answer(BanPeer(peer=stranger))
    with pytest.raises(Removed):
        door.come(9, door.invite().token)


def test_bans_are_looked_up_before_any_signature(monkeypatch: Any) -> None:
    door = Door()
    token = door.invite().token
    door.host.answer(BanPeer(peer=door.come(1, token)))
    monkeypatch.setattr("shoal.swarm.coordinator.admission.verify_certificate", None)
    monkeypatch.setattr("shoal.swarm.coordinator.admission.check_signature", None)
    for process in range(1, 100):
        with pytest.raises(Removed):
            door.come(1, token, process=process % 2 + 1)


def test_what_a_banned_member_holds_is_given_to_others() -> None:
    door = Door(admission="open")
    world = door.world
    for worker in world.workers[:3]:
        world.join(worker)
        world.sync(worker)
    while len(world.verdicts) < 2:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
    gone = world.workers[1]
    while not world.scope.leases.held.get(gone.peer):
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
    door.host.answer(BanPeer(peer=gone.peer))
    gone.running = False
    world.settle()
    assert not world.scope.leases.held.get(gone.peer)
    before = len(world.verdicts)
    for _ in range(400):
        for worker in (world.workers[0], world.workers[2]):
            world.behave(worker)
        world.tick(0.25)
    assert len(world.verdicts) > before
    last = world.verdicts[-1].verdict
    assert last.committed
    assert last.plan is not None
    assert gone.peer not in [one.peer for one in last.plan.members]


def test_in_a_run_with_a_list_allow_puts_a_peer_on_it_and_ban_takes_it_off() -> None:
    door = Door(admission="list")
    peer = identity(1).peer_id
    door.host.answer(AllowPeer(peer=peer))
    assert door.come(1, b"") == peer
    door.host.answer(BanPeer(peer=peer))
    door.host.answer(AllowPeer(peer=peer))
    assert door.come(1, b"", process=1) == peer
    door.refusal(2, b"")


def test_members_are_listed_with_their_invites_networks_and_bans() -> None:
    door = Door()
    invite = door.invite()
    first, second = door.come(1, invite.token), door.come(2, invite.token, network=FAR)
    door.host.answer(BanPeer(peer=second, network=True, note="noise"))
    stranger = identity(9).peer_id
    door.host.answer(BanPeer(peer=stranger))
    answer = door.host.answer(ListMembers())
    assert isinstance(answer, CoordinatorToHostMembers)
    found = {one.peer: one for one in answer.members}
    assert list(found) == [first, second, stranger]
    assert (found[first].alive, found[first].invite, found[first].network) == (True, invite.terms.id, NEAR)
    assert found[first].since_s == pytest.approx(door.world.now_s)
    assert (found[second].alive, found[second].state, found[second].banned_network) == (False, BANNED, FAR)
    assert (found[second].note, found[stranger].banned, found[stranger].role) == ("noise", True, "")


# The journal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
def test_a_restarted_coordinator_knows_uses_and_revocations(compact: bool) -> None:
    door = Door()
    single, revoked, printed = door.invite(uses=1), door.invite(), door.host.printed_token()
    door.come(1, single.token)
    door.host.answer(RevokeInvite(id=revoked.terms.id))
    door.world.settle()
    before = door.invites()
    door.world.restart(compact=compact)
    assert door.invites() == before
    assert "used up" in door.refusal(2, single.token)
    assert "revoked" in door.refusal(2, revoked.token)
    assert door.host.printed_token() == printed
    assert door.come(1, single.token, process=1) == identity(1).peer_id


@pytest.mark.parametrize("compact", [True, False])
def test_a_restarted_coordinator_knows_bans(compact: bool) -> None:
    door = Door()
    token = door.invite().token
    banned, kicked = door.come(1, token), door.come(2, token, network=FAR)
    door.host.answer(BanPeer(peer=banned, network=True))
    door.host.answer(KickMember(peer=kicked))
    door.world.settle()
    door.world.restart(compact=compact)
    for number, process, network, said in (
        (1, 1, FAR, "banned this peer"),
        (3, 0, NEAR, "banned the network"),
        (1, 0, FAR, "banned this peer"),
        (2, 0, FAR, "removed this peer"),
    ):
        with pytest.raises(Removed, match=said):
            door.come(number, token, process=process, network=network)
    assert door.come(2, token, process=1, network=FAR) == kicked


def test_a_snapshot_keeps_the_lists() -> None:
    door = Door()
    door.host.answer(BanPeer(peer=door.come(3, door.invite().token), network=True, note="noise"))
    door.host.answer(KickMember(peer=door.come(4, door.invite().token, network=FAR)))
    door.host.answer(BanPeer(peer=identity(5).peer_id))
    door.host.answer(AllowPeer(peer=identity(5).peer_id))
    door.come(1, door.invite(uses=2, for_s=DAY_S, note="for Ann").token, network=FAR)
    door.host.answer(RevokeInvite(id=door.invite().terms.id))
    kept = door.scope.as_snapshot().access
    again = AccessList()
    again.restore(kept)
    assert again == door.scope.admission.access_list
    assert ev.unpack_event(ev.pack_event(door.scope.as_snapshot())).access == kept  # type: ignore[attr-defined]


def test_the_journal_has_no_secrets() -> None:
    door = Door()
    tokens = [door.invite(uses=1).token, door.host.printed_token()]
    door.come(1, tokens[0])
    written = b"".join(one for transaction in door.world.journal for one in transaction)
    for token in tokens:
        assert read_token(token).id.encode() in written
        assert token[-64:] not in written
        assert token[-64:-32] not in written


# Commands of the host ---------------------------------------------------------------------------------------


def test_the_printed_invite_is_the_same_one_until_it_is_revoked() -> None:
    door = Door()
    printed = door.host.printed_token()
    assert door.host.printed_token() == printed
    claims = read_token(printed)
    assert (claims.role, claims.uses, claims.expires_s) == ("trainer", 0, 0)
    door.host.answer(RevokeInvite(id=claims.id))
    assert read_token(door.host.printed_token()).id != claims.id
    assert [one.terms.note for one in door.invites().values()] == [PRINTED, PRINTED]


def test_invites_are_listed_in_pages() -> None:
    door = Door()
    for _ in range(MAX_PAGE + 3):
        door.host.answer(CreateInvite(role="trainer"))
    first, rest = door.host.answer(ListInvites()), door.host.answer(ListInvites(first=MAX_PAGE))
    assert isinstance(first, CoordinatorToHostInvites)
    assert isinstance(rest, CoordinatorToHostInvites)
    assert (len(first.invites), first.more, len(rest.invites), rest.more) == (MAX_PAGE, True, 3, False)
    door.world.settle()


def test_only_the_hosts_key_commands_and_only_over_its_own_connection() -> None:
    door, key = Door(), curve_keys(3).public
    proof = HOST.sign(host_proof(door.world.run.hash, key))
    door.host.check_proof(proof, key)
    for wrong, connection in (
        (identity(1).sign(host_proof(door.world.run.hash, key)), key),
        (HOST.sign(host_proof(b"o" * 32, key)), key),
        (proof, curve_keys(4).public),
        (HOST.certify(curve_keys(3)).signature, key),
    ):
        with pytest.raises(NotAdmitted, match="only the run's host"):
            door.host.check_proof(wrong, connection)


def test_a_journal_is_commanded_while_nobody_has_it(tmp_path: Path) -> None:
    run, host = run_with(), Identity.generate()

    def ask(command: Any) -> Any:
        return command_journal(LocalJournal(tmp_path, run.hash, "toml"), run, host, command, lambda _: None)

    made = ask(CreateInvite(role="trainer", uses=1, note="for Bob"))
    assert [one.terms for one in ask(ListInvites()).invites] == [made.terms]
    ask(RevokeInvite(id=made.terms.id))
    assert ask(ListInvites()).invites[0].is_revoked
    journal = LocalJournal(tmp_path, run.hash, "toml")
    journal.lease()
    with pytest.raises(FolderInUse):
        ask(ListInvites())
    journal.close()


def test_certificates_of_peers_prove_their_identities() -> None:
    """What ``Door.come`` shows is a real certificate."""
    assert verify_certificate(identity(1).certify(curve_keys(1))) == identity(1).peer_id
