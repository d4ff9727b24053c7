"""The same faults in a run with ``overlap``: they strike while everybody trains on for the next round."""

import pytest
from tests.chaos.attack import ATTACKED, COMEBACKS, MOMENTS, PARTITIONS, Attack
from tests.chaos.overlapping import OverlapLife
from tests.chaos.scene import play, staged
from tests.chaos.test_more_faults import pairs
from tests.chaos.test_one_fault import POSSIBLE
from tests.fakes.processes import run_processes

from shoal.swarm.coordinator import events as ev


@pytest.mark.parametrize(
    "attack",
    [  # every third is enough beside those of runs without overlap; the rest is for `make chaos`
        pytest.param(attack, id=str(attack), marks=pytest.mark.matrix if number % 3 else ())
        for number, attack in enumerate(POSSIBLE["group"])
    ],
)
def test_one_fault(attack: Attack) -> None:
    assert play([attack], "group", make=OverlapLife) == [attack]


@pytest.mark.parametrize("both", pairs("group")[:20], ids=lambda both: f"{both[0]} and {both[1]}")
def test_two_faults(both: tuple[Attack, Attack]) -> None:
    assert play(both, "group", make=OverlapLife)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", COMEBACKS)
@pytest.mark.parametrize("role", ["contributor", "owner"])
def test_a_killed_peer_that_comes_back_within_the_round(role: str, fault: str, moment: str) -> None:
    attack = Attack(role, fault, moment)
    assert play([attack], "group", make=OverlapLife) == [attack]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", PARTITIONS)
def test_a_partition_that_heals(fault: str, moment: str) -> None:
    attack = Attack("network", fault, moment)
    assert play([attack], "group", make=OverlapLife) == [attack]


def test_everybody_works_on_under_the_exchange_of_the_attacked_round() -> None:
    """Or the cases above would test no overlap."""

    async def main() -> None:
        async with staged([Attack("contributor", "SIGSTOP", "while contributing")], "group", OverlapLife) as scene:
            await scene.settle()
            events = scene.run.coordinator.events
            (ended,) = [
                index
                for index, one in enumerate(events)
                if isinstance(one, ev.VerdictGiven) and one.verdict.round == ATTACKED
            ]
            ahead = {
                one.peer for one in events[:ended] if isinstance(one, ev.LeaseGranted) and one.round == ATTACKED + 1
            }
            assert len(ahead) == 4
            assert all(isinstance(life, OverlapLife) and life.steps_ahead for life in scene.lives)

    run_processes(main())
