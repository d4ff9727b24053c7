"""When a host is started again, and when not any more."""

import subprocess
import sys

from shoal.peer.cli.supervisor import Restarts


def test_pauses_grow_until_it_is_given_up() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(1000.0 + number) for number in range(11)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, None]


def test_a_host_that_dies_now_and_then_is_always_started_again() -> None:
    restarts = Restarts(most=2, within_s=100.0, first_pause_s=0.5)
    assert [restarts.pause_s(60.0 * number) for number in range(50)] == [0.5] + 49 * [1.0]


def test_a_supervisor_needs_no_torch() -> None:
    program = "import sys, shoal.peer.cli.command, shoal.peer.cli.supervisor; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
