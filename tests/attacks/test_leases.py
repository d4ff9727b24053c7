"""A member that does no work, and so is always the fastest, gets no more than a newcomer's share of the samples."""

import itertools
import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S, wait_for_records, wait_for_rounds
from tests.integration.harness import Swarm, finish, run_toml

from shoal.swarm.coordinator.events import LeaseGranted, VerdictGiven
from shoal.swarm.coordinator.trust import NEWCOMERS_SHARE
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.sample_ranges import count, from_wire

pytestmark = pytest.mark.integration

IDLE = (sys.executable, str(Path(__file__).parent / "idle_member.py"))
ROUNDS = 4
CONTEXT = 32
"""Tokens a sample of ``run_toml``'s model."""


def tokens_of(verdict: Verdict, peer: str) -> int:
    """Return the tokens of this peer's work in a committed round."""
    members = verdict.plan.members if verdict.plan else ()
    return sum(member.weight_tokens for member in members if member.peer == peer)


def test_who_does_no_work_gets_a_newcomers_share(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S))
    honest = swarm.members(host.invite, "a", "b")
    wait_for_records(host, honest)
    idle = swarm.member(host.invite, "idle", IDLE)
    rounds = wait_for_rounds(host, idle, ROUNDS)
    verdicts = [one.verdict for one in host.journal_events() if isinstance(one, VerdictGiven)]
    first, last = rounds[0].round, rounds[-1].round
    # Its share is of what the others usually do, which is more than they do in a round in which the machine is busy.
    usual_tps = max(
        (one.tokens - tokens_of(one, idle.peer)) / (one.ended_s - before.ended_s)
        for before, one in itertools.pairwise(verdicts)
        if one.committed
    )
    most_tps = 2 * NEWCOMERS_SHARE / (1 - NEWCOMERS_SHARE) * usual_tps
    began_s = verdicts[first - 2].ended_s  # its leases were given while this round or the one before was open
    seconds = verdicts[last].ended_s - began_s
    leased = sum(
        CONTEXT * count(from_wire(one.ranges))
        for one in host.journal_events()
        if isinstance(one, LeaseGranted) and one.peer == idle.peer and first <= one.round <= last
    )
    committed = sum(tokens_of(one, idle.peer) for one in rounds)
    print(f"{committed / seconds:.0f} and {leased / seconds:.0f} of at most {most_tps:.0f} tokens a second")
    assert committed < most_tps * seconds
    assert leased < most_tps * seconds
    finish(host, [*honest, idle])
