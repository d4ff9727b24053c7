"""Collectives over a run's members, on real sockets: two frameworks, a member that dies, one that is late."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.harness import KILLED, ROUNDS_S, START_S, Process, Swarm, eventually

pytestmark = pytest.mark.integration

MEMBER = Path(__file__).parent / "collective_member.py"

RUN = """
[run]
name = "calls"
[recipe]
name = "own"
[data]
source = "own"
[collective]
values = 20000
members = 4
[round]
tokens = 1
max_s = 20
patience_s = 2
"""


def member(swarm: Swarm, invite: str, number: int, kind: str = "numpy", *doom: str) -> Process:
    folder = swarm.folder / f"m{number}"
    return swarm.command(f"m{number}", sys.executable, str(MEMBER), invite, str(folder), str(number), kind, *doom)


def results(process: Process) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in process.text().splitlines() if line.startswith("{")]
    return [line for line in lines if "round" in line]


def peer(process: Process) -> str:
    lines = [json.loads(line) for line in process.text().splitlines() if line.startswith('{"peer"')]
    return str(lines[0]["peer"])


def check_alike(processes: list[Process]) -> None:
    """Check that all members of a round have the same result, bit for bit, and the same list of members."""
    by_round = defaultdict(list)
    for process in processes:
        for one in results(process):
            by_round[one["round"]].append((one["call"], one["digest"], one["members"]))
    assert all(one == found[0] for found in by_round.values() for one in found), by_round


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", ["reducing", *(pytest.param(step, marks=pytest.mark.matrix) for step in ("ready", "serving", "exchanged"))]
)
def test_every_collective_with_three_members_of_which_one_dies_in_a_call_and_a_late_one(
    swarm: Swarm, step: str
) -> None:
    """It dies by SIGKILL: before the plan is there, as others fetch its arrays, as an owner, before it reports."""
    host, armed = swarm.host(RUN), swarm.folder / "armed"
    kinds = {1: ("numpy",), 2: ("torch",), 3: ("numpy", step, str(armed))}
    members = [member(swarm, host.invite, number, *kinds[number]) for number in kinds]

    def seen(process: Process, size: int, calls: set[str]) -> bool:
        return calls <= {one["call"] for one in results(process) if len(one["members"]) == size}

    each = {"sum", "mean", "max", "gather", "scatter", "broadcast"}
    eventually("all calls of three members", lambda: all(seen(one, 3, each) for one in members), START_S + ROUNDS_S)
    numbers = {peer(process): number for number, process in zip((1, 2, 3), members, strict=True)}
    armed.write_text("SIGKILL")
    assert members[2].exit_code(ROUNDS_S) == KILLED
    killed_after = results(members[2])[-1]["round"]
    eventually(
        "all calls of the two that are left",
        lambda: all(seen(one, 2, each) for one in members[:2]),
        ROUNDS_S,
    )
    late = member(swarm, host.invite, 4)
    eventually("all calls with the late one", lambda: seen(late, 3, each), START_S + ROUNDS_S)
    numbers[peer(late)] = 4
    check_alike([*members, late])
    base = np.arange(6, dtype=np.float32).reshape(3, 2)
    for process in (*members, late):
        for one in results(process):
            values = [base + np.float32(numbers[peer]) for peer in one["members"]]
            assert one["members"][one["rank"]] == peer(process)
            total = np.sum(values, axis=0)
            match one["call"]:
                case "sum":
                    expected = total
                case "mean":
                    expected = total / np.float32(len(values))
                case "max":
                    expected = np.max(values, axis=0)
                case "gather":
                    expected = values[0]
                case "scatter":
                    expected = np.array_split(total, len(values))[one["rank"]]
                case _:
                    expected = base + 1
            assert np.array_equal(one["own"], expected), one
    assert any(one["round"] > killed_after for one in results(members[0]))
