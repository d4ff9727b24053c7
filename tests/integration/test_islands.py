"""Islands: several processes that are one member, with real members and a real host."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from tests.integration.harness import (
    CALM,
    DOOMED_MEMBER,
    HERE,
    KILLED,
    LEAVE_S,
    ROUNDS_S,
    START_S,
    Member,
    Process,
    Swarm,
    check_journal,
    check_parity,
    eventually,
    finish,
    held,
    run_toml,
)
from tests.integration.plain_loop import plain_loop

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import checkpoint_folders
from shoal.peer.island.training import __name__ as RANK
from shoal.swarm.errors import DeviceError, IslandBroken

pytestmark = pytest.mark.integration

WITHIN_S = 2 * ROUNDS_S
"""Islands come up more slowly than single members: each rank imports torch."""


def ranks_of(member: Process) -> list[psutil.Process]:
    """Return the processes of a member's other ranks, in order, once they are there."""

    def look() -> list[psutil.Process] | None:
        found = [one for one in psutil.Process(member.pid).children() if RANK in one.cmdline()]
        return sorted(found, key=lambda one: int(one.cmdline()[4])) or None

    return eventually("ranks", look, START_S, member.tail)


def together(members: list[Member], count: int, after: int = -1) -> int:
    """Wait for a round after ``after`` in which so many members were; return it."""

    def look() -> int | None:
        rounds = [
            {one["round"] for one in member.events("committed", included=True, members=count) if one["round"] > after}
            for member in members
        ]
        common = set.intersection(*rounds)
        assert all(member.running for member in members), [member.tail() for member in members if not member.running]
        return min(common) if common else None

    return eventually(f"{count} members in a round", look, WITHIN_S, lambda: "\n".join(one.tail() for one in members))


# A round without a network ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "algorithm", "overlap"),
    [
        (3, 1, "diloco", "false"),
        (2, 2, "diloco", "true"),
        pytest.param(3, 1, "virtual_batch", "false", marks=pytest.mark.matrix),
        pytest.param(3, 1, "diloco", "true", marks=pytest.mark.matrix),
        pytest.param(4, 2, "diloco", "false", marks=pytest.mark.matrix),
    ],
)
def test_ranks_equal_one_process(swarm: Swarm, ranks: int, tensor_parallel: int, algorithm: str, overlap: str) -> None:
    """Losses, contributions of two rounds and the parameters in the end, of batches with equal shares and of others."""
    meeting = swarm.folder / "meeting"
    meeting.mkdir()
    script = ("env", *CALM[:1], str(HERE / "island_ranks.py"))
    started = [
        swarm.command(
            f"rank-{rank}", *script, str(meeting), str(rank), str(ranks), str(tensor_parallel), algorithm, overlap
        )
        for rank in range(ranks)
    ]
    for process in started:
        assert process.exit_code(WITHIN_S) == 0, swarm.tails()
    found = json.loads(started[0].text().splitlines()[-1])
    assert found["losses"] < 1e-5
    assert max(found["values"]) < 1e-5, found
    assert min(found["scale"]) > 1e-2, "something was trained"


# In a run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_islands_of_one_two_and_three_ranks_train_in_one_run(swarm: Swarm) -> None:
    """One of three ranks dies: its island ends at once, and the others go on. It comes back with two ranks."""
    host = swarm.host(run_toml(max_s=3.0))
    one = swarm.member(host.invite, "one")
    two = swarm.member(host.invite, "two", extra=("--devices", "cpu:2"), device="auto")
    three = swarm.member(host.invite, "three", extra=("--devices", "cpu:3"), device="auto")
    first = together([one, two, three], 3)
    together([one, two, three], 3, after=first)

    ranks = ranks_of(three)
    assert len(ranks) == 2
    ranks[1].kill()
    assert three.exit_code(LEAVE_S) == IslandBroken.exit_code, three.tail()
    psutil.wait_procs(ranks, LEAVE_S)
    assert not any(rank.is_running() for rank in ranks), "the others of its ranks end with it"
    gone = three.last_round()
    assert together([one, two], 2, after=gone) > gone

    three.command[three.command.index("cpu:3")] = "cpu:2"
    three.start()
    assert three.event("synced", WITHIN_S)["checkpoint"] is not None
    together([one, two, three], 3, after=one.last_round())
    assert len(ranks_of(three)) == 1
    assert "does not fit" not in three.text(), "a checkpoint of three ranks is one of two"
    left = ranks_of(three) + ranks_of(two)
    finish(host, [one, two, three])
    assert not any(rank.is_running() for rank in left)


STEPS = ("training 1", "ready 1", "serving 1", "reducing 1", "applying 1")
FOR_ALL = (("reducing 1", 0), ("training 1", 1))
"""Cases that `make test-all` has, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "victim"),
    [
        pytest.param(step, victim, marks=() if (step, victim) in FOR_ALL else pytest.mark.matrix)
        for step in STEPS
        for victim in (0, 1)
    ],
)
def test_a_rank_is_killed(swarm: Swarm, step: str, victim: int) -> None:
    """Rank 0 or another one, in a batch, with a contribution, as a contributor, as an owner, and before the outer
    step: the membership ends at once, the others go on, and the same command brings it back."""
    host = swarm.host(run_toml(max_s=3.0))
    # A vector of one chunk has one owner: this has it be the island.
    leaves_owning = ("--role", "contributor") if step.startswith("reducing") else ()
    other = swarm.member(host.invite, "other", extra=leaves_owning)
    island = swarm.member(host.invite, "island", extra=("--devices", "cpu:2"), device="auto")
    arguments, armed = island.command[island.command.index("join") :], swarm.folder / "armed"
    island.kill()
    island.command = [*DOOMED_MEMBER, *step.split(), str(armed), *arguments]
    island.start()
    together([other, island], 2)
    ranks = ranks_of(island)
    armed.write_text("" if victim == 0 else f"rank {victim}")
    assert island.exit_code(ROUNDS_S) == (KILLED if victim == 0 else IslandBroken.exit_code), island.tail()
    psutil.wait_procs(ranks, LEAVE_S)
    assert not any(rank.is_running() for rank in ranks)
    last = island.last_round()
    other.committed(after=last + 1)
    island.command = [*CALM, *arguments]
    island.start()
    together([other, island], 2, after=last)
    assert other.events("resync") == [], "nobody else has lost anything"
    finish(host, [other, island])


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_in_a_run_equals_one_process(swarm: Swarm, ranks: int) -> None:
    """Layers cut among two, with two of such pairs of FSDP2, beside a single process: rounds of a virtual batch."""
    rounds, batch = 3, 48
    outer = 'optimizer = "adamw"\nlr = 2e-3\nweight_decay = 0.01'
    toml = run_toml(
        algorithm="virtual_batch", codec="float32", tokens=batch * 32, max_s=120, rounds=rounds, outer=outer
    )
    host, gate = swarm.host(toml), swarm.folder / "gate"
    gate.touch()  # they begin together: else the first might do everything alone
    options = ("--devices", f"cpu:{ranks}", "--tensor-parallel", "2")
    island = swarm.member(host.invite, "island", held(gate), extra=options, device="auto")
    one = swarm.member(host.invite, "one", held(gate, 0.2))
    for member in (island, one):
        member.says("waits at the gate", START_S)
    gate.unlink()
    for member in (island, one):
        assert member.exit_code(WITHIN_S) == 0, member.tail()
    host.stop()
    check_parity(host, [island, one])
    verdicts = [event.verdict for event in check_journal(host)]
    assert any(verdict.plan and len(verdict.plan.members) == 2 for verdict in verdicts), "both have averaged together"
    trained = read_checkpoint(FolderSource(checkpoint_folders(next(island.folder.glob("state/*/*/checkpoints")))[-1]))
    assert trained.state.version == rounds
    plain = torch.cat([values.reshape(-1) for values in plain_loop(toml, rounds, batch).values()])
    assert torch.linalg.vector_norm(trained.state.anchor - plain) < 1e-5 * torch.linalg.vector_norm(plain)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_loop_of_ones_own_under_torchrun(swarm: Swarm, tmp_path: Path) -> None:
    host = swarm.host(run_toml(max_s=3.0))
    events = tmp_path / "own.jsonl"
    script = [str(HERE / "island_loop.py"), host.invite, str(tmp_path / "own"), str(events)]
    torchrun = ("env", *CALM[:1], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    own = swarm.command("own", *torchrun, *script)
    assert own.exit_code(WITHIN_S) == 0, swarm.tails()
    committed = [json.loads(line) for line in events.read_text().splitlines()]
    assert sum(one["event"] == "committed" and one["included"] for one in committed) >= 2
    host.stop()
    assert [one.verdict.committed for one in check_journal(host)][:2] == [True, True]


def test_a_run_that_no_island_takes_part_in(swarm: Swarm) -> None:
    host = swarm.host(run_toml().replace('precision = "float32"', 'precision = "float16"'))
    island = swarm.member(host.invite, "island", extra=("--devices", "cpu:2"), device="auto")
    assert island.exit_code(START_S) == DeviceError.exit_code
    assert "float16" in island.text()
