"""A member that is always ready and never delivers is left out after two rounds."""

import itertools
import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S, wait_for_credit, wait_for_rounds_since
from tests.integration.harness import Swarm, finish, run_toml

pytestmark = pytest.mark.integration

WITHHOLDING = (sys.executable, str(Path(__file__).parent / "withholding_member.py"))
PATIENCE_S = 4.0
AFTER = 6
"""Rounds after those that it spoils."""


def test_nobody_waits_for_it_for_ever(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S, patience_s=PATIENCE_S))
    honest = swarm.members(host.invite, "a", "b")
    wait_for_credit(host, honest)
    liar = swarm.member(host.invite, "liar", WITHHOLDING)
    peer = liar.peer

    rounds = wait_for_rounds_since(host, peer, 2 + AFTER)
    took_s = [after.ended_s - before.ended_s for before, after in itertools.pairwise(rounds)]
    with_it = [peer in [member.peer for member in one.plan.members] if one.plan else False for one in rounds]
    print([f"{seconds:.1f} s{' with it' if one else ''}" for seconds, one in zip(took_s, with_it[1:], strict=True)])
    assert with_it[:2] == [True, True]
    # Left out of two rounds, then tried once more, and left out of four.
    assert sum(with_it[2:]) <= 1
    assert sum(seconds > PATIENCE_S for seconds in took_s[1:]) <= 1
    finish(host, honest)
