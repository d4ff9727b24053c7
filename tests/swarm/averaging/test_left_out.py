"""Owners and row reducers that leave members out of their means are named by those, and by nobody else."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.fakes.exchanges import Side, make_sides, run_all
from tests.fakes.grids import PEERS, plan_of
from tests.fakes.memory_network import MemoryNetwork, Step, stalled
from tests.fakes.swarm import run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.reduction import PartReducer, Reduction
from shoal.swarm.protocol.rounds import RoundPlan

FLAT = plan_of([1] * 5, [[0, 1, 2, 3, 4]], 20 * 4096)
GRID = plan_of([1] * 9, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], 36 * 4096)


@contextmanager
def leaving_out(liar: str, victims: set[int], rows: int | None = None) -> Iterator[None]:
    """Make one member leave others out of what it sums. ``rows``: of sums of so many rows only."""
    real_run, real_add, lying = Reduction.run, PartReducer._add_members, set[int]()

    async def run(self: Reduction, *arguments: Any) -> None:
        if self.context.members[self.context.me] == liar and rows in (None, len(self.group.rows)):
            lying.add(id(self.group))
        await real_run(self, *arguments)

    def add(self: PartReducer, chunk: int, *arguments: Any) -> list[int]:
        if id(self.group) in lying:
            for victim in victims:
                self._chunks[chunk].arrived.pop(victim, None)
        return real_add(self, chunk, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "run", run)
        patch.setattr(PartReducer, "_add_members", add)
        yield


def named(plan: RoundPlan, network: MemoryNetwork | None = None) -> dict[int, set[int]]:
    """Return whom each member names in its report, of those that name anybody."""

    async def main() -> list[Side]:
        sides = make_sides(network or MemoryNetwork(), plan, "int8")
        await run_all(sides)
        return sides

    outcomes = {index: side.outcome for index, side in enumerate(run_virtual(main()))}
    return {index: one.failed for index, one in outcomes.items() if one is not None and one.failed}


def test_whoever_is_left_out_names_its_owner() -> None:
    with leaving_out(PEERS[1], {2, 3}):
        assert named(FLAT) == {2: {1}, 3: {1}}


def test_nobody_is_named_where_all_are_in() -> None:
    assert named(FLAT) == {}
    assert named(GRID) == {}


@pytest.mark.parametrize("rows", [1, 3], ids=["as row reducer", "as owner"])
def test_in_a_grid_its_row_reducer_is_named(rows: int) -> None:
    """Whoever was to sum the member's contribution: never the owner of a mean that a row reducer left it out of."""
    with leaving_out(PEERS[4], {3}, rows):
        assert named(GRID) == {3: {4}}


def test_a_row_reducer_that_withholds_its_last_sums_is_named_for_the_others() -> None:
    """Of the last chunk of each part the owner sums the row itself."""
    others = [part for part in GRID.parts if GRID.members[part.owner].row != 1 and GRID.row_reducers(part)[1] == 4]
    lasts = {part.stop // GRID.chunk_elements - 1 for part in others}
    assert any(part.stop - part.start > GRID.chunk_elements for part in others)
    network = MemoryNetwork()

    async def withhold(step: Step, payload: bytes) -> bytes:
        if (step.blob.kind, step.holder) == ("partial", PEERS[4]) and step.chunk in lasts:
            await asyncio.Event().wait()
        return payload

    network.faults.append(withhold)
    with leaving_out(PEERS[4], {3}, rows=1):
        assert named(GRID, network) == {3: {4}} | {part.owner: {4} for part in others}


def test_a_member_that_nobody_hears_names_nobody() -> None:
    network = MemoryNetwork()
    network.faults.append(stalled("contribution", PEERS[2], 0))
    assert named(FLAT, network) == {}


def test_whoever_was_not_asked_for_everything_names_nobody() -> None:
    """Such a stream was cut off: by the link, or by an owner that goes on without it."""
    network = MemoryNetwork()
    network.faults.append(stalled("contribution", PEERS[2], 4, to=PEERS[1]))
    chunks = [part.start // FLAT.chunk_elements for part in FLAT.parts if part.owner == 1]
    assert chunks == [4]
    assert named(FLAT, network) == {}


def test_an_owner_that_leaves_most_members_out_owns_nothing_for_a_while() -> None:
    async def main() -> None:
        async with swarm(5, run_toml(50), 20 * 4096) as run:
            with leaving_out(run[0].peer, {1, 2, 3}):
                plays = [one.play(torch.randn(20 * 4096), 10) for one in run.members]
                assert all(isinstance(one, Committed) for one in await together(*plays))
            members = run.coordinator.machine.scope.membership.members
            assert [members[run[index].peer].can_own for index in range(5)] == [False, True, True, True, True]

    run_virtual(main())


def test_who_is_left_out_is_in_the_mean_a_round_later() -> None:
    """Another owns the part then, and the residual brings the work again."""

    async def main() -> None:
        async with swarm(5, run_toml(50), 20 * 4096) as run:
            left = []
            with leaving_out(run[0].peer, {1}):
                for number in range(2):
                    plays = [one.play(torch.ones(20 * 4096) * (1 - number), 10) for one in run.members]
                    assert all(isinstance(one, Committed) for one in await together(*plays))
                    left.append(int(run[1].averager.round_feedback.error_feedback.residual.count_nonzero()))
            assert left == [4 * 4096, 0]

    run_virtual(main())


def test_one_word_against_an_owner_bars_nobody() -> None:
    async def main() -> None:
        async with swarm(5, run_toml(50), 20 * 4096) as run:
            with leaving_out(run[0].peer, {1}):
                plays = [one.play(torch.randn(20 * 4096), 10) for one in run.members]
                assert all(isinstance(one, Committed) for one in await together(*plays))
            members = run.coordinator.machine.scope.membership.members
            assert all(members[one.peer].can_own for one in run.members)

    run_virtual(main())
