"""Time and energy of members, by which a run's cost is reckoned: from joining to leaving, through restarts."""

from __future__ import annotations

import pytest
from tests.swarm.coordinator.world import CPU, Worker, World, run_file

from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.run_file import CostSection
from shoal.swarm.protocol.types import MAX_DEVICE_W, DeviceUse, MemberStatus

PRICED = run_file().model_copy(update={"cost": CostSection(prices={CPU.name: 3600.0}, currency="EUR")})
"""A second costs one."""


def rounds(world: World, number: int) -> None:
    """Train until so many rounds have ended."""
    while len(world.verdicts) < number:
        for worker in world.workers[:3]:
            if worker.running:
                world.behave(worker)
        world.tick(0.25)


def status(world: World) -> CoordinatorToPeerStatus:
    return world.scope.status(world.now_s)


def test_time_is_counted_from_joining_to_leaving() -> None:
    world = World(PRICED, 3)
    began_s, peer = world.now_s, world.workers[2].peer
    rounds(world, 3)
    assert all(one.present_s == world.now_s - began_s for one in status(world).members)
    world.leave(world.workers[2])
    left_s = world.now_s
    rounds(world, 5)
    told = {one.peer: one for one in status(world).members}
    assert told[peer].present_s == left_s - began_s
    assert told[peer].cost == told[peer].present_s
    assert told[world.workers[0].peer].present_s == world.now_s - began_s
    costs = status(world).costs
    assert costs.cost == sum(one.present_s for one in told.values())
    assert costs.currency == "EUR"
    assert costs.million_tokens_cost == 1e6 * costs.cost / world.scope.tokens_committed


def test_a_round_costs_the_time_that_its_members_were_there() -> None:
    world = World(PRICED, 3)
    rounds(world, 4)
    before, ended = (one.verdict.ended_s for one in world.verdicts[-2:])
    assert status(world).costs.round_cost == 3 * (ended - before)
    world.leave(world.workers[2])
    left_s = world.now_s
    rounds(world, 5)
    last_s = world.verdicts[-1].verdict.ended_s
    assert status(world).costs.round_cost == 2 * (last_s - ended) + (left_s - ended)


def test_time_goes_on_after_a_member_has_come_back() -> None:
    world = World(PRICED, 3)
    worker = world.workers[2]
    rounds(world, 2)
    here_s = next(one.present_s for one in status(world).members if one.peer == worker.peer)
    world.leave(worker)
    rounds(world, 4)
    world.join(worker)
    joined_s = world.now_s
    rounds(world, 5)
    told = next(one for one in status(world).members if one.peer == worker.peer)
    assert told.present_s == here_s + world.now_s - joined_s


def test_nobody_pays_for_the_time_in_which_no_coordinator_was_there() -> None:
    world = World(PRICED, 3)
    rounds(world, 3)
    counted_s = {one.peer: world.scope.membership.members[one.peer].present_s for one in world.workers[:3]}
    world.now_s += 10_000.0
    world.restart()
    began_s = world.now_s
    assert {one.peer: one.present_s for one in status(world).members} == counted_s
    rounds(world, 4)
    for one in status(world).members:
        assert one.present_s <= counted_s[one.peer] + world.now_s - began_s


def test_a_clock_that_goes_back_or_far_ahead_adds_nothing_absurd() -> None:
    world = World(PRICED, 3)
    rounds(world, 2)
    member = world.scope.membership.members[world.workers[0].peer]
    counted_s = member.present_s
    member.count_time(0.0)
    assert member.present_s == counted_s
    member.count_time(1e12)
    assert member.present_s == 1e9


# Energy -----------------------------------------------------------------------------------------------------


def reads(world: World, worker: Worker, energy_j: float) -> None:
    """The worker's GPU has taken so much since its process began."""
    world.beat(worker, use=DeviceUse(cpu=0.5, memory_used_bytes=1, power_w=300.0, energy_j=energy_j))


def told(world: World, worker: Worker) -> MemberStatus:
    return next(one for one in status(world).members if one.peer == worker.peer)


def test_energy_is_counted_by_round_from_the_first_reading_on() -> None:
    world = World(PRICED, 3)
    one, two, _ = world.workers[:3]
    assert told(world, one).energy_j is None
    reads(world, one, 500.0)
    reads(world, two, 0.0)
    assert told(world, one).energy_j == 0.0
    rounds(world, 1)
    reads(world, one, 2500.0)
    reads(world, two, 100.0)
    assert status(world).costs.round_energy_j == 0.0
    rounds(world, 2)
    costs = status(world).costs
    assert (costs.energy_j, costs.round_energy_j, costs.metered_members) == (2100.0, 2100.0, 2)
    reads(world, one, 2600.0)
    assert told(world, one).energy_j == 2100.0
    assert told(world, one).round_energy_j == 2000.0
    rounds(world, 3)
    assert status(world).costs.round_energy_j == 100.0
    timings = world.scope.timings.since(0)
    assert [one.energy_j for one in timings] == [0.0, 2100.0, 100.0]
    assert timings[-1].cost == status(world).costs.round_cost


def test_energy_outlives_the_host_the_member_and_its_process() -> None:
    world = World(PRICED, 3)
    one = world.workers[0]
    rounds(world, 1)
    reads(world, one, 0.0)
    world.tick(1.0)
    reads(world, one, 700.0)
    rounds(world, 2)
    world.restart()
    assert told(world, one).energy_j == 700.0
    reads(world, one, 5000.0)  # nobody counted while no host was there
    assert told(world, one).energy_j == 700.0
    world.tick(1.0)
    reads(world, one, 5050.0)
    assert told(world, one).energy_j == 750.0
    world.leave(one)
    rounds(world, 4)
    world.join(one)
    reads(world, one, 0.0)
    world.tick(1.0)
    reads(world, one, 9.0)
    assert told(world, one).energy_j == 759.0


def test_a_liar_s_energy_is_bounded_by_its_time_and_is_nobody_else_s() -> None:
    world = World(PRICED, 3)
    one, two, _ = world.workers[:3]
    rounds(world, 1)
    for worker in (one, two):
        reads(world, worker, 0.0)
    began_s = world.now_s
    reads(world, one, 1e15)
    world.tick(0.25)
    reads(world, one, 0.0)
    reads(world, one, 1e15)
    reads(world, two, 10.0)
    assert told(world, one).energy_j <= MAX_DEVICE_W * (world.now_s - began_s)
    assert told(world, two).energy_j == 10.0
    with pytest.raises(ValueError, match="power_w"):
        DeviceUse(cpu=0.5, memory_used_bytes=1, power_w=2 * MAX_DEVICE_W)
