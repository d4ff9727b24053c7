"""What of a round begins before its plan is there, and what becomes of it when another plan comes."""

import asyncio
from typing import Any

import pytest
import torch
from tests.fakes.means import weighted
from tests.fakes.memory_network import Step, stalled
from tests.fakes.swarm import PATIENCE_S, SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual, until
from torch import Tensor

from shoal.swarm.averaging.chunk_streams import Chunks, PrefetchedStream, StreamMeter
from shoal.swarm.averaging.outcome import Committed, RoundOutcome
from shoal.swarm.errors import BlobUnavailable, LinkError
from shoal.swarm.protocol.messages import CoordinatorToPeerLease, PeerToCoordinatorRequestLease
from shoal.swarm.sample_ranges import count

SMALL, LARGE = 3 * 4096 + 17, 1_500_000
"""In chunks of the same size for two and three members; and in other ones."""


def contribution(elements: int, seed: int) -> Tensor:
    return torch.randint(-64, 65, (elements,), generator=torch.Generator().manual_seed(seed)).float()


def before_the_plan(run: Swarm) -> list[Step]:
    """From now on, what contributors send while there is none."""
    seen: list[Step] = []

    async def look(step: Step, payload: bytes) -> bytes:
        if step.blob.kind == "contribution" and run.coordinator.machine.scope.round.plan is None:
            seen.append(step)
        return payload

    run.network.faults.append(look)
    return seen


def test_streams_are_open_before_the_plan_and_carry_nothing() -> None:
    """Whoever has seen others' contributions while the list of roots is open could bring a copy of them."""

    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            for member in run.members:
                await member.work(10)
            await until(lambda: all(member.averager.prefetch_manager._prefetch for member in run.members), 0.001)
            seen, first = before_the_plan(run), run[0]
            ready = asyncio.create_task(first.average(contribution(SMALL, 0)))
            await until(lambda: first.peer in run.coordinator.machine.scope.round.ready, 0.001)
            assert [one for one in first.endpoint.blobs if one.kind == "contribution"]
            outcomes = await asyncio.gather(
                ready, *[run[index].average(contribution(SMALL, index)) for index in (1, 2)]
            )
            mean_of(outcomes, [contribution(SMALL, index) for index in range(3)])
            assert not seen
            sent = [step for step in run.network.log if step.blob.kind == "contribution"]
            assert len(sent) == 2 * 4, "nothing twice"

    run_virtual(main())


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_another_plan_than_expected(elements: int) -> None:
    """One of three is not ready in time. What the others began is begun anew, and nothing of it counts twice."""

    async def main() -> None:
        async with swarm(3, run_toml(30), elements) as run:
            late = run[2]

            async def sleepy() -> Any:
                await late.work(10)
                await asyncio.sleep(2 * PATIENCE_S)
                return await late.average(contribution(elements, 2))

            plays = [run[index].play(contribution(elements, index), 10) for index in range(2)]
            outcomes = await together(*plays, sleepy())
            assert isinstance(outcomes[0], Committed)
            plan = outcomes[0].verdict.plan
            assert plan is not None
            assert len(plan.members) == 2
            expected = weighted([contribution(elements, 0), contribution(elements, 1)], [1, 1])
            torch.testing.assert_close(outcomes[0].mean.whole().double(), expected, atol=1e-5, rtol=0)
            assert len({member.digest for member in run.members}) == 1
            *others, carried = [member.averager.round_feedback.error_feedback.residual for member in run.members]
            assert not any(bool(one.any()) for one in others)
            assert torch.equal(carried, contribution(elements, 2)), "it brings it to the next round"

    run_virtual(main())


# Between closing and plan ---------------------------------------------------------------------------------------


async def until_ready(run: Swarm, member: SimMember) -> None:
    """It waits for the plan, and there is none."""
    await until(lambda: member.peer in run.coordinator.machine.scope.round.ready, 0.001)
    assert run.coordinator.machine.scope.round.plan is None


def test_a_member_that_leaves_before_the_plan() -> None:
    """Nothing of it gets into the mean, though it was ready."""

    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            gone = run[0]
            for member in run.members:
                await member.work(10)
            left = asyncio.create_task(gone.average(contribution(SMALL, 9)))
            await until_ready(run, gone)
            left.cancel()
            gone.die()
            outcomes = await together(*[run[index].average(contribution(SMALL, index)) for index in (1, 2)])
            mean_of(outcomes, [contribution(SMALL, 1), contribution(SMALL, 2)])
            assert run.coordinator.machine.scope.round.number == 1

    run_virtual(main())


def test_nothing_of_a_contribution_that_went_with_its_process_gets_into_the_mean() -> None:
    """The same member is back before the plan, which is as if it had never been away, and brings another one."""

    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            first = run[0]
            for member in run.members:
                await member.work(10)
            await until(lambda: all(member.averager.prefetch_manager._prefetch for member in run.members), 0.001)
            lost, *others = [
                asyncio.create_task(one.averager.average(one.offer(contribution(SMALL, index or 9))))
                for index, one in enumerate([first, run[1], run[2]])
            ]
            await until_ready(run, first)
            lost.cancel()
            await asyncio.wait([lost])
            await first.client.rejoin()
            await first.beat()
            ask = PeerToCoordinatorRequestLease(round=0, samples=10, tokens_done=0)
            leased = await first.client.ask(ask, CoordinatorToPeerLease)
            first.done = [(one.start, one.stop) for one in leased.ranges]
            assert count(first.done) == 10
            assert run.coordinator.machine.scope.round.phase == "closing"
            outcomes = await asyncio.gather(first.average(contribution(SMALL, 0)), *others)
            mean_of(outcomes, [contribution(SMALL, index) for index in range(3)])

    run_virtual(main())


def test_a_coordinator_that_starts_anew_between_closing_and_plan() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            for member in run.members:
                await member.work(10)
            plays = [asyncio.create_task(run[0].average(contribution(SMALL, 0)))]
            await until_ready(run, run[0])
            run.coordinator.restart()
            plays += [asyncio.create_task(run[index].average(contribution(SMALL, index))) for index in (1, 2)]
            outcomes = await asyncio.gather(*plays)
            mean_of(outcomes, [contribution(SMALL, index) for index in range(3)])
            assert not run[0].view.as_expected
            assert not any(bool(member.averager.round_feedback.error_feedback.residual.any()) for member in run.members)

    run_virtual(main())


def test_one_that_falls_silent_before_the_plan_is_waited_for_no_longer() -> None:
    """Ready, and nothing comes of it: the others had streams with it, and go on without it after the usual time."""

    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            silent = run[0]
            await run.own_nothing(silent)
            run.network.faults.append(stalled("contribution", silent.peer, 1))
            plays = [asyncio.create_task(run[index].play(contribution(SMALL, index), 10)) for index in range(3)]
            await until(lambda: run.coordinator.machine.scope.round.plan is not None, 0.01)
            planned_s = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*plays)
            took_s = asyncio.get_running_loop().time() - planned_s
            assert PATIENCE_S / 2 < took_s < 2 * PATIENCE_S
            assert isinstance(outcomes[0], Committed)
            assert len(outcomes[0].verdict.plan.members) == 3

    run_virtual(main())


def test_what_nobody_takes_ends_with_the_closing() -> None:
    """Everybody is too late: nothing is offered any more, and who still asks hears that there is nothing."""

    async def main() -> None:
        async with swarm(3, run_toml(30), SMALL) as run:
            for member in run.members:
                await member.work(10)
            await until(lambda: all(member.averager.prefetch_manager._prefetch for member in run.members), 0.01)
            (source,) = [one for blob, one in run[0].endpoint.blobs.items() if blob.kind == "contribution"]
            waiting = asyncio.create_task(source.chunk(0))
            await asyncio.sleep(3 * PATIENCE_S)
            for member in run.members:
                assert member.averager.prefetch_manager._prefetch is None
                assert not [one for one in member.endpoint.blobs if one.kind == "contribution"]
            with pytest.raises(BlobUnavailable):
                await waiting

    run_virtual(main())


def test_a_grid_begins_nothing_ahead() -> None:
    async def main() -> None:
        async with swarm(4, run_toml(40, group_size=2), SMALL) as run:
            seen = before_the_plan(run)
            outcomes = await together(*[run[index].play(contribution(SMALL, index), 10) for index in range(4)])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert not seen

    run_virtual(main())


def mean_of(outcomes: list[RoundOutcome], brought: list[Tensor]) -> None:
    """Of just these, and all the same."""
    for one in outcomes:
        assert isinstance(one, Committed)
        torch.testing.assert_close(one.mean.whole().double(), weighted(brought, [1] * len(brought)), atol=1e-5, rtol=0)


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
            stream = PrefetchedStream(slow(0.5), StreamMeter(), tasks)
            await asyncio.sleep(5.0)
            assert [chunk async for chunk, _ in stream.chunks(1.0)] == [0, 1, 2]

    run_virtual(main())


def test_a_stream_ahead_that_brings_nothing_is_not_waited_for_any_longer() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            silent, lost, unused = (
                PrefetchedStream(slow(100.0), StreamMeter(), tasks),
                PrefetchedStream(broken(), StreamMeter(), tasks),
                PrefetchedStream(slow(9), StreamMeter(), tasks),
            )
            await asyncio.sleep(0.5)
            for stream in (silent, lost):
                with pytest.raises(LinkError):
                    await anext(stream.chunks(2.0))
            await unused.close()
            assert asyncio.get_running_loop().time() < 3.0, "closing waits for nothing"

    run_virtual(main())
