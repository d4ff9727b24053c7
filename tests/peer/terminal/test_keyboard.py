"""What a live view changes in the terminal, on a real pseudo-terminal."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("termios")

PROGRAM = """
import fcntl, os, termios
from shoal.peer.terminal.keyboard import restore_terminal, without_echoed_signals

def echoes():
    return bool(termios.tcgetattr(0)[3] & termios.ECHOCTL)

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
said = [echoes()]
with without_echoed_signals():
    said.append(echoes())
said.append(echoes())
with without_echoed_signals():
    restore_terminal()
    said.append(echoes())
os.write(2, repr(said).encode())
"""


def test_ctrl_c_is_not_echoed_into_a_live_view_and_is_afterwards() -> None:
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=60,
        )
        assert done.stderr == b"[True, False, True, True]"
        assert os.read(ours, 64) == b"\x1b[?25h", "the cursor is shown again"
    finally:
        os.close(ours)
        os.close(theirs)


def test_nothing_is_changed_without_a_terminal() -> None:
    program = "from shoal.peer.terminal.keyboard import _echo_signals; print(_echo_signals(False))"
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.stdout == b"False\n"
