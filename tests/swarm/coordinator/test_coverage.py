"""Epochs: how far each is, and what is said at its end."""

import pytest
from tests.swarm.coordinator.world import MODEL, SIGNER, TOKENS_PER_SAMPLE, World, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.lease_ledger import LeaseLedger, RetrainedSamples, coverage_of, epochs_covered
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.protocol.types import MAX_EPOCHS
from shoal.swarm.sample_ranges import covers


def of(ledger: LeaseLedger, samples: int = 10) -> list[tuple[int, int, int, int]]:
    return [(one.epoch, one.committed, one.leased, one.returned) for one in coverage_of(ledger, samples)]


def test_each_sample_is_counted_where_it_is() -> None:
    assert of(LeaseLedger()) == [(0, 0, 0, 0)]
    ledger = LeaseLedger(fresh=25, pool=[(2, 4), (19, 21)], held={"a": [(8, 12)], "b": [(22, 25)]})
    assert of(ledger) == [(0, 6, 2, 2), (1, 7, 2, 1), (2, 1, 3, 1)]
    assert of(LeaseLedger(fresh=20)) == [(0, 10, 0, 0), (1, 10, 0, 0)]
    assert [one[0] for one in of(LeaseLedger(fresh=1000))] == list(range(100 - MAX_EPOCHS, 100))


@pytest.mark.parametrize(
    ("ledger", "covered"),
    [
        (LeaseLedger(), 0),
        (LeaseLedger(fresh=9), 0),
        (LeaseLedger(fresh=30), 3),
        (LeaseLedger(fresh=30, pool=[(19, 20)]), 1),
        (LeaseLedger(fresh=30, held={"a": [(20, 21)], "b": [(25, 26)]}), 2),
    ],
)
def test_an_epoch_is_covered_when_all_of_it_is_committed(ledger: LeaseLedger, covered: int) -> None:
    assert epochs_covered(ledger, 10) == covered


def test_a_sample_counts_once_however_often_it_is_trained_on_again() -> None:
    again = RetrainedSamples()
    again.lose([(5, 10), (0, 2)])
    again.lose([(8, 12)])
    again.undo([(9, 11)])
    assert again.within(0, 10) == (7, 1)
    again.forget(10)
    assert again == RetrainedSamples([(10, 12)], [(10, 11)])


def covered(world: World) -> list[ev.EpochsCovered]:
    return [one for one in world.events if isinstance(one, ev.EpochsCovered)]


def until_covered(world: World, epochs: int, members: int = 2) -> None:
    while not covered(world) or covered(world)[-1].stop < epochs:
        for worker in world.workers[:members]:
            world.behave(worker)
        world.tick(0.25)
        assert world.now_s < 2000.0


def test_every_epoch_is_told_of_once_and_after_a_restart_goes_on() -> None:
    world = World(run_file(), 2)
    until_covered(world, 1)
    world.restart()
    until_covered(world, 3)
    told = covered(world)
    assert told[0].first == 0
    assert [one.first for one in told[1:]] == [one.stop for one in told[:-1]]
    assert all((one.samples, one.lost, one.undone) == (MODEL.samples, 0, 0) for one in told)


def test_an_epoch_that_a_verdict_taken_over_has_covered_is_told_of() -> None:
    world = World(run_file(), 2)
    until_covered(world, 1)
    events = [ev.unpack_event(one) for transaction in world.journal for one in transaction]
    end = next(number for number, one in enumerate(events) if isinstance(one, ev.EpochsCovered))
    given, told = events[end - 1 : end + 1]
    assert isinstance(given, ev.VerdictGiven)
    lacks = PlainRun(world.run, SIGNER.sign, 0.0, given.verdict.epoch)
    lacks.log.replay(lacks.scope, events[: end - 1], 0.0)
    assert lacks.scope.take_over(given.verdict, 0.0)
    assert lacks.log.take()[1:] == [told]


def test_who_dies_in_its_round_has_its_samples_counted_as_done_again() -> None:
    world = World(run_file(), 3)
    while world.scope.round.phase != "averaging":
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
    plan = world.scope.round.plan
    assert plan is not None
    lost = plan.members[2].weight_tokens // TOKENS_PER_SAMPLE
    world.leave(world.workers[2])
    for worker in world.workers[:2]:
        world.report(worker, dropped=(2,))
    until_covered(world, 1)
    assert (covered(world)[0].lost, covered(world)[0].undone) == (lost, 0)


def test_a_covered_epoch_whose_rounds_are_undone_is_told_of_again() -> None:
    world = World(run_file(), 2)
    until_covered(world, 1)
    world.lose_all(lambda version: False)
    for worker in world.workers[:2]:
        world.join(worker)
        world.sync(worker)
    world.tick(0.1)
    assert world.scope.anchor_version == 0
    assert world.scope.status(world.now_s).coverage[0].returned == MODEL.samples
    until_covered(world, 1)
    before = len(covered(world))
    while len(covered(world)) == before:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    assert [(one.first, one.undone) for one in covered(world)[:2]] == [(0, 0), (0, MODEL.samples)]


def test_nobody_knows_how_long_an_epoch_is_before_somebody_tells() -> None:
    world = World(run_file(), 1)
    machine = world.machine
    assert machine.scope.model == MODEL
    world.scope.model = MODEL.model_copy(update={"samples": None})
    assert machine.scope.status(world.now_s).coverage == ()
    machine.scope.describe_model(world.workers[0].peer, MODEL)
    assert machine.scope.model == MODEL
    assert len(machine.scope.status(world.now_s).coverage) == 1


def test_an_aborted_round_commits_nothing_and_the_dead_ones_samples_are_free() -> None:
    """The living keep theirs for the next round."""
    world = World(run_file(), 2)
    while world.scope.round.phase != "averaging":
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    ranges = dict(world.scope.round.ranges)
    for worker in world.workers[:2]:
        worker.hung = True
    world.leave(world.workers[0])
    world.report(world.workers[1], missing=tuple(range(8)))
    verdict = world.verdicts[-1].verdict
    assert not verdict.committed
    dead, living = world.workers[0].peer, world.workers[1].peer
    assert covers(world.scope.leases.pool, ranges[dead])
    assert world.scope.leases.holds(living, ranges[living])
    assert dead not in world.scope.leases.held
    assert of(world.scope.leases, 64)[0][1] == 0
