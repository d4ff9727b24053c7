"""Scores of members' work: whose count, what follows from them, and what a restarted coordinator knows."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.memory_coordinator import curve_keys, identity
from tests.swarm.coordinator.test_trust import UnevenWorld
from tests.swarm.coordinator.world import CPU, entry, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.host_commands import HostCommands
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS, DOUBTED_AFTER, EXPELLED_AFTER, is_expelled, work_after
from shoal.swarm.errors import NotAdmitted, Removed, WireError
from shoal.swarm.protocol.messages import (
    AllowPeer,
    CoordinatorToHostInvite,
    CreateInvite,
    PeerToCoordinatorGetWork,
    RevokeInvite,
)
from shoal.swarm.protocol.types import FirstBatch, Role, SampleRange
from shoal.swarm.protocol.work_scores import Finding, Gain, SignedScore, WorkScore
from shoal.swarm.sample_ranges import from_wire

HOST = identity(77)


class ReviewedWorld(UnevenWorld):
    """Three members with credit, and validators."""

    def __init__(self) -> None:
        super().__init__(run_file(), [4, 4, 4])
        self.go_on(CREDIT_ROUNDS + 1)

    @property
    def review(self) -> Any:
        return self.scope.review

    def invite(self, role: Any = "validator") -> CoordinatorToHostInvite:
        made = HostCommands(self.scope, HOST).answer(CreateInvite(role=role))
        assert isinstance(made, CoordinatorToHostInvite)
        self.settle()
        return made

    def come_as(self, number: int, token: bytes, role: Role = "validator") -> str:
        peer = identity(number).peer_id
        shown = entry(number, role=role).model_copy(
            update={"peer": peer, "certificate": identity(number).certify(curve_keys(number))}
        )
        self.scope.admission.join(shown, CPU, self.now_s, token=token)
        self.settle()
        return peer

    def validator(self, number: int = 9) -> str:
        return self.come_as(number, self.invite().token)

    def signed(self, peer: str, finding: Finding = "harms", number: int = 9, **changes: Any) -> SignedScore:
        """A score of the newest committed round."""
        verdict = self.verdicts[-1].verdict
        mean = {"helps": 1.0, "harms": -1.0}.get(finding)
        gain = None if mean is None else Gain(mean=mean, error=0.1)
        score = WorkScore(round=verdict.round, chain=verdict.chain, peer=peer, finding=finding, on_random=gain)
        score = score.model_copy(update=changes)
        who = identity(number)
        return SignedScore(score=score, validator_key=who.public_key, signature=who.sign(score.signed_bytes))

    def score(self, peer: str, finding: Finding = "harms", number: int = 9, rounds: int = 1) -> None:
        """Score a member so many times, once a round."""
        for _ in range(rounds):
            self.go_on(1)
            self.review.score(identity(number).peer_id, self.signed(peer, finding, number))
            self.settle()

    def keep_alive(self) -> None:
        for number in (9, 10, 11):
            one = self.scope.membership.members.get(identity(number).peer_id)
            if one is not None:
                one.heard_s = self.now_s

    def tick(self, seconds: float) -> None:
        self.keep_alive()
        super().tick(seconds)


@pytest.fixture
def world() -> ReviewedWorld:
    return ReviewedWorld()


def counted(world: ReviewedWorld) -> int:
    return sum(isinstance(one, ev.WorkScored) for one in world.events)


@pytest.mark.parametrize("role", ["trainer", "contributor", "observer"])
def test_only_an_invite_for_it_makes_a_validator(world: ReviewedWorld, role: str) -> None:
    token = world.invite(role).token
    with pytest.raises(NotAdmitted, match=f"is for the role {role}"):
        world.come_as(9, token)
    follower = world.come_as(9, token, "follower")
    with pytest.raises(NotAdmitted, match="is for the role"):
        world.come_as(9, token)  # it was let in as something else
    with pytest.raises(NotAdmitted, match="only validators"):
        world.review.score(follower, world.signed(world.workers[0].peer))
    with pytest.raises(NotAdmitted, match="only validators"):
        world.review.samples_of(follower, PeerToCoordinatorGetWork(round=0, peer=follower))
    assert counted(world) == 0
    assert world.scope.membership.members[world.workers[0].peer].work == ev.WorkStanding()


def test_an_open_run_has_invites_for_validators() -> None:
    open_run = run_file()
    open_run = open_run.model_copy(update={"access": open_run.access.model_copy(update={"admission": "open"})})
    world = UnevenWorld(open_run, [4, 4])
    ReviewedWorld.come_as(world, 8, b"", "follower")  # type: ignore[arg-type]
    with pytest.raises(NotAdmitted, match="ask the host for one"):
        ReviewedWorld.come_as(world, 9, b"")  # type: ignore[arg-type]
    token = ReviewedWorld.invite(world).token  # type: ignore[arg-type]
    peer = ReviewedWorld.come_as(world, 9, token)  # type: ignore[arg-type]
    assert world.scope.review.is_validator(peer)


def test_a_validator_is_told_the_samples_of_the_last_rounds(world: ReviewedWorld) -> None:
    validator, peer = world.validator(), world.workers[0].peer
    newest = world.verdicts[-1].verdict.round
    plan = world.verdicts[-1].verdict.plan
    assert plan is not None
    planned = next(one for one in reversed(world.events) if isinstance(one, ev.RoundPlanned) and one.plan == plan)
    index = [one.peer for one in plan.members].index(peer)

    def ask(number: int) -> Any:
        return world.review.samples_of(validator, PeerToCoordinatorGetWork(round=number, peer=peer))

    assert from_wire(ask(newest).ranges) == from_wire(planned.ranges[index])
    assert ask(newest - 1).ranges
    assert not ask(newest - 2).ranges
    world.score(peer)
    assert ask(newest + 1).doubted == (peer,)


def test_three_bad_scores_make_a_newcomer_and_six_expel(world: ReviewedWorld) -> None:
    world.validator()
    bad, fair = world.workers[0], world.workers[1]
    world.score(fair.peer, "helps", rounds=2)
    world.score(bad.peer, rounds=DOUBTED_AFTER - 1)
    assert world.scope.membership.members[bad.peer].has_credit
    world.score(bad.peer)
    assert not world.scope.membership.members[bad.peer].has_credit
    assert bad.peer not in world.scope.membership.with_credit()
    assert world.scope.membership.members[fair.peer].has_credit
    world.score(bad.peer, rounds=EXPELLED_AFTER - DOUBTED_AFTER - 1)
    assert not [one for one in world.events if isinstance(one, ev.PeerBanned)]
    world.score(bad.peer)
    (ban,) = [one for one in world.events if isinstance(one, ev.PeerBanned)]
    assert ban.peer == bad.peer
    assert "6 bad scores" in ban.note
    assert "harms" in ban.note
    assert not world.scope.membership.members[bad.peer].alive
    with pytest.raises(Removed, match="banned"):
        world.scope.admission.access_list.refuse_banned(bad.peer, "")
    HostCommands(world.scope, HOST).answer(AllowPeer(peer=bad.peer))
    assert world.scope.membership.members[bad.peer].work == ev.WorkStanding()


def test_a_score_counts_once_a_round(world: ReviewedWorld) -> None:
    validator, peer = world.validator(), world.workers[0].peer
    for _ in range(EXPELLED_AFTER):
        world.review.score(validator, world.signed(peer))
    old = world.signed(peer)
    world.settle()
    world.go_on(3)
    world.review.score(validator, old)
    world.settle()
    assert counted(world) == 1
    assert world.scope.membership.members[peer].work.bad == 1


def test_scores_that_are_not_the_validators_or_of_another_round_are_refused(world: ReviewedWorld) -> None:
    validator, peer = world.validator(), world.workers[0].peer
    with pytest.raises(WireError, match="signed by the validator"):
        world.review.score(validator, world.signed(peer, number=10))
    altered = world.signed(peer, "helps")
    altered = altered.model_copy(update={"score": altered.score.model_copy(update={"finding": "harms"})})
    with pytest.raises(WireError, match="signed by the validator"):
        world.review.score(validator, altered)
    with pytest.raises(WireError, match="that was committed"):
        world.review.score(validator, world.signed(peer, chain=b"x" * 32))
    world.review.score(validator, world.signed(validator))  # it was in no plan
    assert counted(world) == 0


def test_a_revoked_validator_changes_nothing_and_does_not_come_back(world: ReviewedWorld) -> None:
    invite = world.invite()
    validator = world.come_as(9, invite.token)
    world.score(world.workers[0].peer)
    HostCommands(world.scope, HOST).answer(RevokeInvite(id=invite.terms.id))
    world.settle()
    assert validator not in [one.peer for one in world.scope.membership.roster()]  # others show it nothing any more
    assert world.scope.membership.members[validator].left == "its invite was revoked"
    with pytest.raises(NotAdmitted, match="only validators"):
        world.review.score(validator, world.signed(world.workers[0].peer))
    with pytest.raises(NotAdmitted, match="has revoked the invite"):
        world.come_as(9, invite.token)


def test_work_that_was_lost_is_not_scored(world: ReviewedWorld) -> None:
    """Its member is gone, and may be forgotten as one that the run has never had work of."""
    validator, peer = world.validator(), world.workers[0].peer
    world.until_planned()
    plan = world.scope.round.plan
    assert plan is not None
    (index,) = [at for at, one in enumerate(plan.members) if one.peer == peer]
    world.leave(world.workers[0])
    for worker in world.workers[1:3]:
        world.report(worker, dropped=(index,))
    assert world.verdicts[-1].lost == (peer,)
    score = world.signed(peer)
    world.review.score(validator, score)
    assert counted(world) == 0
    assert not world.review.samples_of(validator, PeerToCoordinatorGetWork(round=score.score.round, peer=peer)).ranges


def test_an_expelled_member_begins_anew_if_it_is_let_in_again(world: ReviewedWorld) -> None:
    peer = world.workers[0].peer
    assert world.scope.membership.members[peer].has_credit
    world.scope.admission.expel(peer, b"e" * 32, world.workers[1].peer, 3)
    world.settle()
    world.restart()
    member = world.scope.membership.members[peer]
    assert (member.credit, member.credit_rounds, member.has_credit) == (0, 0, False)


def test_one_of_two_validators_expels_nobody(world: ReviewedWorld) -> None:
    world.validator(9)
    world.validator(10)
    peer = world.workers[0].peer
    world.score(peer, rounds=EXPELLED_AFTER + 2)
    assert world.scope.membership.members[peer].alive
    assert not world.scope.membership.members[peer].has_credit
    world.score(peer, number=10)
    assert not world.scope.membership.members[peer].alive


def test_a_restarted_coordinator_knows_the_scores(world: ReviewedWorld) -> None:
    validator, peer = world.validator(), world.workers[0].peer
    world.score(peer, rounds=DOUBTED_AFTER)
    before = world.scope.membership.members[peer].work
    for compact in (False, True):
        world.restart(compact=compact)
        assert world.scope.membership.members[peer].work == before
        assert not world.scope.membership.members[peer].has_credit
        assert world.scope.review.is_validator(validator)


def test_a_validator_keeps_its_place_without_any_work(world: ReviewedWorld) -> None:
    validator = world.validator()
    world.go_on(12)
    assert world.scope.standing(validator).has_credit
    assert world.scope.membership.members[validator].alive


# The rule alone ---------------------------------------------------------------------------------------------


def scored(*findings: tuple[Finding, float], by: str = "v", before: ev.WorkStanding | None = None) -> ev.WorkStanding:
    standing = before or ev.WorkStanding()
    for finding, gain in findings:
        score = WorkScore(
            round=0, chain=bytes(32), peer="a" * 16, finding=finding, on_random=Gain(mean=gain, error=0.0)
        )
        standing = work_after(standing, by, score)
    return standing


def test_good_scores_end_doubt_as_fast_as_they_outweigh_the_bad_ones() -> None:
    bad: tuple[Finding, float] = ("harms", -1.0)
    good: tuple[Finding, float] = ("helps", 1.0)
    assert not scored(*[bad] * 2, good, *[bad] * 2).is_doubted
    assert not scored(*[bad] * 2, good, *[bad] * 2).bad - 2
    newcomer = scored(*[bad] * 3)
    assert newcomer.is_doubted
    assert scored(good, before=newcomer).is_doubted
    assert not scored(*[good] * 3, before=newcomer).is_doubted
    steady = scored(*[good] * 40, *[bad] * 3)
    assert steady.is_doubted
    assert not scored(good, before=steady).is_doubted


def test_unclear_scores_end_no_row_of_bad_ones_and_only_many_of_one_sign_make_a_newcomer() -> None:
    unclear: tuple[Finding, float] = ("unclear", -1.0)
    assert scored(("harms", -1.0), unclear, ("harms", -1.0), unclear, ("harms", -1.0)).is_doubted
    assert not scored(*[unclear] * 13).is_doubted
    assert scored(*[unclear] * 14).is_doubted
    assert not is_expelled(scored(*[unclear] * 100), ["v"])
    by_chance = [("unclear", 1.0), unclear] * 100
    assert not scored(*by_chance).is_doubted


def test_withheld_contributions_expel_nobody() -> None:
    withheld = scored(*[("withheld", 0.0)] * 100)
    assert withheld.is_doubted
    assert not is_expelled(withheld, ["v"])
    assert is_expelled(scored(*[("copied", 0.0)] * EXPELLED_AFTER), ["v"])


def test_validators_that_left_do_not_expel() -> None:
    standing = scored(*[("harms", -1.0)] * EXPELLED_AFTER)
    assert is_expelled(standing, ["v"])
    assert not is_expelled(standing, ["w"])
    assert not is_expelled(standing, [])
    assert not is_expelled(standing, ["v", "w"])


def test_what_members_say_of_their_first_batches_goes_to_validators() -> None:
    world = ReviewedWorld()
    validator = world.validator()
    told: dict[str, FirstBatch] = {}
    real = world.ready

    def ready(worker: Any, **claims: Any) -> None:
        start = worker.done[0][0]
        told[worker.peer] = FirstBatch(samples=SampleRange(start=start, stop=start + 1), loss=2.0 + worker.number)
        real(worker, first=told[worker.peer], **claims)

    world.ready = ready  # type: ignore[method-assign]
    world.go_on(1)
    number = world.verdicts[-1].verdict.round
    for peer, first in told.items():
        work = world.review.samples_of(validator, PeerToCoordinatorGetWork(round=number, peer=peer))
        assert work.first == first
    assert len(told) == 3


def test_a_first_batch_of_others_samples_is_refused() -> None:
    world = ReviewedWorld()
    refused = []
    real = world.ready

    def ready(worker: Any, **claims: Any) -> None:
        stop = worker.done[-1][1]
        first = FirstBatch(samples=SampleRange(start=stop - 1, stop=stop + 1), loss=2.0)
        with pytest.raises(WireError, match="its samples"):
            real(worker, first=first, **claims)
        refused.append(worker.peer)
        real(worker, **claims)

    world.ready = ready  # type: ignore[method-assign]
    world.go_on(1)
    assert refused
