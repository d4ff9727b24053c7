"""Two newcomers that say of all others in every round that they failed: the model stays with its owners."""

import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import CREDIT_ROUNDS, ROUND_S, wait_for_credit, wait_for_rounds
from tests.integration.harness import Swarm, finish, run_toml

from shoal.swarm.coordinator.events import VerdictGiven

pytestmark = pytest.mark.integration

ACCUSING = str(Path(__file__).parent / "accusing_member.py")
ROUNDS = 5


def test_newcomers_cannot_accuse_the_owners_away(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S))
    honest = swarm.members(host.invite, "a", "b")
    wait_for_credit(host, honest)
    accused = {member.peer for member in honest}
    launcher = (sys.executable, ACCUSING, ",".join(accused))
    liars = swarm.members(host.invite, "x", "y", launcher=launcher)
    played = [wait_for_rounds(host, liar, ROUNDS) for liar in liars]
    # One of them may be here long before the other, and own a part in the end, as anybody with credit does.
    last = min((ones[CREDIT_ROUNDS - 1].round for ones in played if len(ones) >= CREDIT_ROUNDS), default=sys.maxsize)
    rounds = [one for ones in played for one in ones if one.round <= last]
    owned = {member.peer: 0 for one in rounds if one.plan for member in one.plan.members}
    for one in rounds:
        assert one.plan is not None
        for part in one.plan.parts:
            owned[one.plan.members[part.owner].peer] += part.stop - part.start
    print({peer: f"{size / sum(owned.values()):.1%}" for peer, size in owned.items()})
    assert {peer for peer, size in owned.items() if size} <= accused
    verdicts = [one for one in host.journal_events() if isinstance(one, VerdictGiven)]
    assert not {peer for one in verdicts for peer in (*one.failed, *one.missing)}
    said = {(one.by, one.of) for verdict in verdicts for one in verdict.accusations}
    assert {of for _, of in said} == accused
    assert said >= {(liar.peer, peer) for liar in liars for peer in accused}, "what they say is kept"
    finish(host, [*honest, *liars])
