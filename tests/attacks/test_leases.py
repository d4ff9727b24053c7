"""A member that does no work, and so is always the fastest, gets no more than a newcomer's share of the samples."""

import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S, wait_for_credit, wait_for_rounds
from tests.integration.harness import Swarm, finish, run_toml

from shoal.swarm.coordinator.events import LeaseGranted
from shoal.swarm.coordinator.trust import NEWCOMERS_SHARE
from shoal.swarm.sample_ranges import count, from_wire

pytestmark = pytest.mark.integration

IDLE = (sys.executable, str(Path(__file__).parent / "idle_member.py"))
ROUNDS = 4


def test_who_does_no_work_gets_a_newcomers_share(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S))
    honest = swarm.members(host.invite, "a", "b")
    wait_for_credit(host, honest)
    idle = swarm.member(host.invite, "idle", IDLE)
    rounds = wait_for_rounds(host, idle, ROUNDS)
    tokens = sum(one.tokens for one in rounds)
    weights = [
        member.weight_tokens for one in rounds if one.plan for member in one.plan.members if member.peer == idle.peer
    ]
    leased = {one.peer: 0 for one in host.journal_events() if isinstance(one, LeaseGranted)}
    for one in host.journal_events():
        if isinstance(one, LeaseGranted) and one.round >= rounds[0].round:
            leased[one.peer] += count(from_wire(one.ranges))
    share, used = sum(weights) / tokens, leased[idle.peer] / sum(leased.values())
    print(f"of the tokens {share:.1%}, of the samples {used:.1%} of {sum(leased.values())}")
    # Paces are seen with some noise: a machine that is busy commits less than it did.
    assert share < 2 * NEWCOMERS_SHARE
    assert used < 2 * NEWCOMERS_SHARE
    finish(host, [*honest, idle])
