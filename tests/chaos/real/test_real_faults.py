"""Members and the coordinator fail at named steps of a round: real processes, real sockets, one swarm after the other
fault. ``fault_matrix.py`` has more of them. The same is done without processes, for every combination, in
``tests/chaos``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.chaos.real.orders import Order
from tests.chaos.real.stage import LONG_S, SHORT_S, Stage
from tests.integration.harness import KILLED, ROUNDS_S

pytestmark = pytest.mark.integration

STOPPED = [
    Order("contributor", "SIGSTOP", "while contributing", SHORT_S),
    Order("owner", "SIGSTOP", "while reducing", SHORT_S),
    Order("coordinator", "SIGSTOP", "before the verdict is announced", LONG_S),
]
DISCONNECTED = [
    Order("contributor", "cut", "while contributing"),
    Order("owner", "cut", "some have the result"),
    Order("coordinator", "cut", "after the report"),
    Order("owner", "half-open", "while reducing", LONG_S),
    Order("coordinator", "half-open", "after the report", LONG_S),
]
LYING = [
    Order("contributor", "corrupted bytes", "while contributing"),
    Order("owner", "corrupted bytes", "some have the result"),
]
KILLED_ONES = [
    Order("contributor", "SIGKILL", "while contributing"),
    Order("owner", "SIGKILL", "some have the result"),
    Order("coordinator", "SIGKILL", "after the report"),
]
OWNER_KILLED = Order("owner", "SIGKILL", "while reducing")
TWO = [
    (OWNER_KILLED, Order("stand-in", "SIGKILL", "while reducing")),
    (OWNER_KILLED, Order("stand-in", "SIGSTOP", "while reducing", LONG_S)),
    (OWNER_KILLED, Order("stand-in", "cut", "while reducing")),
    (Order("contributor", "SIGSTOP", "while contributing", SHORT_S), Order("coordinator", "SIGKILL", "while reducing")),
]


@pytest.mark.parametrize("order", [*STOPPED, *DISCONNECTED, *LYING, *KILLED_ONES], ids=str)
def test_one_fault(stage: Stage, order: Order) -> None:
    stage.play(order)


@pytest.mark.parametrize("both", TWO, ids=lambda both: f"{both[0]} and {both[1]}")
def test_two_faults_in_one_round(stage: Stage, both: tuple[Order, Order]) -> None:
    stage.play(*both)


def test_a_killed_owner_that_comes_back_within_the_round(stage: Stage) -> None:
    stage.in_order = False
    assert any(_comes_back_within_the_round(stage) for _ in range(3)), "always after it: the machine is too busy"
    stage.in_order = True


def _comes_back_within_the_round(stage: Stage) -> bool:
    """Kill an owner and let it in again; returns whether it joined before the round's verdict."""
    plan = stage.fill_roles()
    owner = stage.member(plan.members[plan.parts[0].owner].peer)
    spare = stage.spare_at_the_door(owner)
    (done,) = stage.carry_out(replace(OWNER_KILLED, peer=owner.peer))
    assert owner.exit_code(ROUNDS_S) == KILLED
    assert done["peer"] == owner.events("joined")[0]["peer"]
    stage.let_in(spare, instead_of=owner)
    verdict = stage.verdict_of(done["round"])
    stage.check([done])
    assert verdict.verdict.committed
    kinds = [(one["event"], one.get("peer") or one.get("round")) for one in stage.host.all_events()]
    planned, ended = kinds.index(("round_planned", done["round"])), kinds.index(("verdict", done["round"]))
    return ("member_joined", done["peer"]) in kinds[planned:ended]
