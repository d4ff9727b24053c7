"""Hosts that share a journal: the one that leads is killed and stopped, and another one ends its round."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.engines import etcd_cluster
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Swarm, eventually, run_toml
from tests.integration.shared_hosts import LEASE_S, check, leave, shared_hosts
from tests.integration.test_relays import relay_url, walled

from shoal.swarm.errors import LeaseLost
from shoal.swarm.protocol.invite import Invite

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


def test_hosts_without_an_open_port_are_found_over_the_relays_of_each(swarm: Swarm, etcd: str) -> None:
    """The site of the leader is lost with its relay; members that nobody can dial find the next one over its own."""
    relays = [
        swarm.command(name, *SHOAL, "relay", "--bind", "127.0.0.1:0", "--identity", str(swarm.folder / f"{name}-key"))
        for name in ("relay-one", "relay-two")
    ]
    via = [("--via", relay_url(one)) for one in relays]
    one, two = shared_hosts(swarm, run_toml(), etcd, ["one", "two"], each=via)

    def both() -> Invite | None:
        found = Invite.parse(one.invite())
        return found if len(found.addresses) == 2 else None

    invite = eventually("an invite with both relays", both, START_S, one.tail)
    assert all(address.is_relayed for address in invite.addresses)
    members = walled(swarm, str(invite), "a", "b")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    newest = max(member.last_round() for member in members)
    one.kill()
    relays[0].kill()
    two.leads(within_s=10 * LEASE_S)
    for member in members:
        member.committed(after=newest + 1, within_s=2 * ROUNDS_S)
    leave([two], members)
    check(swarm, two, members)
