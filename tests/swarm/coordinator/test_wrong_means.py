"""A mean that evidence proves wrong beyond the bound makes the run go back, once, and not far."""

import pytest
from tests.swarm.coordinator.test_rollback import digest_of, play, returned
from tests.swarm.coordinator.world import World, peer_name, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS
from shoal.swarm.coordinator.wrong_means import FRESH_ROUNDS
from shoal.swarm.protocol.types import KeptState

EVIDENCE, MORE = b"e" * 32, b"f" * 32
MAKER, ACCUSER = peer_name(2), peer_name(0)


def played(rounds: int) -> World:
    """A run whose three members keep every state."""
    world = World(run_file(), 3)
    play(world, rounds)
    return world


def go_on(world: World, rounds: int = 3) -> list[ev.WentBack]:
    """So many rounds end; returns those with which the run went back."""
    before = len(world.verdicts)
    while len(world.verdicts) < before + rounds:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
    return returned(world)


def disprove(world: World, round_number: int, excess: float = 8.0, evidence: bytes = EVIDENCE) -> None:
    world.scope.disprove(round_number, MAKER, evidence, ACCUSER, excess)
    world.settle()


def test_the_run_goes_back_to_the_state_before_it() -> None:
    world = played(4)
    disprove(world, 2)
    (back,) = go_on(world)
    assert (back.digest, back.vouched_round) == (digest_of(2), 2)
    assert (back.evidence, back.diverged) == (EVIDENCE, False)
    verdict = next(one.verdict for one in world.verdicts if one.went_back is not None)
    assert (verdict.committed, verdict.anchor_version) == (False, 2)
    assert verdict.reason.startswith("a mean that name 2 made in round 2 is wrong, by 8 times what its own work could")
    assert EVIDENCE.hex()[:16] in verdict.reason
    assert world.scope.rounds_undone == back.from_version - 2
    assert len(go_on(world, 5)) == 1, "once"


@pytest.mark.parametrize("excess", [0.2, 1.0])
def test_one_within_the_bound_stays(excess: float) -> None:
    world = played(4)
    disprove(world, 2, excess)
    assert go_on(world) == []


def test_a_round_that_is_undone_is_not_undone_again() -> None:
    world = played(4)
    disprove(world, 2)
    go_on(world)
    disprove(world, 3, evidence=MORE)
    disprove(world, 2, evidence=MORE)
    assert len(go_on(world)) == 1


def test_who_shows_it_late_undoes_nothing() -> None:
    """A liar's friend that keeps the evidence back for a hundred rounds would have a hundred undone."""
    world = played(FRESH_ROUNDS + 2)
    disprove(world, 1)
    assert go_on(world) == []
    disprove(world, FRESH_ROUNDS + 2)
    assert [one.vouched_round for one in go_on(world)] == [FRESH_ROUNDS + 2]


def test_the_oldest_of_two_decides() -> None:
    world = played(5)
    disprove(world, 3)
    disprove(world, 1, evidence=MORE)
    disprove(world, 2)
    (back,) = go_on(world)
    assert (back.evidence, back.digest) == (MORE, digest_of(1))


def test_between_rounds_also_after_a_restart() -> None:
    world = played(3)
    disprove(world, 2)
    world.restart()
    assert world.scope.disproved is not None
    (back,) = go_on(world)
    assert back.digest == digest_of(2)
    assert world.scope.disproved is None


def test_without_a_state_to_go_back_to_it_stays() -> None:
    """Nor is it undone later, when somebody comes with an old state."""
    world = played(3)
    world.saved = lambda: ()  # type: ignore[method-assign]
    disprove(world, 2)
    assert go_on(world) == []
    assert world.scope.disproved is not None
    go_on(world, 2 * FRESH_ROUNDS)
    assert world.scope.disproved is None
    del world.saved  # type: ignore[method-assign]
    assert go_on(world) == []


@pytest.mark.parametrize(("most", "goes"), [(2, []), (3, [1])])
def test_it_goes_to_no_state_that_is_far_older(monkeypatch: pytest.MonkeyPatch, most: int, goes: list[int]) -> None:
    monkeypatch.setattr("shoal.swarm.coordinator.wrong_means.MOST_UNDONE", most)
    world = played(6)
    world.saved = lambda: (KeptState(anchor_version=1, digest=digest_of(1)),)  # type: ignore[method-assign]
    disprove(world, 4)
    assert [one.vouched_round for one in go_on(world)] == goes


def test_a_newcomer_does_not_say_what_is_kept() -> None:
    """It would be waited for in vain, and the run would go further back."""
    world = played(CREDIT_ROUNDS + 1)
    world.saved = lambda: ()  # type: ignore[method-assign]
    world.join(world.workers[3])
    world.workers[3].kept = (KeptState(anchor_version=2, digest=digest_of(2)),)
    world.beat(world.workers[3])
    disprove(world, CREDIT_ROUNDS)
    assert go_on(world) == []
