"""An owner that makes its means up is expelled by evidence, and by nothing else."""

import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S
from tests.integration.harness import ROUNDS_S, SHOAL, Host, Swarm, check_journal, eventually, finish, run_toml

from shoal.swarm.coordinator.events import MeanDisproved, MemberExpelled, VerdictGiven, WentBack
from shoal.swarm.coordinator.local_journal import evidence_path

pytestmark = pytest.mark.integration

FORGING = (sys.executable, str(Path(__file__).parent / "forging_member.py"))
LYING = (sys.executable, str(Path(__file__).parent / "lying_owner.py"))


def expelled(host: Host) -> list[MemberExpelled]:
    return [one for one in host.journal_events() if isinstance(one, MemberExpelled)]


def test_a_lying_owner_is_expelled_and_its_mean_undone(swarm: Swarm) -> None:
    """It sends the opposite of its means: far more than its own work could have moved them."""
    host = swarm.host(run_toml(max_s=ROUND_S) + "[audit]\nshare = 1.0\n")
    honest = swarm.members(host.invite, "a", "b")
    for member in honest:  # there is a state before the wrong one, and nobody has credit yet
        member.committed(after=1)
    liar = swarm.member(host.invite, "liar", LYING)
    found = eventually("it is expelled", lambda: expelled(host) or None, ROUNDS_S, swarm.tails)
    assert [one.peer for one in found] == [liar.peer]
    assert liar.exit_code(ROUNDS_S) == 54

    def undone() -> list[WentBack] | None:
        ends = [one.went_back for one in host.journal_events() if isinstance(one, VerdictGiven)]
        return [one for one in ends if one is not None] or None

    (back,) = eventually("the run goes back behind it", undone, ROUNDS_S, swarm.tails)
    wrong = [one for one in host.journal_events() if isinstance(one, MeanDisproved)]
    assert back.evidence in [one.evidence for one in wrong]
    assert {one.maker for one in wrong} == {liar.peer}
    last = max(one.last_round() for one in honest)
    for member in honest:
        member.committed(after=last)
    for member in honest:
        member.interrupt()
    for member in honest:
        member.has_left()
    host.stop()
    check_journal(host)
    states = [
        {one["round"]: one["digest"] for one in member.all_events() if one["event"] == "committed"} for member in honest
    ]
    both = states[0].keys() & states[1].keys()
    assert max(both) > last
    assert all(states[0][number] == states[1][number] for number in both), "by round, as versions were made again"
    assert evidence_path(host.state, found[0].evidence.hex()).exists()
    log = swarm.command("log", *SHOAL, "log", str(host.state), "--audit", "--check")
    assert log.exit_code(ROUNDS_S) == 0, log.tail()
    assert "guilty" in log.text()


@pytest.mark.parametrize("kind", ["honest", "forged"])
def test_evidence_that_proves_nothing_expels_nobody(swarm: Swarm, kind: str) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S) + "[audit]\nshare = 1.0\n")
    forger = swarm.member(host.invite, "forger", (*FORGING, kind))
    honest = swarm.members(host.invite, "a", "b")
    forger.says("the coordinator finds by evidence")
    judged = forger.committed(forger.last_round())
    for member in honest:
        member.committed(judged["round"] + 2)
    assert "is not the mean of what it says it includes" not in "".join(member.text() for member in honest)
    assert expelled(host) == []
    finish(host, [forger, *honest])
