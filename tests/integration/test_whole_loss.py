"""All members and the coordinator are killed at once; the same commands again, and the run goes on."""

import pytest
from tests.integration.harness import DOOMED_HOST, KILLED, ROUNDS_S, SHOAL, START_S, Swarm, finish, run_toml

from shoal.swarm.coordinator.events import VerdictGiven

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("when", ["before", "after"])
def test_everybody_is_killed_at_the_verdict(swarm: Swarm, when: str) -> None:
    """``after``: the verdict is in the journal and nobody has heard of it, so nobody has the state that it made."""
    host = swarm.host(run_toml(), launcher=(*DOOMED_HOST, when, "VerdictGiven", "3"))
    members = swarm.members(host.invite, "a", "b", "c")
    assert host.exit_code(2 * START_S + ROUNDS_S) == KILLED, host.tail()
    for member in members:
        member.kill()
    events = [one for one in host.journal_events() if isinstance(one, VerdictGiven)]
    version, ended = events[-1].verdict.anchor_version, events[-1].verdict.round
    assert (ended == 2) == (when == "before")

    host.command = [*SHOAL, *host.command[host.command.index("host") :]]
    host.start()
    for member in members:
        member.start()
    for member in members:
        member.committed(after=ended + 1, within_s=START_S + ROUNDS_S)
    returns = host.events("went_back")
    if when == "after":
        (back,) = returns
        assert (back["from_version"], back["round"]) == (version, ended + 1)
        assert back["anchor_version"] < version
        assert sorted(back["keepers"]) <= sorted(member.peer for member in members)
        host.says(f"nobody holds anchor version {version} any more: back to version {back['anchor_version']} (")
        synced = members[0].event("synced")
        assert synced["anchor_version"] == back["anchor_version"]
        assert synced["digest"] == back["digest"]
    verdicts = finish(host, members)
    assert sum(one.went_back is not None for one in verdicts) == len(returns)
