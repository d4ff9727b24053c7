"""A member that serves other bytes than those that it committed to: no owner takes them."""

import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S, committed_with, wait_for_credit
from tests.integration.harness import ROUNDS_S, Swarm, eventually, finish, run_toml

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.protocol.rounds import Verdict

pytestmark = pytest.mark.integration

EQUIVOCATING = (sys.executable, str(Path(__file__).parent / "equivocating_member.py"))
AFTER = 4


def test_no_owner_takes_other_bytes_than_were_committed_to(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S))
    honest = swarm.members(host.invite, "a", "b")
    wait_for_credit(host, honest)
    liar = swarm.member(host.invite, "liar", EQUIVOCATING)
    peer = liar.peer

    def look() -> list[Verdict] | None:
        verdicts = [one.verdict for one in host.journal_events() if isinstance(one, VerdictGiven)]
        planned = committed_with(host, peer)
        since = [one for one in verdicts if planned and one.round >= planned[0].round]
        return since if len(since) >= 2 + AFTER else None

    rounds = eventually("some rounds after its first", look, ROUNDS_S, host.tail)
    with_it = [peer in [member.peer for member in one.plan.members] if one.plan else False for one in rounds]
    assert with_it[:2] == [True, True]
    assert sum(with_it[2:]) <= 1, "left out like one that never delivers"
    finish(host, honest)
