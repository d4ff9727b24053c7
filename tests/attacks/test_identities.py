"""Twenty identities of one network that do next to no work, in a run of three members: they own and decide nothing."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.attacks.trusted import wait_for_credit
from tests.integration.harness import ROUNDS_S, Swarm, eventually, finish, run_toml

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS
from shoal.swarm.protocol.rounds import Verdict

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="ends forked processes with their parent"),
]

IDENTITIES = 20
MANY = (sys.executable, str(Path(__file__).parent / "many_members.py"), str(IDENTITIES))
ROUND_TOKENS = 200 * 4 * 32
"""200 batches: so that one is little for each of three members, however busy the machine is."""
AFTER = 3
"""Rounds in which they would own parts if it were enough to have been there."""


def test_twenty_idle_identities_own_and_decide_nothing(swarm: Swarm) -> None:
    host = swarm.host(run_toml(tokens=ROUND_TOKENS, max_s=60.0, patience_s=8.0))
    honest = swarm.members(host.invite, "a", "b", "c")
    wait_for_credit(host, honest)
    trusted = {member.peer for member in honest}
    many = swarm.member(host.invite, "many", MANY)

    def done() -> list[Verdict]:
        return [one.verdict for one in host.journal_events() if isinstance(one, VerdictGiven)]

    def proven() -> list[str]:
        rounds = Counter(member.peer for one in done() if one.committed and one.plan for member in one.plan.members)
        return [peer for peer, count in rounds.items() if peer not in trusted and count >= CREDIT_ROUNDS]

    eventually(
        "most of them have been in eight rounds", lambda: len(proven()) >= IDENTITIES // 2, 3 * ROUNDS_S, host.tail
    )
    before = len(done())
    eventually("some rounds more", lambda: len(done()) >= before + AFTER, 3 * ROUNDS_S, host.tail)
    rounds = done()[before:]
    plans = [one.plan for one in rounds if one.plan is not None]
    owners = {plan.members[part.owner].peer for plan in plans for part in plan.parts}
    tokens = Counter[str]()
    for plan in plans:
        tokens.update({member.peer: member.weight_tokens for member in plan.members})
    work = sum(count for peer, count in tokens.items() if peer not in trusted) / tokens.total()
    print(f"{len(proven())} identities with {work:.1%} of the work; {len(owners - trusted)} of {len(owners)} owners")
    assert owners <= trusted
    assert all(one.committed for one in rounds)
    assert all(trusted <= {member.peer for member in plan.members} for plan in plans)
    many.interrupt()
    finish(host, honest)
