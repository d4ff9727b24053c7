"""A host that dies is started again; one that people end leaves no process behind."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.integration.harness import (
    FRESH,
    HERE,
    LEAVE_S,
    ROUNDS_S,
    START_S,
    Host,
    Swarm,
    eventually,
    finish,
    run_toml,
)

from shoal.swarm.errors import HostCrashed, RunFileError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="children are looked up in /proc"),
]

IMPATIENT = ("env", sys.executable, str(HERE / "impatient_host.py"))


def child_of(host: Host, other_than: int = 0) -> int:
    """Return the pid of the process that the supervisor runs."""

    def look() -> int | None:
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        return next((int(one) for one in children if int(one) != other_than), None)

    return eventually("the host's process runs", look, START_S, host.tail)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_up_again(host: Host, times: int) -> None:
    eventually("it is up again", lambda: host.text().count("Invite") > times, START_S, host.tail)


def test_a_host_that_aborts_in_a_round_goes_on(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), launcher=FRESH, supervised=True)
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    pids = [member.pid for member in members]
    for times, number in enumerate((signal.SIGABRT, signal.SIGKILL), 1):
        before = max(member.last_round() for member in members)
        child = child_of(host)
        os.kill(child, number)
        is_up_again(host, times)
        assert f"The host was ended by {number.name}" in host.text()
        assert not is_running(child)
        for member in members:
            member.committed(after=before + 1)
    assert [member.pid for member in members] == pids
    assert (host.state / "invite.txt").read_text().strip() == host.invite
    finish(host, members)


def test_a_host_that_dies_again_and_again_is_given_up(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), launcher=(*IMPATIENT, "2", "0.05"), supervised=True)
    child = 0
    for _ in range(3):
        child = child_of(host, other_than=child)
        os.kill(child, signal.SIGABRT)
        eventually("it is gone", lambda child=child: not is_running(child), LEAVE_S)  # type: ignore[misc]
    assert host.exit_code(LEAVE_S) == HostCrashed.exit_code
    assert "HostCrashed: the host was ended by SIGABRT, and 2 times before that" in host.text()
    assert host.text().count("The host was ended by") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_ends_both(swarm: Swarm, number: signal.Signals) -> None:
    host = swarm.host(run_toml(), launcher=FRESH, supervised=True)
    child = child_of(host)
    host.send(number)
    assert host.exit_code(LEAVE_S) == 0, host.tail()
    assert not is_running(child)
    assert "ended by" not in host.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_between_two_starts_ends_it(swarm: Swarm, number: signal.Signals) -> None:
    host = swarm.host(run_toml(), launcher=(*IMPATIENT, "2", "20"), supervised=True)
    os.kill(child_of(host), signal.SIGABRT)
    host.says("it goes on from its journal in 20 s")
    host.send(number)
    assert host.exit_code(LEAVE_S) == 128 + number


def test_a_supervisor_that_is_killed_leaves_nothing_behind(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), launcher=FRESH, supervised=True)
    invite, child = host.invite, child_of(host)
    host.kill()
    eventually("its process ends", lambda: not is_running(child), LEAVE_S)
    host.start()
    assert host.invite == invite
    host.stop()


def test_an_error_is_no_reason_to_start_again(swarm: Swarm) -> None:
    path = swarm.run_file("nonsense = 1")
    failed = swarm.command("failed", *FRESH, "host", str(path))
    assert failed.exit_code(START_S) == RunFileError.exit_code
    assert failed.text().count("RunFileError") == 1
    assert "Traceback" not in failed.text()
