"""Nobody holds the newest state any more: who is waited for, and which state the run goes back to."""

import pytest
from tests.swarm.coordinator.world import INITIAL, Worker, World, next_state, peer_name, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.rollback import CommittedRound, History
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS
from shoal.swarm.errors import StorageError
from shoal.swarm.protocol.types import KeptState
from shoal.swarm.sample_ranges import count, merge

RETURN_S = 12.0
"""``return_s`` of the world's patience."""

SILENT_S = 4.0
"""Until whoever was killed counts as gone, and no longer as a holder."""


def play(world: World, rounds: int, members: int = 3) -> None:
    """So many committed rounds, and everybody has made the newest state."""
    while len(world.history) < rounds or world.scope.round.phase != "training" or len(world.scope.synced()) < members:
        for worker in world.workers[:members]:
            world.behave(worker)
        world.tick(0.25)
        assert world.now_s < 2000.0


def digest_of(version: int) -> bytes:
    digest = INITIAL
    for _ in range(version):
        digest = next_state(digest)
    return digest


def returned(world: World) -> list[ev.WentBack]:
    return [one.went_back for one in world.verdicts if one.went_back is not None]


def come_back(world: World, *numbers: int) -> None:
    for number in numbers:
        world.join(world.workers[number])
        world.sync(world.workers[number])


def wait(world: World, seconds: float, *present: int) -> None:
    """Time passes; those members say that they are there."""
    for _ in range(round(seconds / 0.5)):
        for number in present:
            world.beat(world.workers[number])
        world.tick(0.5)


@pytest.mark.parametrize("with_coordinator", [True, False])
def test_all_have_come_back_and_nobody_has_the_newest(with_coordinator: bool) -> None:
    world = World(run_file(), 3)
    play(world, 3)
    world.lose_all(lambda version: version < 3)
    if with_coordinator:
        world.restart()
    come_back(world, 0, 1)
    wait(world, 1.0, 0, 1)
    assert returned(world) == [], "the third may have it"
    come_back(world, 2)
    world.tick(0.1)
    (back,) = returned(world)
    assert (back.from_version, back.digest, back.vouched_round) == (3, digest_of(2), 2)
    assert back.keepers == (peer_name(0), peer_name(1), peer_name(2))
    verdict = world.verdicts[-1].verdict
    assert (verdict.committed, verdict.anchor_version) == (False, 2)
    assert verdict.reason.startswith("nobody holds anchor version 3 any more: back to version 2 (")
    assert "3 of 3 peers" in verdict.reason
    assert "round 2 vouches" in verdict.reason
    world.restart()
    play(world, 4)
    assert len(world.verdicts) == 6
    assert [one.verdict.anchor_version for one in world.verdicts] == [1, 2, 3, 2, 3, 4]


def test_the_samples_of_undone_rounds_are_free_again_and_the_credit_stays() -> None:
    world = World(run_file(), 2)
    play(world, 3, members=2)
    machine = world.machine
    samples = [merge(one.ranges) for one in machine.scope.history.rounds]
    tokens, credit = [one.tokens for one in machine.scope.history.rounds], machine.scope.tokens_committed
    world.lose_all(lambda version: version < 2)
    come_back(world, 0, 1)
    world.tick(0.1)
    assert machine.scope.anchor_version == machine.scope.rounds_committed == 1
    assert machine.scope.leases.held == {}
    free = merge([*samples[1], *samples[2]])
    assert merge(machine.scope.leases.pool)[0][0] == free[0][0]
    assert count(machine.scope.leases.pool) >= count(free)
    assert machine.scope.tokens_committed == tokens[0]
    assert (machine.scope.rounds_undone, machine.scope.tokens_undone) == (2, tokens[1] + tokens[2])
    assert sum(one.tokens_committed for one in machine.scope.membership.members.values()) == credit
    status = machine.scope.status(world.now_s)
    assert (status.rounds_committed, status.rounds_aborted, status.rounds_undone) == (1, 1, 2)
    play(world, 4, members=2)


def test_who_may_have_it_is_waited_for_as_long_as_a_machine_takes_to_start() -> None:
    world = World(run_file(), 3)
    play(world, 2)
    world.lose_all(lambda version: version < 2)
    world.pass_time(SILENT_S)
    come_back(world, 0, 1)
    wait(world, RETURN_S - 1.0, 0, 1)
    assert returned(world) == []
    outlook = world.scope.status(world.now_s).outlook
    assert outlook == (
        "nobody here holds version 2: the run goes back to version 1 in 2 s, "
        "unless one of these brings a newer one: name 2"
    )
    wait(world, 1.5, 0, 1)
    assert len(returned(world)) == 1
    outlook = world.scope.status(world.now_s).outlook
    assert outlook == "nobody here holds version 1 yet: name 0, name 1 should be loading it"
    come_back(world, 0)
    assert world.scope.status(world.now_s).outlook == ""


def test_what_took_long_is_waited_for_longer() -> None:
    """As long as it took, and no round counts for more than its limit: the night in between was not work."""
    world = World(run_file(max_s=8.0), 3)
    play(world, 1)
    world.lose_all(lambda version: True)
    world.pass_time(100.0)
    come_back(world, 0, 1, 2)
    play(world, 5)
    cost_s = world.scope.history.cost_s(0)
    assert RETURN_S + 2.0 < cost_s < 5 * 8.0
    world.lose_all(lambda version: False)
    world.pass_time(SILENT_S)
    come_back(world, 0, 1)
    wait(world, cost_s - 1.0, 0, 1)
    assert returned(world) == []
    wait(world, 2.0, 0, 1)
    assert world.scope.anchor_version == 0
    play(world, 1, members=2)


def test_whoever_brings_the_newest_is_gone_on_from() -> None:
    world = World(run_file(), 3)
    play(world, 2)
    world.lose_all(lambda version: version < 2)
    world.pass_time(SILENT_S)
    come_back(world, 0, 1)
    wait(world, RETURN_S - 1.0, 0, 1)
    world.archive[2] = digest_of(2)
    come_back(world, 2)
    wait(world, RETURN_S, 0, 1, 2)
    assert returned(world) == []
    assert world.scope.synced().keys() == {peer_name(2)}
    come_back(world, 0, 1)
    play(world, 3)
    assert returned(world) == []


def test_the_wait_begins_when_somebody_could_go_back() -> None:
    world = World(run_file(), 3)
    play(world, 2)
    world.lose_all(lambda version: version < 2)
    world.pass_time(1000.0)
    come_back(world, 0)
    wait(world, RETURN_S - 1.0, 0)
    assert returned(world) == []
    world.leave(world.workers[0])
    world.tick(0.25)
    come_back(world, 1)
    wait(world, RETURN_S - 1.0, 1)
    assert returned(world) == [], "it was nobody's wait any more"
    wait(world, 1.5, 1)
    assert len(returned(world)) == 1


def test_a_coordinator_that_restarts_waits_anew() -> None:
    world = World(run_file(), 3)
    play(world, 2)
    world.lose_all(lambda version: version < 2)
    come_back(world, 0, 1)
    wait(world, RETURN_S - 1.0, 0, 1)
    world.restart()
    wait(world, RETURN_S - 1.0, 0, 1)
    assert returned(world) == []
    wait(world, 1.5, 0, 1)
    assert len(returned(world)) == 1


def test_the_time_in_which_the_coordinator_stood_still_does_not_count() -> None:
    world = World(run_file(), 3)
    play(world, 2)
    world.lose_all(lambda version: version < 2)
    come_back(world, 0, 1)
    wait(world, 2.0, 0, 1)
    world.tick(100.0)
    wait(world, RETURN_S - 4.0, 0, 1)
    assert returned(world) == []


def test_the_coordinator_alone_was_away() -> None:
    """Members hold the newest state and have not said so yet; one that joins just then tells of its disk first."""
    world = World(run_file(), 3)
    play(world, 2)
    world.restart()
    newcomer = world.workers[3]
    world.join(newcomer)
    newcomer.kept = (KeptState(anchor_version=0, digest=INITIAL),)
    world.beat(newcomer)
    world.tick(1.0)
    assert returned(world) == []
    world.beat(world.workers[0])
    wait(world, 2 * RETURN_S, 0, 3)
    assert returned(world) == []


def finishing(world: World) -> Worker:
    """One of two members has not made the newest state yet; the other one, who has, dies."""
    play(world, 1, members=2)
    while len(world.history) == 1:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    slow = world.workers[0]
    world.beat(slow)
    world.workers[1].running = False
    return slow


def test_who_is_making_the_newest_is_waited_for() -> None:
    world = World(run_file(), 2)
    slow = finishing(world)
    world.join(world.workers[1])
    world.workers[1].kept = (KeptState(anchor_version=1, digest=digest_of(1)),)
    for turn in range(8):
        for _ in range(round(RETURN_S) - 2):
            world.beat(slow, chunks_moved=turn + 1)
            world.beat(world.workers[1])
            world.tick(1.0)
    assert returned(world) == []
    assert "name 0" in world.scope.status(world.now_s).outlook
    world.conclude(slow)
    world.beat(slow)
    world.tick(0.1)
    assert returned(world) == []
    assert world.scope.synced().keys() == {slow.peer}


def test_who_only_says_to_be_making_it_is_not_waited_for_for_ever() -> None:
    world = World(run_file(), 2)
    finishing(world)
    come_back(world, 1)
    wait(world, RETURN_S + 1.0, 0, 1)
    assert world.scope.anchor_version == 2, "it had it on its disk"
    world.archive.pop(2)
    come_back(world, 1)
    wait(world, RETURN_S + 1.0, 0, 1)
    (back,) = returned(world)
    assert back.keepers == (peer_name(0), peer_name(1)), "what one holds it can go back to, too"
    assert world.scope.leases.held == {}


def test_who_fell_silent_while_it_makes_the_newest_is_waited_for_when_it_is_back() -> None:
    world = World(run_file(), 1)
    play(world, 1, members=1)
    slow = world.workers[0]
    while len(world.history) == 1:
        world.behave(slow)
        world.tick(0.25)
    wait(world, SILENT_S)
    assert not world.admitted(slow)
    before = slow.version, slow.digest
    world.join(slow, new_process=False)
    slow.version, slow.digest = before
    world.beat(slow)
    world.tick(0.1)
    assert returned(world) == []
    world.conclude(slow)
    world.beat(slow)
    wait(world, 1.0, 0)
    assert returned(world) == []
    assert world.scope.synced().keys() == {slow.peer}


def test_who_fell_silent_before_the_newest_was_made_has_not_seen_it() -> None:
    world = World(run_file(), 3)
    play(world, 2)
    absent = world.workers[2]
    wait(world, SILENT_S, 0, 1)
    play(world, 3, members=2)
    world.join(absent, new_process=False)
    assert world.scope.membership.members[absent.peer].joined_version == 3


def test_only_what_a_committed_round_was_planned_on_is_gone_back_to() -> None:
    world = World(run_file(), 2)
    play(world, 3, members=2)
    world.lose_all(lambda version: False)
    other = (KeptState(anchor_version=2, digest=b"o" * 32), KeptState(anchor_version=7, digest=b"o" * 32))
    for worker in world.workers[:2]:
        world.join(worker)
        worker.kept = other
    wait(world, 100.0, 0, 1)
    assert returned(world) == []
    outlook = world.scope.status(world.now_s).outlook
    assert outlook.startswith("nobody here holds version 3, nor has told of an earlier one that the verdicts vouch for")
    world.workers[1].kept = (*other, KeptState(anchor_version=1, digest=digest_of(1)))
    world.beat(world.workers[1])
    world.tick(0.1)
    assert world.scope.anchor_version == 1


def test_who_has_seen_newer_states_long_ago_is_waited_for_too() -> None:
    """Of three members one leaves at version 2; the others lose all but version 1."""
    world = World(run_file(), 3)
    play(world, 2)
    world.leave(world.workers[2])
    play(world, 4, members=2)
    world.lose_all(lambda version: version == 1)
    come_back(world, 0, 1)
    wait(world, 3.0, 0, 1)
    assert returned(world) == []
    world.join(world.workers[2])
    world.workers[2].kept = (KeptState(anchor_version=2, digest=digest_of(2)),)
    world.beat(world.workers[2])
    world.tick(0.1)
    assert [one.digest for one in returned(world)] == [digest_of(2)]


def test_who_has_seen_nothing_newer_is_not_waited_for() -> None:
    world = World(run_file(), 3)
    play(world, 1)
    world.leave(world.workers[2])
    play(world, 3, members=2)
    world.lose_all(lambda version: version < 3)
    come_back(world, 0, 1)
    world.tick(0.1)
    assert len(returned(world)) == 1


def test_an_undone_state_comes_too_late() -> None:
    """Also under the same number: those who made the version say which state it is."""
    world = World(run_file(), 3)
    play(world, 2)
    world.lose_all(lambda version: version < 2)
    world.pass_time(SILENT_S)
    come_back(world, 0, 1)
    wait(world, RETURN_S + 1.0, 0, 1)
    assert world.scope.anchor_version == 1
    late = world.workers[2]
    world.join(late)
    world.beat(late, anchor_version=2, state_digest=b"u" * 32)
    assert world.view(late).must_resync
    assert world.ask(late, 4) == []
    while len(world.history) == 1:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.beat(late, anchor_version=2, state_digest=b"u" * 32)
        world.tick(0.25)
    world.join(late)
    world.beat(late, anchor_version=2, state_digest=b"u" * 32)
    world.join(world.workers[3])
    world.beat(world.workers[3], anchor_version=2, state_digest=b"u" * 32)
    assert world.scope.agreed_digest is None
    for worker in world.workers[:2]:
        world.conclude(worker)
        world.beat(worker)
    assert world.scope.agreed_digest == world.workers[0].digest != b"u" * 32, "who made it decides"


def test_undone_rounds_do_not_count_for_the_end() -> None:
    world = World(run_file(run_rounds=3), 2)
    play(world, 2, members=2)
    world.lose_all(lambda version: version < 2)
    come_back(world, 0, 1)
    while world.scope.round.phase != "ended":
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    assert world.scope.anchor_version == 3
    assert len(returned(world)) == 1


def test_a_return_that_was_not_journaled_was_none() -> None:
    world = World(run_file(), 2)
    play(world, 2, members=2)
    world.lose_all(lambda version: version < 2)
    come_back(world, 0, 1)
    world.crash_unwritten(0.1)
    assert world.scope.anchor_version == 2
    wait(world, 1.0, 0, 1)
    assert world.scope.anchor_version == 1


def test_a_history_is_packed_and_unpacked() -> None:
    made = History([CommittedRound(number, bytes(32), 9, 1.5, ((0, 4), (6, 2**40))) for number in (0, 2)])
    assert History.unpack(made.pack()) == made
    for other in (b"", b"\x05", made.pack()[:-1], b"\x91\x91\x01"):
        with pytest.raises(StorageError, match="cannot read"):
            History.unpack(other)


def test_history_undoes_what_came_after() -> None:
    rounds = [CommittedRound(3 * at, bytes([at]) * 32, 10, 2.0, ((at, at + 1),)) for at in range(4)]
    history = History(list(rounds))
    assert history.before(6) == (2, 20)
    assert history.cost_s(1) == 6.0
    assert history.newest_kept({(4, bytes([4]) * 32), (2, bytes([1]) * 32), (1, bytes([1]) * 32)}) == 1
    assert history.newest_kept(set()) is None
    assert history.undo(2) == (2, 20, [(2, 3), (3, 4)])
    assert history.rounds == rounds[:2]


def test_progress_of_a_member_puts_off_the_way_back_four_times_as_long_and_no_longer() -> None:
    world = World(run_file(), 2)
    play(world, CREDIT_ROUNDS + 1, members=2)
    version = world.scope.anchor_version
    for worker in world.workers[:2]:
        world.join(worker)
        told = world.scope.history.rounds[version - 2].digest
        worker.kept = (KeptState(anchor_version=version - 2, digest=told),)
    hopeful = world.workers[2]
    world.join(hopeful)
    hopeful.version, hopeful.digest = version, world.scope.agreed_digest
    began_s = world.now_s
    for received in range(round(20 * RETURN_S)):
        for worker in world.workers[:3]:
            world.beat(worker, bytes_received=received)
        world.tick(0.5)
        if returned(world):
            break
    assert returned(world)
    assert 3 * RETURN_S <= world.now_s - began_s <= 4 * RETURN_S + 5.0


def test_one_newcomer_that_says_to_hold_the_newest_does_not_block_the_way_back() -> None:
    world = World(run_file(), 2)
    play(world, CREDIT_ROUNDS + 1, members=2)
    liar = world.workers[2]
    world.join(liar)
    world.sync(liar)
    version, digest = world.scope.anchor_version, liar.digest
    for worker in world.workers[:2]:
        world.join(worker)
        told = world.scope.history.rounds[version - 2].digest
        worker.kept = (KeptState(anchor_version=version - 2, digest=told),)
    claimed = world.scope.history.rounds[version - 1].digest
    liar.kept = (KeptState(anchor_version=version - 1, digest=claimed),)
    liar.version, liar.digest = version, digest
    for received in range(3 * round(RETURN_S)):  # who has credit and fetches something is waited for
        for worker in world.workers[:3]:
            world.beat(worker, bytes_received=received)
        world.tick(0.5)
    assert returned(world) == []
    until_s = world.now_s + 4 * RETURN_S + 60.0
    while not returned(world) and world.now_s < until_s:
        for worker in world.workers[:3]:
            if world.admitted(worker):
                received += worker is liar
                world.beat(worker, bytes_received=received if worker is liar else 0)
        world.tick(0.5)
    (back,) = returned(world)
    assert world.scope.anchor_version == version - 2, "nor is it believed what it says to keep"
    assert back.keepers == (peer_name(0), peer_name(1))


def test_a_member_with_credit_that_comes_without_a_state_does_not_undo_what_newcomers_hold() -> None:
    """It fetches their state, however long that takes."""
    world = World(run_file(), 2)
    play(world, CREDIT_ROUNDS + 1, 2)
    come_back(world, 2)
    play(world, CREDIT_ROUNDS + 2)
    newcomer, former = world.workers[2], world.workers[0]
    assert list(world.scope.membership.with_credit()) == [one.peer for one in world.workers[:2]]
    world.leave(world.workers[1])
    world.leave(former)
    version = world.scope.anchor_version
    newcomer.kept = (KeptState(anchor_version=version - 1, digest=world.history[version - 1][0]),)
    world.join(former)  # on a new disk
    wait(world, 10 * RETURN_S, 0, 2)
    assert returned(world) == []
    world.sync(former)
    play(world, CREDIT_ROUNDS + 4, 3)
