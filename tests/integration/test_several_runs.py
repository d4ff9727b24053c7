"""Two runs on one port: members in both, and one whose journal is damaged."""

from pathlib import Path

import pytest
from tests.integration.harness import (
    CALM,
    LEAVE_S,
    LOOPBACK,
    ROUNDS_S,
    SHOAL,
    START_S,
    Member,
    Process,
    Swarm,
    eventually,
    run_toml,
)

from shoal.swarm.coordinator.local_journal import JOURNAL
from shoal.swarm.protocol.invite import Invite

pytestmark = pytest.mark.integration

NAMES = ("reef", "kelp")
SLOW = (*CALM[:-1], "0.2")


class Runs:
    """A host of both runs."""

    def __init__(self, swarm: Swarm) -> None:
        files = []
        for name in NAMES:
            files.append(swarm.folder / f"{name}.toml")
            files[-1].write_text(run_toml(name=name))
        self.state = swarm.folder / "state"
        options = ("--bind", LOOPBACK, "--state", str(self.state), "--no-pins", "--no-supervisor", "--no-relay")
        self.process: Process = swarm.command("host", *SHOAL, "host", *map(str, files), *options)

    def folder(self, name: str) -> Path:
        return self.state / name

    def invite(self, name: str) -> str:
        self.process.says(f"shoal join 'shoal://127.0.0.1:{self.port(name)}/{name}", START_S)
        return (self.folder(name) / "invite.txt").read_text().strip()

    def port(self, name: str) -> int:
        path = self.folder(name) / "port.txt"
        return eventually(f"{name} has a port", lambda: int(path.read_text()) if path.exists() else None, START_S)


@pytest.mark.slow
def test_two_runs_share_a_port_and_nothing_else(swarm: Swarm) -> None:
    runs = Runs(swarm)
    invites = {name: runs.invite(name) for name in NAMES}
    parts = [Invite.parse(invite) for invite in invites.values()]
    assert parts[0].addresses == parts[1].addresses
    assert parts[0].key == parts[1].key
    assert (runs.folder("reef") / "identity").read_bytes() != (runs.folder("kelp") / "identity").read_bytes()
    members: dict[str, Member] = {name: swarm.member(invites[name], f"in-{name}", SLOW) for name in NAMES}
    for name, member in members.items():
        assert member.event("joined", START_S)["run"] == name
    rounds = {name: member.committed(within_s=ROUNDS_S)["round"] for name, member in members.items()}
    for name in NAMES:
        listing = swarm.command(f"list-{name}", *SHOAL, "members", str(runs.folder(name)), "--json")
        assert listing.exit_code(LEAVE_S) == 0, listing.tail()
        assert members[name].peer in listing.text()
        assert members[next(other for other in NAMES if other != name)].peer not in listing.text()

    # The disk of one run is damaged: after a restart of the host the other one goes on.
    runs.process.kill()
    path = runs.folder("reef") / JOURNAL
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))
    runs.process.start()
    runs.process.says("the run reef cannot go on", START_S)  # said once: a person has to mend it
    members["kelp"].committed(after=rounds["kelp"] + 1, within_s=ROUNDS_S)
    assert members["reef"].running
    assert members["kelp"].leave()
    runs.process.interrupt()
    assert runs.process.exit_code(LEAVE_S) == 0, runs.process.tail()
