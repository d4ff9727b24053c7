"""A snapshot stands for all events before it, with every attribute that they have made."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.swarm.coordinator.world import World, attributes, journaled, run_file

STEPS = st.lists(
    st.tuples(st.sampled_from(["work", "kill", "afresh", "leave", "pass"]), st.integers(0, 3)), min_size=5, max_size=40
)


def act(world: World, what: str, number: int) -> None:
    worker = world.workers[number]
    match what:
        case "kill":
            worker.running = False
        case "afresh":
            world.afresh(worker)
        case "leave":
            world.leave(worker)
        case "pass":
            world.pass_time(1.0 + number)
        case "work":
            for _ in range(8):
                for one in world.workers[: number + 1]:
                    world.behave(one)
                world.tick(0.25)


@pytest.mark.parametrize("algorithm", ["diloco", "virtual_batch"])
@settings(max_examples=15, deadline=None)
@given(steps=STEPS)
def test_snapshot_and_rest_replay_to_the_same(algorithm: str, steps: list[tuple[str, int]]) -> None:
    world = World(run_file(algorithm), 3)
    for what, number in [("work", 2), *steps]:
        act(world, what, number)
        short, whole = world.replayed(world.short), world.replayed(world.journal)
        assert [name for name, value in attributes(whole).items() if attributes(short)[name] != value] == []
        assert journaled(short.scope) == journaled(world.scope)


def test_there_is_one_at_every_verdict() -> None:
    world = World(run_file(), 3)
    while len(world.verdicts) < 5:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
    assert len(world.short) < len(world.journal) / 3


def test_none_in_the_middle_of_a_round() -> None:
    world = World(run_file(), 3)
    seen = set()
    while len(world.verdicts) < 2:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
        phase = world.scope.round.phase
        seen.add(phase)
        assert (world.scope.snapshot() is None) == (phase in ("closing", "averaging"))
    assert {"training", "closing", "averaging"} <= seen


def test_a_run_that_has_not_begun() -> None:
    world = World(run_file())
    world.settle()
    snapshot = world.scope.snapshot()
    assert snapshot is not None
    assert (snapshot.round, snapshot.phase, snapshot.members) == (0, "waiting", ())
