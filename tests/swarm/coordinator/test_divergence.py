"""When training has diverged: whose word counts, and how far the run goes back."""

import pytest
from tests.swarm.coordinator.test_round_scope import until
from tests.swarm.coordinator.world import INITIAL, Worker, World, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.divergence import Setback
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS
from shoal.swarm.protocol.types import KeptState


def committed(world: World, rounds: int, members: int) -> None:
    for _ in range(rounds):
        before = world.scope.anchor_version
        deadline_s = world.now_s + 60
        while world.scope.anchor_version == before:
            assert world.now_s < deadline_s
            for worker in world.workers[:members]:
                world.behave(worker)
            world.tick(0.25)
    for worker in world.workers[:members]:
        if rounds:
            world.behave(worker)


def say(world: World, worker: Worker, version: int | None = None) -> str:
    """It starts afresh and says that nothing comes of that version (the newest one for None); what it is told."""
    at = world.scope.anchor_version if version is None else version
    digest = world.archive.get(at, bytes(32))
    world.afresh(worker)
    worker.version = worker.digest = None
    kept = sorted(((one, of) for one, of in world.archive.items() if one < at), reverse=True)
    worker.kept = tuple(KeptState(anchor_version=one, digest=of) for one, of in kept[:16])
    worker.diverged = KeptState(anchor_version=at, digest=digest)
    world.beat(worker)
    world.tick(0.25)
    world.beat(worker)
    return world.view(worker).divergence


def go_on(world: World) -> None:
    """Whoever said so takes up what the run is at now."""
    for worker in world.workers:
        if worker.diverged is not None:
            worker.diverged = None
            world.sync(worker)


def back(world: World) -> ev.WentBack | None:
    return world.verdicts[-1].went_back if world.verdicts else None


def test_the_run_goes_back_when_most_of_the_work_says_so() -> None:
    world = World(run_file(), 3)
    committed(world, 3, 3)
    assert say(world, world.workers[0]) == ""
    assert back(world) is None
    say(world, world.workers[1])
    went = back(world)
    assert went is not None
    assert (went.from_version, world.scope.anchor_version, went.bad_version, went.suspects) == (3, 2, 3, ())
    assert "diverged at version 3" in world.verdicts[-1].verdict.reason
    assert world.scope.setback == Setback(3, 1, 1)
    assert world.view(world.workers[2]).must_resync
    world.restart()
    assert world.scope.setback == Setback(3, 1, 1)
    go_on(world)
    committed(world, 2, 3)
    assert world.scope.anchor_version == 4


@pytest.mark.parametrize("phase", ["closing", "averaging"])
def test_a_round_under_way_is_no_reason_to_wait(phase: str) -> None:
    world = World(run_file(), 3)
    committed(world, 2, 3)
    until(world, phase, 3)
    for worker in world.workers[:2]:
        say(world, worker)
    assert world.scope.anchor_version == 1
    assert back(world) is not None
    go_on(world)
    committed(world, 2, 3)


def test_a_minority_changes_nothing_and_is_told_that_it_is_at_fault() -> None:
    world = World(run_file(), 3)
    committed(world, 2, 3)
    faulty, others = world.workers[0], world.workers[1:3]
    assert say(world, faulty) == "", "it may turn out to be the same for others"
    version = world.scope.anchor_version
    deadline_s = world.now_s + 60
    while world.scope.anchor_version == version:
        assert world.now_s < deadline_s
        for worker in others:
            world.behave(worker)
        world.beat(faulty)
        world.tick(0.25)
    world.beat(faulty)
    assert world.view(faulty).divergence == "at fault"
    assert back(world) is None


def test_the_word_of_newcomers_counts_nothing_beside_a_record() -> None:
    world = World(run_file(), 1)
    committed(world, CREDIT_ROUNDS, 1)
    for worker in world.workers[1:7]:
        world.join(worker)
        world.sync(worker)
    committed(world, 2, 7)
    for worker in world.workers[1:7]:
        say(world, worker)
    assert back(world) is None
    say(world, world.workers[0])
    assert back(world) is not None


def test_before_anybody_has_a_record_claims_of_much_work_weigh_nothing() -> None:
    """In its first round nobody knows how fast a member is."""
    world = World(run_file(), 2)
    committed(world, 3, 2)
    late = world.workers[2]
    world.join(late)
    world.sync(late)
    world.take(late, world.ask(late, 200))
    world.train(late, 200)
    committed(world, 1, 3)
    tokens = {peer: one.tokens_committed for peer, one in world.scope.membership.members.items()}
    assert 2 * tokens[late.peer] > sum(tokens.values()), tokens
    for worker in world.workers[:2]:
        say(world, worker)
    went = back(world)
    assert went is not None
    assert went.suspects == (late.peer,)


def test_what_the_run_never_held_is_no_matter() -> None:
    world = World(run_file(), 2)
    committed(world, 2, 2)
    for worker in world.workers[:2]:
        world.afresh(worker)
        worker.version = worker.digest = None
        worker.diverged = KeptState(anchor_version=1, digest=b"?" * 32)
        world.beat(worker)
        assert world.view(worker).divergence == "go on"
    world.tick(0.25)
    assert back(world) is None


def test_who_may_have_spoilt_it_is_left_out_for_a_while_and_longer_each_time() -> None:
    world = World(run_file(), 2)
    committed(world, 3, 2)
    late = world.workers[2]
    world.join(late)
    world.sync(late)
    committed(world, 1, 3)
    for times in range(2):
        version = world.scope.anchor_version
        for worker in world.workers[:2]:
            say(world, worker)
        went = back(world)
        assert went is not None
        assert went.suspects == (late.peer,)
        assert "name 2" in world.verdicts[-1].verdict.reason
        assert world.scope.setback.fruitless == 0
        assert world.scope.anchor_version < version
        go_on(world)
        world.behave(late)
        world.behave(late)
        assert late.version == world.scope.anchor_version, "it may still follow the run"
        assert world.ask(late, 4) == []
        world.restart()
        assert world.ask(late, 4) == []
        rounds = world.scope.status(world.now_s).members[2].suspended_rounds
        assert rounds == 8 << times
        late.norm = 1e30  # by then it is no newcomer
        committed(world, rounds, 2)
        assert late.peer not in [one.peer for one in world.verdicts[-1].verdict.plan.members]  # type: ignore[union-attr]
        for worker in world.workers[:2]:
            worker.norm = 1.0
        committed(world, 1, 3)  # a third one above its bound would suspend it, too
        assert late.peer in [one.peer for one in world.verdicts[-1].verdict.plan.members]  # type: ignore[union-attr]


def test_a_suspect_that_is_forgotten_meanwhile_is_none() -> None:
    world = World(run_file(), 3)
    committed(world, 3, 3)
    late = world.workers[3]
    world.join(late)
    world.sync(late)
    until(world, "averaging", 4)
    plan = world.scope.round.plan
    assert plan is not None
    (index,) = [at for at, one in enumerate(plan.members) if one.peer == late.peer]
    world.leave(late)
    for worker in world.workers[:3]:
        world.report(worker, dropped=(index,))
    assert world.verdicts[-1].lost == (late.peer,)
    assert world.scope.history.rounds[-1].suspects == (), "its work is in no version"
    world.scope.history.rounds[-1] = world.scope.history.rounds[-1]._replace(suspects=(late.peer,))
    del world.scope.membership.members[late.peer]
    for worker in world.workers[:3]:
        world.conclude(worker)
    for worker in world.workers[:2]:
        say(world, worker)
    went = back(world)
    assert went is not None
    assert went.suspects == ()


@pytest.mark.parametrize("is_all_lost", [False, True])
def test_what_newcomers_say_to_keep_counts_where_nobody_else_keeps_anything(is_all_lost: bool) -> None:
    world = World(run_file(), 2)
    committed(world, CREDIT_ROUNDS + 1, 2)
    newcomer, at = world.workers[2], world.scope.anchor_version
    world.join(newcomer)
    newcomer.kept = (KeptState(anchor_version=at - 1, digest=world.archive[at - 1]),)
    world.beat(newcomer)
    for worker in world.workers[:2]:
        worker.version = worker.digest = None
        worker.kept = () if is_all_lost else (KeptState(anchor_version=at - 4, digest=world.archive[at - 4]),)
        worker.diverged = KeptState(anchor_version=at, digest=world.archive[at])
        world.beat(worker)
    world.tick(0.25)
    assert back(world) is not None
    assert world.scope.anchor_version == (at - 1 if is_all_lost else at - 4)


def test_nobody_is_left_out_where_all_were_alike() -> None:
    world = World(run_file(), 3)
    for worker in world.workers[:3]:
        worker.norm = 1.0
    committed(world, 1, 3)
    for worker in world.workers[:3]:
        worker.norm = 1e30
    committed(world, 1, 3)
    for worker in world.workers[:2]:
        say(world, worker)
    went = back(world)
    assert went is not None
    assert went.suspects == ()


def test_a_run_that_cannot_be_helped_is_given_up() -> None:
    """Further back each time, and not for ever."""
    world = World(run_file(), 2)
    committed(world, 4, 2)
    reached = []
    for _ in range(3):
        for worker in world.workers[:2]:
            say(world, worker)
        reached.append(world.scope.anchor_version)
        go_on(world)
        committed(world, 4 - world.scope.anchor_version, 2)
    assert reached == [3, 2, 0]
    assert [say(world, worker) for worker in world.workers[:2]] == ["", "unrecoverable"]
    world.beat(world.workers[0])
    assert world.view(world.workers[0]).divergence == "unrecoverable"


def test_a_run_that_diverges_at_its_start_is_given_up_at_once() -> None:
    world = World(run_file(), 1)
    assert say(world, world.workers[0], 0) == "unrecoverable"
    assert world.archive == {0: INITIAL}


def test_what_is_well_past_the_old_point_counts_anew() -> None:
    setback = Setback().after_return(10, has_suspects=False).after_return(9, has_suspects=True)
    assert setback == Setback(10, 2, 1)
    assert setback.passed(17) == setback
    assert setback.passed(18) == Setback()


def test_with_overlap_it_takes_another_round_to_show_that_a_state_is_good() -> None:
    world = World(run_file(overlap=True), 3)
    committed(world, 2, 3)
    faulty, others = world.workers[0], world.workers[1:3]
    say(world, faulty)
    at = world.scope.anchor_version
    for more in (1, 2):
        deadline_s = world.now_s + 60
        while world.scope.anchor_version < at + more:
            assert world.now_s < deadline_s
            for worker in others:
                world.behave(worker)
            world.beat(faulty)
            world.tick(0.25)
        world.beat(faulty)
        assert world.view(faulty).divergence == ("at fault" if more == 2 else "")


def test_a_loss_that_rises_far_is_said_once_a_round() -> None:
    world = World(run_file(), 3)
    committed(world, 4, 3)
    assert world.scope.status(world.now_s).warning == ""
    world.loss = 31_138.0
    committed(world, 2, 3)
    rose = [event for event in world.events if isinstance(event, ev.LossRose)]
    assert [(one.loss, one.usual) for one in rose] == [(31_138.0, 2.5)], "while it rises"
    world.loss = 40_000.0
    committed(world, 1, 3)
    assert "the loss has risen to 4e+04" in world.scope.status(world.now_s).warning
