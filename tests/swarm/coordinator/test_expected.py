"""The plan that is expected: announced with the closing, then confirmed or replaced."""

import pytest
from tests.swarm.coordinator.world import MODEL, World, run_file

from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import TensorSpec


def closing(world: World, members: int = 4, bps: float = 0.0) -> RoundPlan | None:
    """They work until the closing is announced, with links of which they claim ``bps``; what is expected then."""
    workers = world.workers[:members]
    while world.scope.round.phase != "closing":
        for worker in workers:
            world.behave(worker)
            if bps:
                world.beat(worker, bandwidth_bps=bps)
        if world.scope.round.phase != "closing":
            world.tick(0.1)
    expected = world.view(workers[0]).expected
    assert all(world.view(worker).expected == expected for worker in workers)
    assert not world.view(workers[0]).as_expected
    return expected


def all_ready(world: World, members: int = 4) -> RoundPlan:
    """The plan that follows when these are ready."""
    for worker in world.workers[:members]:
        world.behave(worker)
    while world.scope.round.phase == "closing":
        world.tick(0.1)
    plan = world.scope.round.plan
    assert plan is not None
    assert world.view(world.workers[0]).expected is None, "it stands in the plan"
    return plan


def weights(plan: RoundPlan) -> list[int]:
    return [member.weight_tokens for member in plan.members]


def test_the_plan_is_as_expected_but_for_weights_when_all_are_ready() -> None:
    world = World(run_file(), members=4)
    for _ in range(3):
        expected = closing(world)
        assert expected is not None
        assert weights(expected) == [1, 1, 1, 1]
        plan = all_ready(world)
        assert world.view(world.workers[0]).as_expected
        assert plan.model_copy(update={"members": expected.members}) == expected
        assert weights(plan) == [worker.tokens_done for worker in world.workers[:4]] != weights(expected)
        for worker in world.workers[:4]:
            world.behave(worker)
        world.tick(0.1)


def test_another_plan_when_somebody_is_not_ready() -> None:
    world = World(run_file(), members=4)
    assert closing(world) is not None
    plan = all_ready(world, 3)
    assert len(plan.members) == 3
    assert not world.view(world.workers[0]).as_expected


def test_nothing_is_expected_any_more_when_a_member_has_left_though_it_is_back() -> None:
    """What it offers now is not what the others may have got of it."""
    world = World(run_file(), members=4)
    assert closing(world) is not None
    world.afresh(world.workers[3])
    assert world.view(world.workers[0]).expected is None
    all_ready(world)
    assert not world.view(world.workers[0]).as_expected


def test_nothing_is_expected_any_more_when_a_member_brings_something_else_than_it_said() -> None:
    """The others may have got some of what it would have brought first."""
    world = World(run_file(), members=4)
    assert closing(world) is not None
    for again in range(2):
        world.ready(world.workers[0])
        assert world.view(world.workers[1]).expected is not None, f"said {again + 1} times"
    world.ready(world.workers[0], loss=7.0)
    assert world.view(world.workers[1]).expected is None
    all_ready(world)
    assert not world.view(world.workers[0]).as_expected


def test_a_round_that_is_reopened_expects_nothing_until_it_closes_again() -> None:
    world = World(run_file(), members=2)
    assert closing(world, 2) is not None
    for worker in world.workers[:2]:
        world.leave(worker)
    world.tick(0.1)
    assert world.scope.round.phase != "closing"
    assert world.scope.round.expected is None


def test_what_members_say_of_their_links_meanwhile_changes_nothing() -> None:
    world = World(run_file(), members=4)
    expected = closing(world)
    assert expected is not None
    for worker in world.workers[:4]:
        world.beat(worker, bandwidth_bps=1e8 if worker.number else 1e5)
        world.ready(worker)
    while world.scope.round.phase == "closing":
        world.tick(0.1)
    plan = world.scope.round.plan
    assert plan is not None
    assert plan.parts == expected.parts
    assert world.view(world.workers[0]).as_expected


@pytest.mark.parametrize(("codec", "most"), [("int8", 2**22), ("float16", 2**20)])
def test_chunks_are_as_large_as_the_run_s_codec_packs_into_one(
    monkeypatch: pytest.MonkeyPatch, codec: str, most: int
) -> None:
    large = TensorSpec(name="w", shape=(2**13, 2**14))
    monkeypatch.setattr("tests.swarm.coordinator.world.MODEL", MODEL.model_copy(update={"layout": (large,)}))
    run = run_file()
    world = World(run.model_copy(update={"averaging": run.averaging.model_copy(update={"codec": codec})}), members=4)
    expected = closing(world, bps=1e9)
    assert expected is not None
    assert expected.chunk_elements == most


def test_a_coordinator_that_started_anew_expects_nothing() -> None:
    world = World(run_file(), members=4)
    assert closing(world) is not None
    world.restart()
    for worker in world.workers[:4]:
        world.beat(worker)
    assert world.view(world.workers[0]).expected is None
    all_ready(world)
    assert not world.view(world.workers[0]).as_expected


def test_neither_a_grid_nor_a_batch_that_has_to_be_whole_is_expected() -> None:
    run = run_file()
    small = run.model_copy(update={"averaging": run.averaging.model_copy(update={"group_size": 2})})
    assert closing(World(small, members=4)) is None
    assert closing(World(run_file("virtual_batch"), members=4)) is None
