"""Who takes part where members cannot all meet, and that nobody's word alone costs another its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from tests.swarm.coordinator.pipeline_world import PipelineWorld
from tests.swarm.coordinator.pipeline_world import run_file as pipeline_file
from tests.swarm.coordinator.world import CPU, INITIAL, World, entry, heartbeat, peer_name, run_file

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.reachability import can_meet, choose_group, say_apart, walls
from shoal.swarm.coordinator.round_plan import PlanRules, plan_round
from shoal.swarm.pipeline.planner.meeting import strangers
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady

A, B, C, D = map(peer_name, range(4))
FLAT = 64


def members(
    dialed: Collection[str],
    *,
    of: int,
    unmet: Mapping[str, tuple[str, ...]] | None = None,
    credit: tuple[int, ...] = (),
) -> dict[str, Member]:
    """``of`` members, those that can be dialed and whom each could not connect to."""
    found = {}
    for number in range(of):
        peer = peer_name(number)
        member = found[peer] = Member(entry(number, reachable=peer in dialed), CPU, 0.0)
        member.unmet = (unmet or {}).get(peer, ())
        if number < len(credit):
            member.credit, member.has_credit = credit[number], credit[number] > 0
    return found


def test_two_meet_where_one_can_be_dialed_by_the_other() -> None:
    three = members({A}, of=3, unmet={C: (A,)})
    assert can_meet(A, B, three)
    assert can_meet(B, A, three)
    assert not can_meet(A, C, three), "nobody dials C, and C has failed"
    assert not can_meet(B, C, three)
    both = members({A, B}, of=2, unmet={A: (B,)})
    assert can_meet(A, B, both), "B dials A"


def test_those_behind_walls_take_part_where_anybody_can_be_dialed() -> None:
    group = choose_group(members({B}, of=3), [A, B, C], FLAT)
    assert set(group.owners) == {B}
    assert not group.apart


def test_where_nobody_can_be_dialed_who_was_at_work_goes_on_alone() -> None:
    group = choose_group(members((), of=3, credit=(0, 5, 0)), [A, B, C], FLAT)
    assert list(group.owners) == [B]
    assert group.apart.keys() == {A, C}
    assert "only name 1 goes on" in group.apart[A]


def test_one_alone_needs_nobody() -> None:
    assert not choose_group(members((), of=1), [A], FLAT).apart
    assert walls(members((), of=1), FLAT) == {}


@pytest.mark.parametrize("credit", [(), (1, 1, 1, 1)])
def test_one_members_word_costs_only_itself_its_place(credit: tuple[int, ...]) -> None:
    four = members({A, B}, of=4, unmet={C: (A, B)}, credit=credit)
    group = choose_group(four, [A, B, C, D], FLAT)
    assert set(group.owners) == {A, B}
    assert group.apart.keys() == {C}
    assert "name 0" in group.apart[C]


def test_an_owner_that_most_cannot_reach_owns_nothing() -> None:
    four = members({A, B}, of=4, unmet={C: (A,), D: (A,), B: (A,)})
    group = choose_group(four, [A, B, C, D], FLAT)
    assert set(group.owners) == {B}
    assert set(group.shunned) == {A}
    assert not group.apart, "A dials B"


def test_newcomers_words_do_not_shun_a_member_with_credit() -> None:
    four = members({A, B}, of=4, unmet={C: (A,), D: (A,)}, credit=(9, 9, 0, 0))
    group = choose_group(four, [A, B, C, D], FLAT)
    assert set(group.owners) == {A, B}
    assert group.apart.keys() == {C, D}


def test_of_two_owners_that_cannot_connect_the_better_stays() -> None:
    two = members({A, B}, of=2, unmet={A: (B,), B: (A,)}, credit=(1, 2))
    group = choose_group(two, [A, B], FLAT)
    assert set(group.owners) == {B}
    assert group.apart.keys() == {A}


def test_in_a_grid_a_few_misses_cost_nothing() -> None:
    many = {peer_name(number) for number in range(9)}
    some = members(many, of=10, unmet={peer_name(9): (A, B)})
    assert not choose_group(some, sorted(some), group_size=4).apart
    most = members(many, of=10, unmet={peer_name(9): tuple(sorted(many)[:6])})
    assert choose_group(most, sorted(most), group_size=4).apart.keys() == {peer_name(9)}


def test_contributors_that_can_be_dialed_own_where_nobody_else_does() -> None:
    two = {A: Member(entry(0, role="contributor"), CPU, 0.0), B: Member(entry(1, reachable=False), CPU, 0.0)}
    assert set(choose_group(two, [A, B], FLAT).owners) == {A}


def holding(found: dict[str, Member], *holders: str) -> dict[str, Member]:
    for peer in holders:
        found[peer].anchor_version, found[peer].state_digest = 3, INITIAL
    return found


def test_a_newcomer_needs_somebody_that_it_can_meet() -> None:
    found = walls(holding(members((), of=2), A), FLAT)
    assert found.keys() == {B}
    assert "hold the state" in found[B]
    assert "forward both ports" in found[B]
    assert not walls(holding(members({C}, of=3), A), FLAT), "A gives it to C, who gives it to B"


def test_nobody_is_walled_for_the_moment_in_which_others_apply_a_verdict() -> None:
    three = holding(members({C}, of=3), A, B, C)
    three[C].anchor_version = 2
    assert not walls(three, FLAT)


def test_what_people_are_told() -> None:
    walled = holding(members((), of=2), A, B)
    said = say_apart(walled, walls(walled, FLAT))
    assert said.startswith("none of the 2 members can be reached from outside")
    assert "forward both ports" in said
    one = holding(members({A}, of=3, unmet={C: (A,)}), A, B, C)
    assert say_apart(one, walls(one, FLAT)).startswith("name 2 cannot take part: it cannot connect to name 0")
    assert say_apart(one, {}) == ""


def ready() -> PeerToCoordinatorRoundReady:
    return PeerToCoordinatorRoundReady(
        round=0, anchor_version=0, state_digest=INITIAL, weight_tokens=10, ranges=(), loss=None
    )


@pytest.mark.parametrize("dialed", [(), (A,), (A, B), (A, B, C)])
@pytest.mark.parametrize("unmet", [{}, {C: (A,)}, {A: (B,), B: (C,)}, {A: (B, C), B: (A, C), C: (A, B)}])
def test_no_plan_makes_strangers_meet(dialed: tuple[str, ...], unmet: dict[str, tuple[str, ...]]) -> None:
    three = members(dialed, of=3, unmet=unmet)
    plan = plan_round(
        0, (0, INITIAL), 5000, {peer: ready() for peer in three}, three, PlanRules(group_size=FLAT, seed=1)
    )
    assert plan is not None
    taking = [one.peer for one in plan.members]
    for owner in {taking[part.owner] for part in plan.parts}:
        for peer in taking:
            assert peer == owner or (owner in dialed and owner not in three[peer].unmet)


# A whole run -------------------------------------------------------------------------------------------------


def turns(world: World, seconds: float) -> None:
    for _ in range(round(seconds)):
        for worker in world.workers:
            if worker.running:
                world.behave(worker)
        world.pass_time(1.0)


def outlook(world: World) -> str:
    """Once the first member holds the newest state, as just after a verdict it does not."""
    while A not in world.scope.synced():
        turns(world, 1)
    return world.scope.status(world.now_s).outlook


def walled_world(*, walled: Collection[int], members: int) -> World:
    world = World(run_file(max_s=5.0, patience_s=3.0))
    world.walled = set(walled)
    for worker in world.workers[:members]:
        world.join(worker)
        world.sync(worker)
    return world


def test_two_behind_walls_do_not_abort_each_others_rounds() -> None:
    world = walled_world(walled={0, 1}, members=2)
    turns(world, 40)
    assert world.scope.rounds_committed >= 3
    assert not world.scope.rounds_aborted
    lone = world.verdicts[-1].verdict.plan
    assert lone is not None
    assert [one.peer for one in lone.members] == [A]
    assert all(world.scope.membership.members[peer].alive for peer in (A, B)), "nobody goes for another's wall"
    assert "none of the 2 members can be reached" in outlook(world)
    told = {one.peer: one.wall for one in world.scope.status(world.now_s).members}
    assert not told[A]
    assert "forward both ports" in told[B]
    assert world.view(world.workers[1]).wall == told[B]


def test_whoever_can_be_reached_brings_them_together() -> None:
    world = walled_world(walled={0, 1}, members=2)
    turns(world, 12)
    world.join(world.workers[2])
    world.sync(world.workers[2])
    turns(world, 30)
    plan = world.verdicts[-1].verdict.plan
    assert plan is not None
    assert [one.peer for one in plan.members] == [A, B, C]
    assert {plan.members[part.owner].peer for part in plan.parts} == {C}
    assert outlook(world) == ""


def test_the_samples_of_an_exact_batch_are_taken_back_from_who_cannot_meet() -> None:
    world = World(run_file("virtual_batch", max_s=8.0, patience_s=3.0))
    for worker in world.workers[:2]:
        world.join(worker)
        world.sync(worker)
        world.take(worker, world.ask(worker, 4))
    assert B in world.scope.leases.held
    world.beat(world.workers[1], unmet=(A,))
    turns_with_claim(world, 25)
    assert world.scope.membership.members[B].alive
    assert B not in world.scope.leases.held
    assert world.scope.rounds_committed >= 1


def turns_with_claim(world: World, seconds: int) -> None:
    """The second worker works no more, and goes on saying that it cannot reach the first."""
    for _ in range(seconds):
        world.behave(world.workers[0])
        world.beat(world.workers[1], unmet=(A,))
        world.pass_time(1.0)


# A pipeline --------------------------------------------------------------------------------------------------


def pipeline_of(*numbers: int, walled: Collection[int]) -> PipelineWorld:
    world = PipelineWorld(pipeline_file())
    world.walled = set(walled)
    for number in numbers:
        world.start(world.peers[number])
    pass_beating(world)
    return world


def pass_beating(world: PipelineWorld) -> None:
    for _ in range(4):
        for peer in world.peers:
            if peer.running:
                world.beat(peer)
        world.tick(0.25)


def test_two_behind_walls_are_no_neighbours_and_the_host_says_why() -> None:
    world = pipeline_of(0, 1, 2, walled={0, 1})
    assert not world.machine.spans
    assert "cannot reach" in world.machine.say_outlook()
    world.start(world.peers[3])
    pass_beating(world)
    assert set(world.machine.spans) == {B, C, D}, "of A and B one stands beside somebody that it can meet"
    assert world.machine.walls().keys() == {A}
    assert "name 1" in world.machine.walls()[A]
    assert world.machine.membership.members[A].alive
    assert {one.peer: one.wall for one in world.machine.status(world.now_s).members}[A]


def test_neighbours_that_turn_out_not_to_meet_are_parted_without_a_rest() -> None:
    world = pipeline_of(0, 1, 2, 3, walled=())
    machine = world.machine
    beside = [peer for peer in (A, B, C) if machine.spans[peer] in ((0, 0), (1, 1))][:2]
    one, other = beside
    for peer, unmet in ((one, other), (other, one)):
        machine.heartbeat(peer, heartbeat(anchor_version=None, state_digest=None, unmet=(unmet,)), world.now_s)
    assert strangers_of(world)
    for _ in range(6):
        world.tick(0.25)
    assert not strangers_of(world)
    assert not machine.rests
    assert all(machine.membership.members[peer].alive for peer in (A, B, C, D))


def strangers_of(world: PipelineWorld) -> list[tuple[str, str]]:
    return strangers(world.machine.spans, world.machine._peers())
