"""An owner that makes its means up is expelled by evidence, and by nothing else."""

import sys
from pathlib import Path

import pytest
from tests.attacks.trusted import ROUND_S
from tests.integration.harness import ROUNDS_S, SHOAL, Host, Swarm, eventually, finish, run_toml

from shoal.swarm.coordinator.events import MemberExpelled
from shoal.swarm.coordinator.local_journal import evidence_path

pytestmark = pytest.mark.integration

FORGING = (sys.executable, str(Path(__file__).parent / "forging_member.py"))
LYING = (sys.executable, str(Path(__file__).parent / "lying_owner.py"))


def expelled(host: Host) -> list[MemberExpelled]:
    return [one for one in host.journal_events() if isinstance(one, MemberExpelled)]


def test_a_lying_owner_is_expelled(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=ROUND_S) + "[audit]\nshare = 1.0\n")
    liar = swarm.member(host.invite, "liar", LYING)
    honest = swarm.members(host.invite, "a", "b")
    found = eventually("it is expelled", lambda: expelled(host) or None, ROUNDS_S, swarm.tails)
    assert [one.peer for one in found] == [liar.peer]
    assert liar.exit_code(ROUNDS_S) == 54
    finish(host, honest)
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
    assert "is not what it says it includes" not in "".join(member.text() for member in honest)
    assert expelled(host) == []
    finish(host, [forger, *honest])
