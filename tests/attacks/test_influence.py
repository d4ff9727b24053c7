"""A member with little weight sends contributions, or means, that are no work: the run goes on converging."""

import sys
from pathlib import Path

import pytest
from tests.integration.harness import ROUNDS_S, Member, Swarm, eventually, finish, run_toml

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.protocol.rounds import RoundPlan

pytestmark = pytest.mark.integration

LIAR = Path(__file__).with_name("influence_member.py")
ATTACKED = 4
"""Committed rounds whose plan has the liar, until the run is stopped."""


def attacked(swarm: Swarm, lie: str) -> tuple[list[tuple[RoundPlan, VerdictGiven]], str, list[Member]]:
    """Two honest members, and from their first round on a liar. They go on, and come to the same anchors, whose loss
    falls as without it. Returns the rounds with the liar, its peer, and the honest members."""
    # Rounds end by tokens: the loss falls as much in each, and nobody has credit soon, however busy the machine is.
    host = swarm.host(run_toml(tokens=12_000, max_s=60))
    fair = swarm.members(host.invite, "a", "b")
    for member in fair:
        member.committed()
    liar = swarm.member(host.invite, "liar", [sys.executable, str(LIAR), lie])
    peer = liar.peer

    def with_liar() -> list[tuple[RoundPlan, VerdictGiven]]:
        assert all(member.running for member in fair), "nobody honest ends"
        given = [one for one in host.journal_events() if isinstance(one, VerdictGiven) and one.verdict.committed]
        planned = [(one.verdict.plan, one) for one in given if one.verdict.plan is not None]
        return [(plan, one) for plan, one in planned if peer in [member.peer for member in plan.members]]

    eventually("rounds with the liar", lambda: len(with_liar()) >= ATTACKED, ROUNDS_S, swarm.tails)
    found = with_liar()
    fair[0].committed(after=found[-1][1].verdict.round)
    liar.kill()
    verdicts = [one.verdict for one in finish(host, fair)]
    losses = [one.loss for one in verdicts if one.committed and one.loss is not None]
    assert losses[-1] < losses[0] - 0.1, losses
    assert max(losses) == losses[0], losses
    for plan, _ in found:
        weights = {member.peer: member.weight_tokens for member in plan.members}
        assert weights[peer] < 0.2 * sum(weights.values())
    return found, peer, fair


@pytest.mark.parametrize("lie", ["huge", "random"])
def test_contributions_above_their_claim_change_nothing(swarm: Swarm, lie: str) -> None:
    attacked(swarm, lie)


@pytest.mark.parametrize("lie", ["huge claimed", "random claimed"])
def test_contributions_that_claim_much_are_cut(swarm: Swarm, lie: str) -> None:
    attacked(swarm, lie)


def test_means_above_the_bound_are_made_by_others(swarm: Swarm) -> None:
    rounds, liar, fair = attacked(swarm, "mean")
    owned = [given for plan, given in rounds if liar in {plan.members[part.owner].peer for part in plan.parts}]
    assert owned, "the liar owned a part"
    assert all(None not in given.verdict.digests for given in owned)
    assert liar in owned[0].failed
    assert any("by the plan it is up to" in member.text() for member in fair)
