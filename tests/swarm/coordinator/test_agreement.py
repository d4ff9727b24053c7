"""Agreement on a version's state: who decides, when it is clear, and what a dispute leads to."""

from __future__ import annotations

from random import Random

import pytest
from tests.swarm.coordinator.test_round_scope import until
from tests.swarm.coordinator.world import CPU, INITIAL, SIGNER, World, entry, next_state, peer_name, run_file

from shoal.swarm.coordinator.agreement import Electorate, StateClaims, deciders
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.trust import weights_of
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.verdict_chain import check_agreement

A, B = b"a" * 32, b"b" * 32


def known(*work: int, joined: tuple[int, ...] = ()) -> dict[str, Member]:
    """Members with that committed work; those with any have credit."""
    found = {peer_name(number): Member(entry(number), CPU, 0.0) for number in range(len(work))}
    for member, tokens in zip(found.values(), work, strict=True):
        member.credit, member.has_credit = tokens, tokens > 0
    for member, version in zip(found.values(), joined, strict=False):
        member.joined_version = version
    return found


@pytest.mark.parametrize(
    ("work", "said", "clear"),
    [
        ((1, 1, 1), (A, A, B), A),
        ((1, 1, 1), (A, A, None), A),
        ((1, 1, 1), (A, None, None), None),
        ((1, 1), (A, B), None),
        ((1, 1), (A, None), None),
        ((2, 1), (A, B), None),
        ((99, 1), (A, B), A),
        ((1,), (A,), A),
        ((), (), None),
    ],
)
def test_a_digest_is_clear_with_more_than_half_of_the_work(
    work: tuple[int, ...], said: tuple[bytes | None, ...], clear: bytes | None
) -> None:
    electorate = Electorate("", weights_of(known(*work)))
    for peer, digest in zip(electorate.work, said, strict=True):
        if digest is not None:
            electorate.count(peer, digest, None)
    assert electorate.clear_digest() == clear


def test_claims_that_are_counted_as_they_come_give_what_all_together_give() -> None:
    members = known(3, 2, 2, 1, 0, joined=(0, 0, 0, 0, 4))
    peers, took_part, stamp = list(members), list(members)[:4], 1
    counted, seen, draws = StateClaims(), set(), Random(3)
    for _ in range(300):
        if draws.random() < 0.1:
            one = members[draws.choice(peers)]
            one.has_credit, stamp = not one.has_credit, stamp + 1
        else:
            counted.say(draws.choice(peers), draws.choice((A, B)))
        anew = StateClaims(dict(counted.said))
        clear = anew.agreed(members, took_part, 4, overdue=False)
        assert counted.agreed(members, took_part, 4, overdue=False, stamp=stamp) == clear
        assert counted.is_disputed == anew.is_disputed
        seen.add((clear, anew.is_disputed))
    assert seen >= {(A, False), (B, False), (None, False), (None, True)}


def test_newcomers_decide_nothing_while_a_member_of_the_plan_is_here() -> None:
    members = known(5, 5, 0, 0, 0, joined=(0, 0, 4, 4, 4))
    established = list(members)[:2]
    claims = StateClaims(dict.fromkeys(list(members)[2:], B))
    assert deciders(members, established, 4) == established
    assert claims.agreed(members, established, 4, overdue=False) is None
    assert not claims.is_disputed
    claims.say(established[0], A)
    assert claims.agreed(members, established, 4, overdue=True) == A, "one of them has spoken in time"
    claims.say(established[1], A)
    assert claims.agreed(members, established, 4, overdue=False) == A


def test_who_is_silent_is_waited_for_until_the_deadline() -> None:
    members = known(5, 5)
    claims = StateClaims({peer_name(0): A})
    assert claims.agreed(members, list(members), 4, overdue=False) is None
    assert claims.agreed(members, list(members), 4, overdue=True) == A


def test_those_that_hang_do_not_halt_the_run() -> None:
    members = known(5, 5, 0, joined=(0, 0, 4))
    claims = StateClaims({peer_name(2): A})
    assert claims.agreed(members, list(members)[:2], 4, overdue=False) is None
    assert claims.agreed(members, list(members)[:2], 4, overdue=True) == A


def committed(members: int) -> World:
    """A run right after its first verdict, which nobody has applied yet."""
    world = World(run_file(), members)
    until(world, "averaging", members)
    for worker in world.workers[:members]:
        world.report(worker)
    assert len(world.history) == 1
    assert world.scope.agreed_digest is None
    return world


@pytest.mark.parametrize("restarts", [False, True])
def test_three_newcomers_do_not_redefine_the_state(restarts: bool) -> None:
    world = committed(2)
    if restarts:
        world.restart()
    for worker in world.workers[2:5]:
        world.join(worker)
        world.beat(worker, anchor_version=1, state_digest=B)
    assert world.view(world.workers[2]).state_digest is None
    for worker in world.workers[:2]:
        world.conclude(worker)
        world.beat(worker)
    view = world.view(world.workers[0])
    assert view.state_digest == next_state(INITIAL)
    assert view.agreement is not None
    check_agreement(view.agreement, SIGNER.public_key)
    with pytest.raises(WireError, match="not signed"):
        check_agreement(view.agreement.model_copy(update={"digest": B}), SIGNER.public_key)
    assert [number for number in range(5) if world.view(world.workers[number]).must_resync] == [2, 3, 4]
    until(world, "averaging")
    assert world.scope.round.plan is not None
    assert world.scope.round.plan.state_digest == next_state(INITIAL)


def test_a_minority_resyncs_and_the_others_go_on() -> None:
    world = committed(3)
    for number, worker in enumerate(world.workers[:3]):
        world.conclude(worker)
        worker.digest = B if number == 0 else worker.digest
        world.beat(worker)
    assert not world.scope.is_disputed
    assert [number for number in range(3) if world.view(world.workers[number]).must_resync] == [0]


def disputed() -> World:
    world = committed(2)
    for worker, digest in zip(world.workers[:2], (next_state(INITIAL), B), strict=True):
        world.conclude(worker)
        worker.digest = digest
        world.beat(worker)
    assert world.scope.is_disputed
    assert world.scope.synced() == {}
    assert "disputed" in world.scope.say_outlook()
    assert all(world.view(worker).must_resync and world.view(worker).is_disputed for worker in world.workers[:2])
    return world


def test_a_replay_that_gives_one_state_ends_a_dispute() -> None:
    world = disputed()
    for worker in world.workers[:2]:
        world.beat(worker, anchor_version=None, state_digest=None)
    world.beat(world.workers[0], anchor_version=1, state_digest=next_state(INITIAL))
    world.beat(world.workers[1], anchor_version=1, state_digest=next_state(INITIAL))
    assert not world.scope.is_disputed
    assert world.scope.agreed_digest == next_state(INITIAL)


def test_a_dispute_that_does_not_end_goes_back_to_the_vouched_version() -> None:
    world = disputed()
    kept = ({"anchor_version": 0, "digest": INITIAL},)
    for _ in range(600):
        for worker in world.workers[:2]:
            worker.version = worker.digest = None
            world.beat(worker, kept=kept)
        world.tick(0.25)
        if world.scope.anchor_version == 0:
            break
    assert (world.scope.anchor_version, world.scope.agreed_digest) == (0, INITIAL)
    assert world.verdicts[-1].went_back is not None
    assert not world.scope.is_disputed
