"""Strangers who fill a receive queue and then reset the connection end no process.

libzmq ends it otherwise (``Assertion failed: !_io_error``): when it has stopped reading at a high-water mark, the other
side resets, and it then answers a PING that had come before, or one of its own heartbeats falls due.
"""

import sys
from pathlib import Path

import pytest
from tests.integration.harness import ROUNDS_S, START_S, Swarm, finish, run_toml

pytestmark = pytest.mark.integration

CALLER = (sys.executable, str(Path(__file__).parent / "resetting_caller.py"))
TIMES = {"ping": 20, "full": 2}


@pytest.mark.parametrize("how", ["ping", "full"])
def test_who_fills_a_queue_and_resets_ends_nobody(swarm: Swarm, how: str) -> None:
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    for whom in ("host", "a"):
        caller = swarm.command(f"caller-{whom}", *CALLER, host.invite, whom, how, str(TIMES[how]))
        assert caller.exit_code(START_S) == 0, caller.tail()
        assert "attacked" in caller.text(), caller.tail()
        assert host.running, host.tail()
        assert all(member.running for member in members), swarm.tails()
    for member in members:
        member.committed(after=max(one.last_round() for one in members) + 1)
    finish(host, members)
    assert not any("Assertion" in one.text() for one in (host, *members))
