"""Owners that make their means up, and row reducers their sums, are expelled by evidence, and by nothing else."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S
from tests.integration.harness import ROUNDS_S, SHOAL, Host, Member, Swarm, check_journal, eventually, finish, run_toml

from shoal.swarm.coordinator.events import MeanDisproved, MemberExpelled, VerdictGiven, WentBack
from shoal.swarm.coordinator.local_journal import evidence_path
from shoal.swarm.protocol.evidence import unpack_evidence

pytestmark = pytest.mark.integration

FORGING = (sys.executable, str(Path(__file__).parent / "forging_member.py"))
LYING = (sys.executable, str(Path(__file__).parent / "lying_owner.py"))
LYING_IN_ROWS = (sys.executable, str(Path(__file__).parent / "lying_row_reducer.py"))


def expelled(host: Host) -> list[MemberExpelled]:
    return [one for one in host.journal_events() if isinstance(one, MemberExpelled)]


def undone(host: Host) -> list[WentBack]:
    ends = [one.went_back for one in host.journal_events() if isinstance(one, VerdictGiven)]
    return [one for one in ends if one is not None]


def go_on_and_end(host: Host, members: Sequence[Member]) -> None:
    """After rounds were undone, the members go on with the same states."""
    last = max(one.last_round() for one in members)
    for member in members:
        member.committed(after=last)
    for member in members:
        member.interrupt()
    for member in members:
        member.has_left()
    host.stop()
    check_journal(host)
    states = [
        {one["round"]: one["digest"] for one in member.all_events() if one["event"] == "committed"}
        for member in members
    ]
    shared = set.intersection(*(set(one) for one in states))
    assert max(shared) > last
    for number in shared:  # by round, as versions were made again
        assert len({one[number] for one in states}) == 1


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

    (back,) = eventually("the run goes back behind it", lambda: undone(host) or None, ROUNDS_S, swarm.tails)
    wrong = [one for one in host.journal_events() if isinstance(one, MeanDisproved)]
    assert back.evidence in [one.evidence for one in wrong]
    assert {one.maker for one in wrong} == {liar.peer}
    go_on_and_end(host, honest)
    assert evidence_path(host.state, found[0].evidence.hex()).exists()
    log = swarm.command("log", *SHOAL, "log", str(host.state), "--audit", "--check")
    assert log.exit_code(ROUNDS_S) == 0, log.tail()
    assert "guilty" in log.text()


@pytest.mark.slow
def test_a_lying_owner_of_masked_sums_is_expelled(swarm: Swarm) -> None:
    """By evidence that shows no single contribution; the others go on without it."""
    secure = 'averaging.secure = true\naveraging.robust = "none"\n'
    # Parts go to the fastest of those with credit: that is the liar, from the start. Evidence is larger than a frame.
    host = swarm.host(secure + run_toml(max_s=ROUND_S, width=64) + "[audit]\nshare = 1.0\n")
    liar = swarm.member(host.invite, "liar", LYING)
    honest = [swarm.member(host.invite, label, extra=("--max-upload", "20Mbit")) for label in "abcd"]
    found = eventually("it is expelled", lambda: expelled(host) or None, ROUNDS_S, swarm.tails)
    assert [one.peer for one in found] == [liar.peer]
    assert liar.exit_code(ROUNDS_S) == 54
    evidence = unpack_evidence(evidence_path(host.state, found[0].evidence.hex()).read_bytes())
    assert evidence.opening
    assert evidence.verdict.signed_sets is not None
    go_on_and_end(host, honest)
    log = swarm.command("log", *SHOAL, "log", str(host.state), "--audit", "--check")
    assert log.exit_code(ROUNDS_S) == 0, log.tail()
    assert "guilty" in log.text()


@pytest.mark.slow
def test_a_lying_row_reducer_is_expelled_and_the_owners_that_included_its_sums_are_not(swarm: Swarm) -> None:
    """Four members in two rows: the means are right, as their owners were given these partial sums."""
    host = swarm.host("averaging.group_size = 2\n" + run_toml(max_s=ROUND_S) + "[audit]\nshare = 1.0\n")
    honest = swarm.members(host.invite, "a", "b", "c")
    for member in honest:  # there is a state before the wrong one, and nobody has credit yet
        member.committed(after=1)
    liar = swarm.member(host.invite, "liar", LYING_IN_ROWS)
    found = eventually("it is expelled", lambda: expelled(host) or None, ROUNDS_S, swarm.tails)
    assert [one.peer for one in found] == [liar.peer]
    evidence = unpack_evidence(evidence_path(host.state, found[0].evidence.hex()).read_bytes())
    assert evidence.row is not None
    assert liar.exit_code(ROUNDS_S) == 54
    eventually("the run goes back behind it", lambda: undone(host), ROUNDS_S, swarm.tails)
    go_on_and_end(host, honest)
    assert {one.peer for one in expelled(host)} == {liar.peer}


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
