"""Real members that refuse every incoming connection, and a host without an open port: they meet over a relay."""

import json
import socket

import pytest
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Member, Process, Swarm, eventually, finish, run_toml

from shoal.swarm.coordinator.events import RoundPlanned
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


def test_a_member_passes_on_for_those_that_nobody_can_dial(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), extra=("--no-relay",))
    public = swarm.member(host.invite, "public", extra=("--relay-for-others", "50Mbit", "--max-upload", "60Mbit"))
    public.says("relay for others is offered to the run: 30 Mbit/s", START_S)
    members = walled(swarm, host.invite, "a", "b")
    for member in members:
        member.says("over the relay", START_S)
    for member in (public, *members):
        member.committed(after=1)

    def carried() -> bool:
        asking = swarm.command("status", *SHOAL, "status", host.invite, "--json")
        assert asking.exit_code(START_S) == 0
        (relay,) = json.loads(asking.text())["relays"]
        assert relay["peer"] == public.peer
        return bool(relay["load"]["carried_bytes"] > 0 and relay["load"]["clients"] == 2)

    eventually("the status says what the relay carries", carried, 2 * ROUNDS_S, swarm.tails)
    finish(host, [public, *members])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_the_relay_is_killed_in_mid_round(swarm: Swarm, number: int) -> None:
    """Another one takes over; where there is none, the run goes on when it is back."""
    relays = []
    for name in ("first", "second")[:number]:
        place = ("--bind", f"127.0.0.1:{free_port()}", "--identity", str(swarm.folder / f"{name}-key"))
        relays.append(swarm.command(name, *SHOAL, "relay", *place))
    via = [word for relay in relays for word in ("--via", relay_url(relay))]
    host = swarm.host(run_toml(), extra=via)
    members = walled(swarm, host.invite, "a", "b")
    for member in members:
        member.says(" and " if number > 1 else "over the relay", START_S)
        member.committed(after=0, within_s=START_S + ROUNDS_S)
    pids = [member.pid for member in members]

    def plans() -> int:
        return sum(isinstance(one, RoundPlanned) for one in host.journal_events())

    before = plans()
    eventually("the next round is planned", lambda: plans() > before, ROUNDS_S, swarm.tails)
    relays[0].kill()
    last = max(member.last_round() for member in members)
    if number == 1:
        relays[0].start()
    for member in members:
        member.committed(after=last + 2, within_s=2 * ROUNDS_S)
    assert [member.pid for member in members] == pids
    finish(host, members)
