"""A member that serves other bytes than those that it committed to: no owner takes them."""

import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S, wait_for_credit, wait_for_rounds_since
from tests.integration.harness import Swarm, finish, run_toml

pytestmark = pytest.mark.integration

EQUIVOCATING = (sys.executable, str(Path(__file__).parent / "equivocating_member.py"))
AFTER = 4


def test_no_owner_takes_other_bytes_than_were_committed_to(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S))
    honest = swarm.members(host.invite, "a", "b")
    wait_for_credit(host, honest)
    liar = swarm.member(host.invite, "liar", EQUIVOCATING)
    peer = liar.peer

    rounds = wait_for_rounds_since(host, peer, 2 + AFTER)
    with_it = [peer in [member.peer for member in one.plan.members] if one.plan else False for one in rounds]
    assert with_it[:2] == [True, True]
    assert sum(with_it[2:]) <= 1, "left out like one that never delivers"
    finish(host, honest)
