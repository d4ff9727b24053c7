"""Real members that refuse every incoming connection, and a host without an open port: they meet over a relay."""

import pytest
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Member, Process, Swarm, eventually, finish, run_toml

from shoal.swarm.protocol.invite import Invite

pytestmark = pytest.mark.integration

WALLED = ("--advertise", "127.0.0.1:9")
"""Nobody listens there, so the coordinator cannot dial the member, and nobody else tries."""


def walled(swarm: Swarm, invite: str, *labels: str) -> list[Member]:
    return [swarm.member(invite, label, extra=WALLED) for label in labels]


def test_members_that_nobody_can_dial_meet_over_the_relay_beside_the_host(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    members = walled(swarm, host.invite, "a", "b")
    for member in members:
        assert not member.event("joined", START_S)["reachable"]
        member.says("over the relay", START_S)
    for member in members:
        member.committed(after=1)
    finish(host, members)


def relay_url(process: Process) -> str:
    def look() -> str | None:
        found = [word.strip("'") for word in process.text().split() if word.startswith("'shoal-relay://")]
        assert found or process.running, process.tail()
        return found[0] if found else None

    return eventually("the relay says where it is", look, START_S, process.tail)


def test_a_host_and_members_behind_walls_meet_over_one_relay(swarm: Swarm) -> None:
    relay = swarm.command("relay", *SHOAL, "relay", "--bind", "127.0.0.1:0", "--identity", str(swarm.folder / "key"))
    host = swarm.host(run_toml(), extra=("--via", relay_url(relay)))
    invite = Invite.parse(host.invite)
    assert [address.is_relayed for address in invite.addresses] == [True]
    members = walled(swarm, host.invite, "a", "b")
    for member in members:
        member.committed(after=1, within_s=START_S + ROUNDS_S)
    finish(host, members)
    relay.interrupt()
    assert relay.exit_code(START_S) == 0
    assert "carried" in relay.text()


@pytest.mark.slow
def test_the_relay_is_killed_in_a_round_and_another_one_takes_over(swarm: Swarm) -> None:
    key = ("--bind", "127.0.0.1:0", "--identity")
    names = "first", "second"
    relays = [swarm.command(name, *SHOAL, "relay", *key, str(swarm.folder / f"{name}-key")) for name in names]
    via = [word for relay in relays for word in ("--via", relay_url(relay))]
    host = swarm.host(run_toml(), extra=via)
    members = walled(swarm, host.invite, "a", "b")
    for member in members:
        member.says(" and ", START_S)  # it is registered with both
        member.committed(after=0, within_s=START_S + ROUNDS_S)
    pids = [member.pid for member in members]
    relays[0].kill()
    last = max(member.last_round() for member in members)
    for member in members:
        member.committed(after=last + 2)
    assert [member.pid for member in members] == pids
    finish(host, members)
