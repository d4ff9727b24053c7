"""Two faults in one round, peers that come back within it, and networks that fall apart and heal."""

import random

import pytest
from tests.chaos.attack import ATTACKED, COMEBACKS, MOMENTS, PARTITIONS, Attack
from tests.chaos.scene import play, staged
from tests.chaos.test_one_fault import POSSIBLE
from tests.fakes.processes import run_processes

from shoal.swarm.protocol.types import Blob

PAIRS = {"group": 60, "grid": 20}
"""By topology: a grid has had every single fault, too, and takes longer."""


def pairs(topology: str) -> list[tuple[Attack, Attack]]:
    """The same ones in every run of the tests; never two of one victim."""
    draw = random.Random(4)
    drawn: list[tuple[Attack, Attack]] = []
    while len(drawn) < PAIRS[topology]:
        one, other = draw.sample(POSSIBLE[topology], 2)
        is_one = {one.role, other.role} in ({one.role}, {"row reducer", "stand-in"})
        if not is_one and (one, other) not in drawn:
            drawn.append((one, other))
    return drawn


@pytest.mark.parametrize(
    ("topology", "both"),
    [
        pytest.param(topology, both, id=f"{topology}: {both[0]} and {both[1]}")
        for topology in PAIRS
        for both in pairs(topology)
    ],
)
def test_two_faults(topology: str, both: tuple[Attack, Attack]) -> None:
    assert play(both, topology)


def test_most_second_faults_happen() -> None:
    """Or the pairs would test little more than single faults do."""
    happened = [len(play(both, "group")) for both in pairs("group")[:10]]
    assert sum(happened) > 1.5 * len(happened)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", COMEBACKS)
@pytest.mark.parametrize(
    ("topology", "role"), [("group", "contributor"), ("group", "owner"), ("group", "stand-in"), ("grid", "row reducer")]
)
def test_a_killed_peer_that_comes_back_within_the_round(topology: str, role: str, fault: str, moment: str) -> None:
    attack = Attack(role, fault, moment)
    assert play([attack], topology) == [attack]


@pytest.mark.parametrize(
    ("topology", "moment"),
    [("group", moment) for moment in MOMENTS] + [("grid", "while contributing"), ("grid", "some have the result")],
)
@pytest.mark.parametrize("fault", PARTITIONS)
def test_a_partition_that_heals(fault: str, topology: str, moment: str) -> None:
    attack = Attack("network", fault, moment)
    assert play([attack], topology) == [attack]


@pytest.mark.parametrize("topology", ["group"])
@pytest.mark.parametrize("fault", ["SIGKILL"])
def test_a_verdict_that_was_not_journaled_was_none(fault: str, topology: str) -> None:
    attack = Attack("coordinator", fault, "before the verdict is journaled")
    assert play([attack], topology) == [attack]


@pytest.mark.parametrize("topology", ["group"])
@pytest.mark.parametrize(
    "other",
    ["", "SIGKILL", "SIGKILL, back at once", "SIGSTOP, long"],
)
def test_a_part_of_which_everybody_has_other_bytes_is_void(other: str, topology: str) -> None:
    """Nobody's work there is lost: it is carried on, or, of who is given up in the round, trained again."""
    void = Attack("owner", "many faces", "while reducing")
    second = [Attack("contributor", other, "some have the result")] if other else []
    assert play([void, *second], topology, void_parts=1) == [void, *second]


@pytest.mark.parametrize("moment", ["before contributing", "while reducing"])
@pytest.mark.parametrize(
    ("role", "topology"),
    [("contributor", "group"), ("owner", "group"), ("contributor", "grid"), ("row reducer", "grid"), ("owner", "grid")],
)
def test_values_that_nobody_claimed_go_into_no_mean(role: str, topology: str, moment: str) -> None:
    """Who sends them is left out, or has failed, and everybody else's work is averaged, with no part void."""
    attack = Attack(role, "huge values", moment)
    assert play([attack], topology, void_parts=0) == [attack]


def test_what_two_have_of_a_dead_owner_is_adopted_and_what_one_has_is_made_anew() -> None:
    """The dead owner's own work is in what two agree on, and in what its stand-in has from it; another one alone might
    have made it up."""

    async def main() -> None:
        async with staged([Attack("owner", "SIGKILL", "some have the result")], "group") as scene:
            await scene.settle()
            part, size = scene.planned.parts[0], scene.planned.chunk_elements
            owner, stand_in = scene.named("owner"), scene.named("stand-in")
            with_owner = scene.life(stand_in).ledger.rounds[ATTACKED].has(owner)
            for chunk, first in enumerate(range(0, part.stop, size)):
                sent = [one for one in scene.run.network.log if one.blob == Blob(kind="result", number=ATTACKED)]
                has = {one.to for one in sent if one.holder == owner and one.chunk == chunk}
                assert bool(with_owner[first]) == (len(has) > 1 or stand_in in has), chunk

    run_processes(main())
