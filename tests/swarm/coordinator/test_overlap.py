"""Rounds that close and are averaged while their members work on for the next one."""

import pytest
from tests.swarm.coordinator.world import TOKENS_PER_SAMPLE, Worker, World, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.round_rules import Judgement
from shoal.swarm.sample_ranges import count, subtract


def closing(members: int = 2, **settings: float) -> World:
    """Nobody is ready yet; everybody has trained, and holds samples besides."""
    world = World(run_file(overlap=True, **settings), members)
    while world.scope.round.phase != "closing":
        for worker in world.workers[:members]:
            world.behave(worker)
        world.tick(0.25)
    return world


def offer(world: World, *workers: Worker) -> None:
    for worker in workers:
        world.ready(worker)
        worker.offered = True


def averaging(members: int = 2, **settings: float) -> World:
    world = closing(members, **settings)
    world.pass_time(world.scope.round.closes_s - world.now_s + 0.25)
    offer(world, *world.workers[:members])
    assert world.scope.round.phase == "averaging"
    return world


def ahead(world: World, worker: Worker, samples: int) -> None:
    """Lease and train so many for the next round."""
    while count(worker.ahead) < samples:
        if not worker.left:
            world.take(worker, world.ask(worker, samples - count(worker.ahead)))
            assert worker.left
        world.train(worker, samples - count(worker.ahead))
    world.beat(worker)


def verdict(world: World) -> None:
    """All report, and nobody acts on what comes of it."""
    number = world.scope.round.number
    for worker in world.workers:
        if worker.running:
            world.report(worker)
    assert world.scope.round.number == number + 1


def test_whoever_is_ready_gets_samples_for_the_next_round() -> None:
    world = closing()
    one, other = world.workers[:2]
    one.left = other.left = []
    offer(world, one)
    assert world.ask(one, 4)
    world.pass_time(world.scope.round.closes_s - world.now_s)
    assert world.scope.round.phase == "closing"
    assert world.ask(other, 4) == []
    other.offered = True  # as it says
    assert world.ask(other, 4) == [], "its part of this round comes first"


def test_without_overlap_nobody_does() -> None:
    world = World(run_file(), 2)
    while world.scope.round.phase != "averaging":
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    world.overlap = True  # the members' side alone
    assert world.ask(world.workers[0], 4) == []


def test_while_a_round_is_averaged_members_of_it_get_samples_but_not_for_it() -> None:
    world = averaging()
    one = world.workers[0]
    assert world.ask(one, 4)
    one.offered = False  # as if it asked for the round that is averaged
    assert world.ask(one, 4) == []


def test_work_done_ahead_counts_in_the_next_round_from_its_beginning() -> None:
    world = averaging()
    one, other = world.workers[:2]
    ahead(world, one, 6)
    ahead(world, other, 2)
    verdict(world)
    assert world.scope.round.phase == "training"
    assert sum(work.tokens for work in world.scope.works()) == 8 * TOKENS_PER_SAMPLE
    assert world.view(one).tokens_in_round == 8 * TOKENS_PER_SAMPLE
    world.conclude(one)
    world.beat(one)
    assert world.view(one).tokens_in_round == 8 * TOKENS_PER_SAMPLE, "said again, not counted again"


def test_work_of_an_aborted_round_and_work_done_ahead_both_count() -> None:
    world = averaging()
    offered = sum(worker.tokens_done for worker in world.workers[:2])
    ahead(world, world.workers[0], 4)
    world.scope.give_verdict(world.scope.verdict_of(Judgement(reason="for the test")))
    world.settle()
    expected = offered + 4 * TOKENS_PER_SAMPLE
    assert sum(work.tokens for work in world.scope.works()) == expected
    for worker in world.workers[:2]:
        world.conclude(worker)
        world.beat(worker)
    assert sum(work.tokens for work in world.scope.works()) == expected
    assert world.scope.leases.holds(world.workers[0].peer, world.workers[0].done)


def test_the_next_round_does_not_close_before_the_verdict() -> None:
    world = averaging()
    for worker in world.workers[:2]:
        ahead(world, worker, 30)
    for _ in range(20):
        for worker in world.workers[:2]:
            world.beat(worker)
        world.tick(0.25)
    assert (world.scope.round.number, world.scope.round.phase) == (0, "averaging")
    verdict(world)
    world.tick(0.25)
    assert (world.scope.round.number, world.scope.round.phase) == (1, "closing"), "its tokens are there"


def test_a_round_is_as_old_as_the_work_for_it() -> None:
    """Or rounds that close by ``max_s`` would be as far apart as without overlap."""
    world = averaging(tokens=10**9)
    closed_s = world.scope.round.closes_s
    world.pass_time(2.0)
    verdict(world)
    assert world.scope.round.opened_s == closed_s < world.now_s
    world.restart()


def test_the_last_round_of_a_limited_time_ends_with_the_run() -> None:
    world = averaging(tokens=10**9, run_max_s=31.0)
    world.pass_time(2.0)
    verdict(world)
    machine = world.machine
    ends_s = machine.scope.round.opened_s + machine.scope.goal().max_s
    assert machine.scope.elapsed_s(ends_s) == pytest.approx(31.0)


def test_a_waiting_round_does_not_end_while_a_member_is_about_to_apply_the_last_verdict() -> None:
    """The run's time is over, and its only member holds the version before the newest one."""
    world = averaging(run_max_s=100.0)
    verdict(world)
    for worker in world.workers[:2]:
        world.leave(worker)
    world.tick(0.25)
    one = world.workers[0]
    world.join(one)
    one.round, one.version, one.digest = world.scope.round.number, 0, world.archive[0]
    world.beat(one)
    assert (world.scope.round.phase, list(world.scope.working())) == ("waiting", [one.peer])
    world.scope.elapsed_before_s += 100.0
    assert world.scope.is_late(world.now_s)
    number = world.scope.round.number
    world.tick(0.25)
    assert (world.scope.round.phase, world.scope.round.number) == ("waiting", number)
    one.version, one.digest = 1, world.archive[1]
    world.beat(one)
    world.tick(0.25)
    assert world.scope.round.phase == "closing"


def test_who_has_not_applied_the_last_verdict_yet_is_waited_for() -> None:
    """It does that at its next step, which may be long."""
    world = averaging()
    one, other = world.workers[:2]
    ahead(world, one, 20)
    ahead(world, other, 20)
    verdict(world)
    world.conclude(one)
    world.beat(one)
    world.tick(0.25)
    assert world.scope.round.phase == "closing"
    world.pass_time(world.scope.round.closes_s - world.now_s)
    assert world.ask(other, 2) == [], "closing"
    offer(world, one)
    world.tick(0.25)
    assert world.scope.round.phase == "closing"
    world.conclude(other)
    world.beat(other)
    offer(world, other)
    assert world.scope.round.plan is not None
    assert len(world.scope.round.plan.members) == 2


def test_who_has_not_applied_the_last_verdict_yet_gets_samples_for_the_round_after() -> None:
    world = averaging()
    one = world.workers[0]
    verdict(world)
    one.left = []
    assert one.offered
    assert world.ask(one, 4)


def test_what_the_dead_had_leased_ahead_is_free_at_once_and_what_is_averaged_at_the_verdict() -> None:
    world = averaging()
    dead = world.workers[1]
    ahead(world, dead, 4)
    offered, dead_ahead = list(dead.done), list(dead.ahead)
    world.leave(dead)
    leases = world.scope.leases
    assert leases.held[dead.peer] == offered
    assert not subtract(dead_ahead, leases.pool)
    world.restart()
    world.report(world.workers[0], dropped=(1,))
    assert dead.peer not in world.scope.leases.held
    assert not subtract(offered, world.scope.leases.pool), "it is in no mean"


def test_who_comes_back_while_its_round_is_averaged_keeps_what_it_gets_then() -> None:
    world = averaging()
    dead = world.workers[1]
    world.leave(dead)
    world.join(dead)
    world.sync(dead)
    dead.offered = True  # nothing, of a round that is averaged already
    mine = world.ask(dead, 4)
    assert mine
    world.report(world.workers[0], dropped=(1,))
    assert world.scope.round.number == 1
    assert world.scope.leases.held[dead.peer] == mine
    world.restart()


def test_a_restart_while_a_round_is_averaged_forgets_no_sample_leased_ahead() -> None:
    world = averaging()
    one = world.workers[0]
    ahead(world, one, 4)
    world.restart()
    assert world.scope.leases.holds(one.peer, one.ahead)
    assert world.scope.leases.holds(one.peer, one.done)
    for worker in world.workers[:2]:
        world.beat(worker)
    verdict(world)
    assert world.scope.leases.holds(one.peer, one.ahead)
    assert not world.scope.leases.holds(one.peer, one.done), "committed"
    assert sum(work.tokens for work in world.scope.works()) == 4 * TOKENS_PER_SAMPLE


def test_rounds_go_on_and_on() -> None:
    world = World(run_file(overlap=True), 3)
    while len(world.verdicts) < 6:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
    assert all(one.verdict.committed for one in world.verdicts)
    rounds = [event.round for event in world.events if isinstance(event, ev.LeaseGranted)]
    assert rounds == sorted(rounds)
    assert [event for event in world.events if isinstance(event, ev.MemberLost)] == []
