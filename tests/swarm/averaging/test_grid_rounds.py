"""Whole rounds of members that a coordinator plans into a grid."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from tests.fakes.means import MEAN_ATOL, weighted
from tests.fakes.memory_network import at, stalled
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor

from shoal.swarm.averaging.outcome import Committed

ELEMENTS = 13 * 4096 + 17
MEMBERS = 6


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


def play_all(run: Swarm, seed: int, samples: list[int]) -> list[Coroutine[Any, Any, Any]]:
    return [run[index].play(contribution(seed + index), count) for index, count in enumerate(samples)]


def in_step(*members: SimMember) -> bool:
    return all(one.digest == members[0].digest and one.version == members[0].version for one in members)


@pytest.mark.parametrize("codec", ["float32", "int8", "topk", "auto"])
def test_nothing_is_lost_over_rounds_in_changing_rows(codec: str) -> None:
    """Means times total weight, and residuals times the weight they stem from, add up to what was brought."""

    async def main() -> None:
        rounds = [[10, 20, 30, 5, 15, 10], [1, 25, 24, 20, 10, 10], [40, 19, 1, 10, 10, 10], [15] * 6]
        async with swarm(MEMBERS, run_toml(90, codec, group_size=3), ELEMENTS) as run:
            brought, applied, rows = *torch.zeros(2, ELEMENTS, dtype=torch.float64), set()
            for number, weights in enumerate(rounds):
                outcomes = await together(*play_all(run, 10 * number, weights))
                assert isinstance(outcomes[0], Committed)
                assert all(isinstance(one, Committed) and one.included for one in outcomes)
                assert in_step(*run.members)
                plan = outcomes[0].verdict.plan
                assert plan is not None
                assert plan.columns
                rows.add(tuple(member.row for member in plan.members))
                mean = weighted([contribution(10 * number + index) for index in range(MEMBERS)], weights)
                if number == 0 and codec in MEAN_ATOL:
                    atol = 1.5 * MEAN_ATOL[codec]
                    torch.testing.assert_close(outcomes[0].mean.whole().double(), mean, atol=atol, rtol=0)
                applied += sum(weights) * outcomes[0].mean.whole().double()
                brought += sum(weights) * mean
            for index, weight in enumerate(rounds[-1]):
                applied += weight * run[index].averager.round_feedback.error_feedback.residual.double()
            torch.testing.assert_close(applied, brought, atol=5e-3, rtol=0)
            assert len(rows) == len(rounds)

    run_virtual(main())


def dying(run: Swarm, member: SimMember, task: list[asyncio.Task[Any]]) -> None:
    member.die()
    task[0].cancel()


def test_a_whole_batch_in_a_grid_survives_a_row_reducer() -> None:
    """It dies after it has sent its partials, so that all of its batch is in the mean."""

    async def main() -> None:
        toml = run_toml(60, algorithm="virtual_batch", group_size=3, seed=1)
        async with swarm(MEMBERS, toml, ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            victim, alive = run[1], [run[index] for index in (0, 2, 3, 4, 5)]
            doomed = [tasks.create_task(victim.play(contribution(1), 10))]
            run.network.faults.append(at("result", victim.peer, 0, lambda: dying(run, victim, doomed)))
            outcomes = await together(*[one.play(contribution(run.index(one)), 10) for one in alive])
            assert not run.network.endpoints[victim.peer].alive
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert isinstance(outcomes[0], Committed)
            assert outcomes[0].verdict.tokens == 60
            mean = weighted([contribution(index) for index in range(MEMBERS)], [1] * MEMBERS)
            torch.testing.assert_close(outcomes[0].mean.whole().double(), mean, atol=1e-6, rtol=0)
            assert in_step(*alive)

    run_virtual(main())


def test_a_row_reducer_that_does_not_deliver_is_row_reducer_no_more() -> None:
    async def main() -> None:
        async with swarm(MEMBERS, run_toml(60, group_size=3, seed=1), ELEMENTS) as run:
            silent = run[1]
            faults = [stalled(kind, silent.peer, 0) for kind in ("partial", "result")]
            run.network.faults += faults
            outcomes = await together(*play_all(run, 0, [10] * MEMBERS))
            assert all(isinstance(one, Committed) for one in outcomes)
            assert not run.coordinator.machine.scope.membership.members[silent.peer].can_own
            run.network.faults.clear()
            outcomes = await together(*play_all(run, 10, [10] * MEMBERS))
            assert isinstance(outcomes[0], Committed)
            plan = outcomes[0].verdict.plan
            assert plan is not None
            assert plan.columns
            row_reducers = {plan.members[row_reducer].peer for column in plan.columns for row_reducer in column}
            assert silent.peer not in row_reducers
            assert in_step(*run.members)

    run_virtual(main())
