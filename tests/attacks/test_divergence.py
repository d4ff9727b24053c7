"""A member makes the anchor bad: the run goes back, without it, and ends for nobody. Without the bound on influence, as
with it nobody gets so far."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tests.integration.harness import LEAVE_S, ROUNDS_S, Member, Swarm, check_journal, run_toml

from shoal.swarm.errors import Diverged

pytestmark = pytest.mark.integration

POISONOUS = (sys.executable, str(Path(__file__).with_name("poison_member.py")), "1e30")
FAULTY = (sys.executable, str(Path(__file__).with_name("poison_member.py")), "nan")
UNBOUNDED = 'averaging.robust = "none"\n'


def agree(members: list[Member]) -> None:
    """Check that all have the same anchor after each round. Versions come twice here, rounds do not."""
    digests: defaultdict[int, set[str]] = defaultdict(set)
    for member in members:
        for event in member.all_events():
            if event["event"] == "committed":
                digests[event["round"]].add(event["digest"])
    assert digests
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}


def test_a_poisoned_anchor_is_gone_back_behind_without_who_poisoned_it(swarm: Swarm) -> None:
    host = swarm.host(UNBOUNDED + run_toml(max_s=1.5))
    honest = swarm.members(host.invite, "a", "b", "c")
    for member in honest:
        member.committed(after=1)
    attacker = swarm.member(host.invite, "liar", POISONOUS)
    went = host.event("went_back", ROUNDS_S)
    assert attacker.peer in went["suspects"]
    assert len(went["suspects"]) <= 2, "at most one besides, that has no credit yet while others have"
    assert 0 < went["anchor_version"] < went["from_version"], "to a state that was kept"
    for member in honest:
        member.committed(after=went["round"] + 3)
    planned = [one for one in host.events("round_planned") if one["round"] > went["round"]]
    assert all(attacker.peer not in one["members"] for one in planned[:8])
    assert len(host.events("went_back")) == 1
    for member in [*honest, attacker]:
        member.interrupt()
    for member in honest:
        assert member.has_left()["digest"] is not None
    attacker.exit_code(LEAVE_S)
    host.stop()
    agree(honest)
    losses = [one.verdict.loss for one in check_journal(host) if one.verdict.loss is not None]
    assert losses[-1] < losses[0], "it has learnt something all the same"


def test_a_machine_that_is_at_fault_leaves_and_nobody_goes_back(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=1.5))
    honest = swarm.members(host.invite, "a", "b")
    for member in honest:
        member.committed(after=0)
    faulty = swarm.member(host.invite, "faulty", FAULTY)
    assert faulty.exit_code(ROUNDS_S) == Diverged.exit_code, faulty.tail()
    lost = host.event("member_lost", LEAVE_S, peer=faulty.peer, reason="diverged")
    assert "this machine is at fault" in lost["trouble"]
    assert host.events("went_back") == []
    last = max(member.last_round() for member in honest)
    for member in honest:
        member.committed(after=last)
        member.interrupt()
    for member in honest:
        member.has_left()
    host.stop()
    agree(honest)
