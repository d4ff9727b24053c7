"""Stages of a pipeline that are held by islands, of real processes."""

import json

import psutil
import pytest
from tests.integration.harness import CALM, HERE, ROUNDS_S, START_S, Member, Swarm
from tests.integration.test_islands import LEAVE_S, WITHIN_S, ranks_of
from tests.integration.test_pipeline import MEMORY, TOML, check, join, launcher, span

from shoal.swarm.errors import IslandBroken

pytestmark = pytest.mark.integration


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "recompute", "recipe"),
    [
        (3, 1, "false", "gpt"),
        pytest.param(3, 1, "true", "gpt", marks=pytest.mark.matrix),
        pytest.param(2, 2, "false", "gpt", marks=pytest.mark.matrix),
        pytest.param(4, 2, "false", "gpt", marks=pytest.mark.matrix),
        pytest.param(2, 1, "false", "hf", marks=pytest.mark.matrix),
    ],
)
def test_ranks_compute_what_one_process_does(
    swarm: Swarm, ranks: int, tensor_parallel: int, recompute: str, recipe: str
) -> None:
    """Outputs, gradients, losses and contributions of two spans, one after the other."""
    meeting = swarm.folder / "meeting"
    meeting.mkdir()
    script = ("env", *CALM[:1], str(HERE / "island_stages.py"), str(meeting))
    started = [
        swarm.command(f"rank-{rank}", *script, str(rank), str(ranks), str(tensor_parallel), recompute, recipe)
        for rank in range(ranks)
    ]
    for process in started:
        assert process.exit_code(WITHIN_S) == 0, swarm.tails()
    found = json.loads(started[0].text().splitlines()[-1])
    assert max(found["differences"]) < 1e-5, found
    assert found["compared"] > 10


def island_of_two(swarm: Swarm, invite: str, label: str = "island", *options: str) -> Member:
    extra = ("--max-memory", f"{1.5 * float(MEMORY):.0f}", "--devices", "cpu:2", *options)
    return swarm.member(invite, label, launcher(), extra=extra, device="auto")


@pytest.mark.matrix
def test_a_stage_of_an_island_among_stages_of_single_processes(swarm: Swarm) -> None:
    """All of them equal one process. One of the island's ranks dies meanwhile, and it comes back with one command."""
    host = swarm.host(TOML)
    island = island_of_two(swarm, host.invite)
    others = [join(swarm, host, label) for label in ("one", "two")]
    assert sorted(span(member) for member in (island, *others)) == [(0, 0), (1, 1), (2, 2)]
    island.event("committed", ROUNDS_S)
    (rank,) = ranks_of(island)
    rank.kill()
    assert island.exit_code(START_S) == IslandBroken.exit_code, island.tail()
    psutil.wait_procs([rank], LEAVE_S)
    island.start()
    check(host, [island, *others])
