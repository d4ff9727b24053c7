"""Members that reduce nothing, and members that only follow."""

import pytest
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Swarm, check_journal, check_parity, held, run_toml

pytestmark = pytest.mark.integration


def test_a_contributor_reduces_nothing_and_a_follower_follows(swarm: Swarm) -> None:
    rounds = 3
    host = swarm.host(run_toml(rounds=rounds, tokens=6_000, max_s=60))
    gate = swarm.folder / "gate"
    gate.touch()
    full = swarm.member(host.invite, "full", held(gate))
    giver = swarm.member(host.invite, "giver", held(gate), extra=["--role", "contributor"])
    watcher = swarm.member(host.invite, "watcher", SHOAL, extra=["--role", "follower"])
    for member in (full, giver, watcher):
        member.event("synced", START_S)
    for member in (full, giver):
        member.says("waits at the gate", START_S)
    gate.unlink()
    for member in (full, giver, watcher):
        assert member.exit_code(ROUNDS_S) == 0, member.tail()
    host.stop()
    digests = check_parity(host, [full, giver, watcher])
    plans = [one.verdict.plan for one in check_journal(host) if one.verdict.committed and one.verdict.plan]
    contributors = {member.peer for plan in plans for member in plan.members}
    owners = {plan.members[part.owner].peer for plan in plans for part in plan.parts if len(plan.members) > 1}
    stand_ins = {plan.members[one].peer for plan in plans for part in plan.parts for one in part.stand_ins}
    ids = {one.label: one.events("joined")[0]["peer"] for one in (full, giver)}
    assert contributors == {ids["full"], ids["giver"]}
    assert owners == {ids["full"]}
    assert ids["giver"] not in stand_ins
    left = watcher.events("left")[-1]
    assert (left["digest"], left["tokens_trained"]) == (digests[rounds], 0)
