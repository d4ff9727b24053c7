"""Rounds that gather contributions: every one as it is, the same for all, whoever dies."""

import asyncio
from typing import Any

import pytest
import torch
from tests.fakes.audits import change_a_bit, committed_round, facts
from tests.fakes.memory_network import at, changed
from tests.fakes.swarm import PATIENCE_S, SimMember, swarm, together
from tests.fakes.virtual_clock import now_s, run_virtual
from torch import Tensor

from shoal.swarm.averaging.chunk_judge import judge
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import TryLater, WireError
from shoal.swarm.protocol.evidence import unpack_evidence

ELEMENTS = 3 * 4096 + 17
TOML = f"""
[run]
name = "test"
[recipe]
name = "own"
[data]
source = "own"
[collective]
values = {ELEMENTS}
members = 3
[round]
tokens = 1
max_s = 600.0
patience_s = {PATIENCE_S}
"""


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 10.0**seed


def gathered(outcome: Any) -> list[Tensor | None]:
    assert isinstance(outcome, Committed)
    plan = outcome.verdict.plan
    assert plan is not None
    return [outcome.mean.brought(index) for index in range(len(plan.members))]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return len(found) == len(expected) and all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(found, expected, strict=True)
    )


def test_every_contribution_comes_to_all_as_it_is() -> None:
    """However different they are in size; the anchor does not move, and nothing is carried to the next round."""

    async def main() -> None:
        async with swarm(3, TOML, ELEMENTS) as run:
            for number in range(3):
                began_s = now_s()
                own = [contribution(number + index) for index in range(3)]
                outcomes = await together(*(run[index].play(own[index], 1) for index in range(3)))
                assert all(same(gathered(outcome), [*own]) for outcome in outcomes)
                assert all(not one.anchor.any() for one in run.members)
                assert all(not one.averager.round_feedback.error_feedback.residual.any() for one in run.members)
                assert now_s() - began_s < PATIENCE_S / 2, "a call ends when all have made it"

    run_virtual(main())


@pytest.mark.parametrize("kind", ["contribution", "result"])
def test_a_member_that_dies_in_the_exchange_is_in_it_whole_or_not_at_all(kind: str) -> None:
    async def main() -> None:
        async with swarm(3, TOML, ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            victim, doomed = run[2], list[asyncio.Task[Any]]()
            doomed.append(tasks.create_task(victim.play(contribution(2), 1)))

            def kill() -> None:
                victim.die()
                doomed[0].cancel()

            run.network.faults.append(at(kind, victim.peer, 0 if kind == "contribution" else 3, kill))
            outcomes = await together(*(run[index].play(contribution(index), 1) for index in range(2)))
            found = [gathered(outcome) for outcome in outcomes]
            assert same(found[0], found[1])
            assert same(found[0][:2], [contribution(0), contribution(1)])
            assert found[0][2] is None or torch.equal(found[0][2], contribution(2))
            again = await together(*(run[index].play(contribution(5 + index), 1) for index in range(2)))
            assert all(same(gathered(outcome), [contribution(5), contribution(6)]) for outcome in again)

    run_virtual(main())


def test_what_was_left_out_is_not_in_a_later_contribution() -> None:
    """A mean makes up for what it lacked; a gathered contribution stands for itself."""

    async def main() -> None:
        async with swarm(3, TOML, ELEMENTS) as run:
            spoiled = changed("contribution", run[2].peer, lambda payload: bytes(len(payload)))
            run.network.faults.append(spoiled)
            outcomes = await together(*(run[index].play(contribution(index), 1) for index in range(3)))
            first = gathered(outcomes[0])
            assert same(first[:2], [contribution(0), contribution(1)])
            assert first[2] is None
            run.network.faults.clear()
            again = await together(*(run[index].play(contribution(5 + index), 1) for index in range(3)))
            assert same(gathered(again[2]), [contribution(5), contribution(6), contribution(7)])

    run_virtual(main())


def test_an_owner_that_changes_a_contribution_is_proven_guilty() -> None:
    async def evidence(liar: int | None) -> Any:
        done = await committed_round("float32", liar, "gather", change=change_a_bit)
        return unpack_evidence(await done.evidence(1, 2)), await done.evidence(1, 2)

    assert judge(run_virtual(evidence(None))[1], facts("float32")).word == "innocent"
    assert judge(run_virtual(evidence(1))[1], facts("float32")).word == "guilty"


def test_results_are_bounded_by_what_a_frame_takes_and_by_the_claims() -> None:
    async def main() -> None:
        async with swarm(3, TOML, ELEMENTS) as run:
            outcome = (await together(*(run[index].play(contribution(index), 1) for index in range(3))))[0]
            assert isinstance(outcome, Committed)
            plan, codec_map = outcome.verdict.plan, run[0].averager._codec_map
            assert plan is not None
            store = ResultStore(plan, codec_map)
            assert store.result_bytes(0) == 1 + 4 * 3 * plan.chunk_elements
            with pytest.raises(WireError, match="does not fit"):
                store.room(0, 1 + 4 * 2 * plan.chunk_elements)
            with pytest.raises(WireError, match="chunks of 3145728 values"):
                ResultStore(plan.model_copy(update={"chunk_elements": 2**20}), codec_map)
            least = store.norm_bounds.mean([0], 0, 4096, with_partial_sums=False)
            assert least < store.norm_bounds.mean([0, 1, 2], 0, 4096, with_partial_sums=False)

    run_virtual(main())


def test_a_plan_of_another_kind_than_the_run_files_is_not_taken_part_in() -> None:
    async def main() -> None:
        async with swarm(3, TOML, ELEMENTS) as run:
            outcome = (await together(*(run[index].play(contribution(index), 1) for index in range(3))))[0]
            plan = outcome.verdict.plan  # type: ignore[union-attr]
            averager = run[0].averager
            assert averager._fits_run(plan)
            assert not averager._fits_run(plan.model_copy(update={"mean": "weighted"}))
            more = (*plan.members, plan.members[-1].model_copy(update={"peer": "z" * 52}))
            assert not averager._fits_run(plan.model_copy(update={"members": more}))

    run_virtual(main())


def test_a_run_of_collectives_takes_no_more_members_than_its_file_says() -> None:
    async def main() -> None:
        async with swarm(3, TOML, ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            fourth = SimMember(run, 4, 0.01)
            with pytest.raises(TryLater, match="full"):
                await fourth.join(tasks)

    run_virtual(main())
