"""The coordinator is killed in a round and started elsewhere from its files: the invite's second address finds it."""

import shutil
import socket

import pytest
from tests.integration.harness import (
    DOOMED_HOST,
    KILLED,
    ROUNDS_S,
    START_S,
    Swarm,
    finish,
    run_toml,
)

pytestmark = pytest.mark.integration


def free_ports() -> tuple[int, int]:
    """Two that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@pytest.mark.parametrize(("when", "fact"), [("after", "RoundPlanned"), ("before", "VerdictGiven")])
def test_the_round_goes_on_at_the_second_address(swarm: Swarm, when: str, fact: str) -> None:
    here, there = free_ports()
    both = ("--advertise", f"127.0.0.1:{here},127.0.0.1:{there}")
    host = swarm.host(run_toml(), launcher=(*DOOMED_HOST, when, fact, "2"), bind=f"127.0.0.1:{here}", extra=both)
    assert f"127.0.0.1:{here},127.0.0.1:{there}/" in host.invite
    members = swarm.members(host.invite, "a", "b")
    pids = [member.pid for member in members]
    assert host.exit_code(START_S + ROUNDS_S) == KILLED, host.tail()
    ended = max(member.last_round() for member in members)

    elsewhere = swarm.folder / "elsewhere"
    shutil.copytree(host.state.parent, elsewhere / "state")
    shutil.copy(host.state.parent.parent / "identity", elsewhere / "identity")
    moved = swarm.host(run_toml(), label="elsewhere", bind=f"127.0.0.1:{there}", extra=both)
    assert moved.invite == host.invite
    for member in members:
        member.committed(after=ended + 1)
    assert [member.pid for member in members] == pids
    # Who comes now finds it too, though nobody is at the first address any more.
    late = swarm.member(host.invite, "late")
    late.committed(within_s=START_S + ROUNDS_S)
    verdicts = finish(moved, [*members, late])
    assert verdicts[ended + 1].verdict.committed, "the round that was under way ended there"
    for member in members:
        assert member.events("resync") == [], "the move cost nobody its work"
