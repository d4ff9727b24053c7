"""Strangers that flood a port cost its members no memory, descriptors or rounds."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.harness import HERE, ROUNDS_S, SHOAL, START_S, Host, Member, Process, Swarm, finish, run_toml

from shoal.swarm.coordinator.events import MemberJoined
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.types import RosterEntry
from shoal.swarm.transport.limits.caller_limits import STRANGER_S

pytestmark = pytest.mark.integration

ATTACKER = (sys.executable, str(Path(__file__).with_name("flooding_stranger.py")))
STRANGERS = 8
FLOOD_S = 6.0
"""At least; it goes on until all that has to happen meanwhile has happened."""

GROWTH_BYTES = 100 * 2**20
ADMITTED_S = 10.0
FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")


class Growth:
    """Watches a process's memory for its largest growth."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._before_bytes = self._most_bytes = self._now_bytes()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _now_bytes(self) -> int:
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * 4096

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            with suppress(FileNotFoundError):  # it has ended
                self._most_bytes = max(self._most_bytes, self._now_bytes())

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._most_bytes - self._before_bytes


def entry_of(host: Host, member: Member) -> RosterEntry:
    peer = member.peer
    return next(
        event.entry for event in host.journal_events() if isinstance(event, MemberJoined) and event.entry.peer == peer
    )


def attack(
    swarm: Swarm,
    kind: str,
    at: Host | RosterEntry,
    count: int = STRANGERS,
    seconds: float = 300.0,
    data: bool = False,
) -> Process:
    """Start an attacker, and return once it has begun."""
    if isinstance(at, RosterEntry):
        where, key = at.address, at.certificate.curve_key
    else:
        invite = Invite.parse(at.invite)
        where, key = invite.addresses[0], invite.key
    port = where.data_port if data else where.control_port
    label = f"{kind}-{len(swarm.processes)}"
    command = (*ATTACKER, kind, where.host, str(port), key.hex(), str(count), str(seconds))
    attacker = swarm.command(label, *command)
    attacker.says("begins", START_S)
    return attacker


def arrived(attacker: Process) -> bool:
    """Whether the flood has reached the victim, which has answered some of its connections."""
    said = [json.loads(line) for line in attacker.text().splitlines() if line.startswith('{"made"')]
    return any(one["reached"] > 0 for one in said)


def admitted_in_s(swarm: Swarm, host: Host, label: str) -> float:
    """Return the seconds until a newcomer is admitted, without the start of its process."""
    command = (sys.executable, str(HERE / "strangers.py"), str(swarm.folder / label), host.invite)
    (swarm.folder / label).mkdir()
    newcomer = swarm.command(label, *command)
    assert newcomer.exit_code(START_S) == 0, newcomer.tail()
    (said,) = [json.loads(line) for line in newcomer.text().splitlines() if line.startswith("{")]
    assert said["error"] is None, said
    return float(said["seconds"])


@contextmanager
def unharmed(swarm: Swarm, host: Host, members: list[Member], victim: Process) -> Iterator[None]:
    """Check during an attack that rounds commit, memory stays, and a newcomer is admitted in time."""
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    growth, last, began_s = Growth(victim.pid), members[0].last_round(), time.monotonic()
    yield
    attacker = swarm.processes[-1]
    assert admitted_in_s(swarm, host, "newcomer") < ADMITTED_S
    for member in members:
        member.committed(after=last + 1)
    time.sleep(max(0.0, began_s + FLOOD_S - time.monotonic()))
    assert attacker.running, attacker.tail()
    assert arrived(attacker), attacker.tail()
    attacker.kill()
    grown = growth.end()
    assert grown < GROWTH_BYTES, f"{victim.label} grew by {grown / 2**20:.0f} MB"
    for member in members:
        member.committed(after=member.last_round())
    verdicts = finish(host, members)
    assert all(one.verdict.committed for one in verdicts)


@pytest.mark.parametrize("kind", ["messages", "frames", "parts", "small"])
def test_messages_for_the_host(swarm: Swarm, kind: str) -> None:
    host = swarm.host(run_toml())
    with unharmed(swarm, host, swarm.members(host.invite, "ann", "bob"), host):
        attack(swarm, kind, host)


def test_messages_for_a_volunteer(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "ann", "bob")
    with unharmed(swarm, host, members, members[0]):
        attack(swarm, "messages", entry_of(host, members[0]))


@pytest.mark.parametrize("kind", ["connections", "slow"])
def test_connections_to_the_host(swarm: Swarm, kind: str) -> None:
    host = swarm.host(run_toml(), launcher=(*FEW_DESCRIPTORS, *SHOAL))
    with unharmed(swarm, host, swarm.members(host.invite, "ann", "bob"), host):
        attack(swarm, kind, host, 2000)


@pytest.mark.parametrize("data", [False, True])
def test_connections_to_a_volunteer(swarm: Swarm, data: bool) -> None:
    host = swarm.host(run_toml())
    members = [swarm.member(host.invite, "ann", (*FEW_DESCRIPTORS, *SHOAL)), *swarm.members(host.invite, "bob")]
    with unharmed(swarm, host, members, members[0]):
        attack(swarm, "connections", entry_of(host, members[0]), 2000, data=data)


def test_who_says_nothing_is_hung_up_on(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    member = swarm.member(host.invite, "ann")
    member.committed(within_s=START_S + ROUNDS_S)
    idle = attack(swarm, "idle", host, 5, 20.0)
    assert idle.exit_code(60.0) == 0, idle.tail()
    lasted_s = json.loads(idle.text().splitlines()[-1])["lasted_s"]
    assert len(lasted_s) == 5
    assert all(0.8 * STRANGER_S < one < 1.3 * STRANGER_S for one in lasted_s), lasted_s
    finish(host, [member])
