"""Runs in several scopes of the same processes: one connection to the coordinator and one endpoint carry them all."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import torch
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor

from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.errors import NotAdmitted, Superseded, WireError
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetVerdicts,
)

MEMBERS, ROUNDS, SAMPLES = 3, 4, 2
ELEMENTS = {0: 4096, 1: 3 * 4096, 2: 7000}


def toml(algorithm: str = "diloco") -> str:
    return run_toml(MEMBERS * SAMPLES, algorithm=algorithm)


def contribution(scope: int, member: SimMember, number: int) -> Tensor:
    """Whole numbers: their sums are the same in any order."""
    seed = hashlib.sha256(f"{scope} {member.peer} {number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:6], "big"))
    return torch.randint(-64, 65, (ELEMENTS[scope],), generator=generator).float()


async def rounds(scope: int, run: Swarm, numbers: range = range(ROUNDS)) -> list[bytes]:
    """The anchor's digest after each round, of all members alike."""
    digests = []
    for number in numbers:
        plays = [member.play(contribution(scope, member, number), SAMPLES) for member in run.members]
        assert all(isinstance(outcome, Committed) for outcome in await together(*plays))
        (digest,) = {member.digest for member in run.members}
        digests.append(digest)
    return digests


async def add_scope(run: Swarm, scope: int, tasks: asyncio.TaskGroup, algorithm: str = "diloco") -> Swarm:
    """All members of ``run`` join a run of that scope, too."""
    stage = Swarm(run.coordinator.add_scope(scope, toml(algorithm)), run.network, ELEMENTS[scope])
    stage.serving = tasks.create_task(stage.coordinator.serve())  # type: ignore[attr-defined]
    for member in run.members:
        await member.in_scope(stage).join(tasks)
    return stage


@asynccontextmanager
async def scopes(*others: int, algorithm: str = "diloco") -> AsyncIterator[list[Swarm]]:
    """The run's own and those."""
    async with swarm(MEMBERS, toml(algorithm), ELEMENTS[0]) as run, asyncio.TaskGroup() as tasks:
        made = [run, *[await add_scope(run, scope, tasks, algorithm) for scope in others]]
        try:
            yield made
        finally:
            for stage in made[1:]:
                stage.serving.cancel()  # type: ignore[attr-defined]
                for member in stage.members:
                    assert member.task is not None
                    member.task.cancel()


async def alone(scope: int, algorithm: str) -> list[bytes]:
    async with swarm(MEMBERS, toml(algorithm), ELEMENTS[scope]) as run:
        return await rounds(scope, run)


@pytest.mark.parametrize("algorithm", ["diloco", "virtual_batch"])
def test_interleaved_rounds_have_the_results_of_separate_runs(algorithm: str) -> None:
    async def main() -> None:
        async with scopes(1, 2, algorithm=algorithm) as runs:
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(rounds(scope, run)) for scope, run in enumerate(runs)]
            log = runs[0].network.log
            turns = [step.blob.scope for step in log]
            changes = sum(one != other for one, other in pairwise(turns))
            assert changes > ROUNDS * len(runs), "the exchanges were beside each other"
            names = [
                {(step.blob.kind, step.blob.number) for step in log if step.blob.scope == scope} for scope in ELEMENTS
            ]
            assert names[0] == names[1] == names[2]
        for scope, task in enumerate(playing):
            assert task.result() == await alone(scope, algorithm)
            assert len(set(task.result())) == ROUNDS

    run_virtual(main())


def test_every_client_has_the_view_of_its_scope() -> None:
    async def main() -> None:
        async with scopes(1, 2) as runs:
            await rounds(1, runs[1], range(3))
            await rounds(2, runs[2], range(1))
            assert [run[0].view.round for run in runs] == [0, 3, 1]
            assert [run[0].view.anchor_version for run in runs] == [0, 3, 1]
            chains = [run[0].view.verdict_chain for run in runs]
            assert chains[0] is None
            assert chains[1] != chains[2]

    run_virtual(main())


def test_who_leaves_one_scope_stays_in_the_others() -> None:
    async def main() -> None:
        async with scopes(1, 2) as runs:
            await rounds(1, runs[1], range(1))
            await rounds(2, runs[2], range(1))
            gone = runs[1].members.pop()
            endpoint = runs[0].members[-1].endpoint
            kept = {blob for blob in endpoint.blobs if blob.scope == 2}
            assert kept
            assert any(blob.scope == 1 for blob in endpoint.blobs)
            await gone.client.leave("done")
            gone.client.withdraw()
            assert gone.task is not None
            gone.task.cancel()
            assert set(endpoint.blobs) == kept
            members = [len(run.coordinator.machine.scope.membership.trainers()) for run in runs]
            assert members == [MEMBERS, MEMBERS - 1, MEMBERS]
            assert endpoint.roster == {member.peer for member in runs[0].members}
            # Two of the three go on with stage 1, all with stage 2.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(shorthanded(runs[1]))
                tasks.create_task(rounds(2, runs[2], range(1, ROUNDS)))
            assert runs[2].coordinator.machine.scope.anchor_version == ROUNDS
            assert runs[1].coordinator.machine.scope.anchor_version == 2

    async def shorthanded(run: Swarm) -> None:
        plays = [member.play(torch.ones(ELEMENTS[1]), SAMPLES * MEMBERS // 2) for member in run.members]
        assert all(isinstance(outcome, Committed) for outcome in await together(*plays))

    run_virtual(main())


def test_who_comes_back_to_a_scope_is_a_new_member_of_it() -> None:
    async def main() -> None:
        async with scopes(1) as runs:
            before = runs[1].members[0]
            await before.client.leave("done")
            before.client.withdraw()
            with pytest.raises(NotAdmitted):
                await before.client.ask(PeerToCoordinatorGetVerdicts(first=0), CoordinatorToPeerVerdicts)
            assert before.task is not None
            before.task.cancel()
            async with asyncio.TaskGroup() as tasks:
                runs[1].members.remove(before)
                again = runs[0].members[0].in_scope(runs[1])
                await again.join(tasks)
                await rounds(1, runs[1], range(1))
                assert again.task is not None
                again.task.cancel()

    run_virtual(main())


def test_the_clients_of_all_scopes_go_to_another_address_together() -> None:
    async def main() -> None:
        SimMember.ports = (1, 2)
        try:
            async with scopes(1) as runs:
                runs[0].coordinator.at = 2
                stage, run = runs[1].members[0], runs[0].members[0]
                await stage.beat()
                assert run.client._connector.channel is stage.client._connector.channel
                assert run.client._connector.channel.port == 2
                await rounds(0, runs[0], range(1))
                await rounds(1, runs[1], range(1))
        finally:
            SimMember.ports = (1,)

    run_virtual(main())


def test_who_is_superseded_in_a_scope_hears_it_there() -> None:
    async def main() -> None:
        async with scopes(1) as runs:
            run, stage = (one.members[0] for one in runs)
            await run.channel.push(CoordinatorToPeerSuperseded(), 1)
            with pytest.raises(Superseded):
                await stage.beat()
            await run.beat()

    run_virtual(main())


def test_a_scope_that_the_coordinator_does_not_have_is_an_error_to_whoever_asks_for_it() -> None:
    async def main() -> None:
        async with scopes() as runs:
            client = runs[0].members[0].client.in_scope(9)
            with pytest.raises(WireError, match="scope 9"):
                await client.join()
            client.withdraw()
            await rounds(0, runs[0], range(1))

    run_virtual(main())


def test_all_scopes_outlive_the_coordinators_absence() -> None:
    async def main() -> None:
        async with scopes(1, 2) as runs:
            coordinators = [run.coordinator for run in runs]
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(rounds(scope, run)) for scope, run in enumerate(runs)]
                await asyncio.sleep(3.0)
                for one in coordinators:
                    one.away = True
                await asyncio.sleep(30.0)
                for one in coordinators:
                    one.restart()
        for scope, task in enumerate(playing):
            assert task.result() == await alone(scope, "diloco")

    run_virtual(main())
