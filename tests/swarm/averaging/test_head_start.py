"""What of a round begins before its plan is there, and what becomes of it when another plan comes."""

import asyncio
from typing import Any

import pytest
import torch
from tests.fakes.means import weighted
from tests.fakes.memory_network import Step
from tests.fakes.swarm import PATIENCE_S, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor

from shoal.swarm.averaging.ahead import Chunks, StreamAhead
from shoal.swarm.averaging.outcomes import Committed
from shoal.swarm.errors import LinkError

SMALL, LARGE = 3 * 4096 + 17, 1_500_000
"""In chunks of the same size for two and three members; and in other ones."""


def contribution(elements: int, seed: int) -> Tensor:
    return torch.randint(-64, 65, (elements,), generator=torch.Generator().manual_seed(seed)).float()


def before_the_plan(run: Swarm) -> list[Step]:
    """From now on, what contributors send while there is none."""
    seen: list[Step] = []

    async def look(step: Step, payload: bytes) -> bytes:
        if step.blob.kind == "contribution" and run.coordinator.machine.round.plan is None:
            seen.append(step)
        return payload

    run.network.faults.append(look)
    return seen


def test_contributions_are_on_their_way_before_the_plan() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            for number in range(3):
                seen = before_the_plan(run)
                brought = [contribution(SMALL, 10 * number + index) for index in range(3)]
                outcomes = await together(*[run[index].play(brought[index], 10) for index in range(3)])
                assert all(isinstance(one, Committed) and one.included for one in outcomes)
                assert {(step.holder, step.to) for step in seen} == {
                    (one.peer, other.peer) for one in run.members for other in run.members if one is not other
                }
                assert isinstance(outcomes[0], Committed)
                torch.testing.assert_close(outcomes[0].mean.double(), weighted(brought, [1, 1, 1]), atol=1e-5, rtol=0)
            sent = [step for step in run.network.log if step.blob.kind == "contribution"]
            assert len(sent) == 3 * 2 * 4, "nothing twice"

    run_virtual(main())


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_another_plan_than_expected(elements: int) -> None:
    """One of three is not ready in time. What the others began is begun anew, and nothing of it counts twice."""

    async def main() -> None:
        async with swarm(3, run_toml(30), elements) as run:
            late, seen = run[2], before_the_plan(run)

            async def sleepy() -> Any:
                await late.work(10)
                await asyncio.sleep(2 * PATIENCE_S)
                return await late.average(contribution(elements, 2))

            plays = [run[index].play(contribution(elements, index), 10) for index in range(2)]
            outcomes = await together(*plays, sleepy())
            assert {step.to for step in seen} == {run[0].peer, run[1].peer}
            assert isinstance(outcomes[0], Committed)
            plan = outcomes[0].verdict.plan
            assert plan is not None
            assert len(plan.members) == 2
            assert (seen[0].blob.grid == plan.chunk_elements) is (elements == SMALL)
            expected = weighted([contribution(elements, 0), contribution(elements, 1)], [1, 1])
            torch.testing.assert_close(outcomes[0].mean.double(), expected, atol=1e-5, rtol=0)
            assert len({member.digest for member in run.members}) == 1
            assert not any(bool(member.averager.feedback.residual.any()) for member in run.members)

    run_virtual(main())


def test_what_was_given_ahead_counts_though_its_member_hears_of_the_verdict_only() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            deaf = run[2]
            await run.own_nothing(deaf)
            brought = [contribution(SMALL, index) for index in range(3)]
            plays = [asyncio.create_task(run[index].play(brought[index], 10)) for index in range(3)]
            take = deaf.client._take
            deaf.client._take = lambda view: None if view.plan is not None else take(view)  # type: ignore[method-assign]
            outcomes = await asyncio.gather(*plays)
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert isinstance(outcomes[0], Committed)
            torch.testing.assert_close(outcomes[0].mean.double(), weighted(brought, [1, 1, 1]), atol=1e-5, rtol=0)
            assert not bool(deaf.averager.feedback.residual.any()), "it is in the mean"

    run_virtual(main())


# Streams ------------------------------------------------------------------------------------------------------


async def slow(first_s: float) -> Chunks:
    await asyncio.sleep(first_s)
    for chunk in range(3):
        yield chunk, memoryview(bytes([chunk]))


async def broken() -> Chunks:
    if asyncio.get_running_loop().time() >= 0.0:
        raise LinkError("nothing here")
    yield 0, memoryview(b"")


def test_a_stream_ahead_gives_all_and_takes_no_more_than_one_chunk_before() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            stream = StreamAhead(slow(0.5), tasks)
            assert stream.is_good
            await asyncio.sleep(5.0)
            assert stream.is_good, "its first chunk is here"
            assert [chunk async for chunk, _ in stream.chunks()] == [0, 1, 2]

    run_virtual(main())


def test_a_stream_ahead_that_brings_nothing_is_asked_for_anew() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            silent, lost = StreamAhead(slow(100.0), tasks), StreamAhead(broken(), tasks)
            await asyncio.sleep(0.5)
            assert silent.is_good
            assert not lost.is_good
            await asyncio.sleep(1.0)
            assert not silent.is_good
            await silent.close()
            await lost.close()
            assert asyncio.get_running_loop().time() < 50.0, "closing waits for nothing"

    run_virtual(main())
