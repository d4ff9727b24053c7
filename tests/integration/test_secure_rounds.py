"""Secure averaging among real processes: the same anchor everywhere, and a member that is killed."""

import pytest
from tests.integration.harness import ROUNDS_S, START_S, Swarm, finish, run_toml

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_five_members_average_in_secret_and_one_is_killed(swarm: Swarm) -> None:
    secure = 'averaging.secure = true\naveraging.robust = "none"\n[run]'
    host = swarm.host(run_toml().replace("[run]", secure, 1))
    members = swarm.members(host.invite, "a", "b", "c", "d", "e")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    members[4].kill()
    after = members[4].last_round() + 1
    for member in members[:4]:
        member.committed(after=after, within_s=2 * ROUNDS_S)
    verdicts = finish(host, members[:4])
    committed = [one.verdict for one in verdicts if one.verdict.committed]
    plans = [one.plan for one in committed if one.plan is not None]
    assert all(plan.secure is not None and not plan.parts[0].stand_ins for plan in plans)
    assert {len(plan.members) for plan in plans} <= {4, 5}
    assert len(plans[-1].members) == 4, "rounds are committed without the dead one"
    assert not any(member.events("resync") for member in members[:4])
