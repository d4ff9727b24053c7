"""Hosts that share a journal: the one that leads is killed and stopped, and another one ends its round."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.engines import etcd_cluster
from tests.integration.harness import ROUNDS_S, START_S, Swarm, run_toml
from tests.integration.shared_hosts import LEASE_S, check, leave, shared_hosts

from shoal.swarm.errors import LeaseLost

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster.url()


def test_a_leader_is_killed_and_the_next_one_stopped(swarm: Swarm, etcd: str) -> None:
    """SIGKILL, then SIGSTOP of who leads: another host ends the round; who wakes up says nothing, and ends."""
    one, two = shared_hosts(swarm, run_toml(), etcd, ["one", "two"])
    members = swarm.members(one.invite(addresses=2), "a", "b")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    newest = max(member.last_round() for member in members)
    one.kill()
    two.leads(within_s=10 * LEASE_S)
    for member in members:
        member.committed(after=newest)
    one.start()
    one.stands_by()
    newest = max(member.last_round() for member in members)
    two.send(signal.SIGSTOP)
    one.leads(within_s=10 * LEASE_S)
    for member in members:
        member.committed(after=newest + 1)
    two.send(signal.SIGCONT)
    assert two.exit_code(START_S) == LeaseLost.exit_code, two.tail()
    newest = max(member.last_round() for member in members)
    for member in members:
        member.committed(after=newest)
    leave([one], members)
    verdicts = check(swarm, one, members)
    assert sum(event.verdict.committed for event in verdicts) >= 4
