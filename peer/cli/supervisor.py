"""Supervisor of `shoal host`: runs the host as a process and restarts it when a signal has ended it.

The journal makes that safe: a coordinator resumes where its journal ends, on the same port, with the same invite.
Nothing heavy is imported here, so that the waiting process is small and starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from types import FrameType

from shoal.peer.lifeline import end_with_parent
from shoal.swarm.errors import HostCrashed, JournalUnavailable, LeaseLost

_MOST_RESTARTS, _WITHIN_S = 10, 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STANDBY_PAUSE_S = 1.0

_ASKED = (signal.SIGINT, signal.SIGTERM)
"""Signals by which people and service managers end a host."""


class Restarts:
    """Restart policy: longer pauses with each restart, and an end when there were too many."""

    def __init__(
        self, most: int = _MOST_RESTARTS, within_s: float = _WITHIN_S, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self.most = most
        self.within_s = within_s
        self._first_pause_s = first_pause_s
        self._ended_s: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Seconds to wait before restarting a host that has just ended; None after too many restarts."""
        while self._ended_s and self._ended_s[0] <= now_s - self.within_s:
            self._ended_s.popleft()
        earlier = len(self._ended_s)
        self._ended_s.append(now_s)
        if earlier >= self.most:
            return None
        return min(_LONGEST_PAUSE_S, self._first_pause_s * 2.0**earlier)


class Supervisor:
    """Runs the host's process until it ends by itself or a signal asks it to. For one use, on the main thread."""

    def __init__(self, arguments: Sequence[str], restarts: Restarts) -> None:
        """``arguments``: those of ``shoal``, from ``host`` on."""
        self._arguments = arguments
        self._restarts = restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._is_asked = False
        self._was_restarted = False
        # Only the supervisor holds the writing end: when it is gone, however it ended, the child reads the pipe's end.
        self._lifeline, self._held = os.pipe()

    def run(self) -> int:
        """Supervise until the end; returns the exit code. Raises ``HostCrashed`` after too many crashes."""
        for number in _ASKED:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGTSTP, self._stop_for_a_while)
        try:
            while True:
                code = self._run_child()
                if self._goes_on_as_standby(code):
                    time.sleep(_STANDBY_PAUSE_S)
                    continue
                if code >= 0:
                    return code
                self._was_restarted = True
                if self._is_asked or -code in _ASKED:
                    _end_by(-code)
                self._wait_before_restart(signal.Signals(-code).name)
        except _Asked as asked:
            return asked.exit_code

    def _goes_on_as_standby(self, code: int) -> bool:
        """Whether a host has lost its lease on a shared journal, or after that has not reached it yet: it stands by."""
        is_away = code == JournalUnavailable.exit_code and self._was_restarted
        if self._is_asked or not (code == LeaseLost.exit_code or is_away):
            return False
        self._was_restarted = True
        print("The host does not lead any more; it is started again, to stand by", file=sys.stderr, flush=True)
        return True

    def _run_child(self) -> int:
        command = [sys.executable, "-m", "shoal.peer.cli.supervisor", str(self._lifeline), *self._arguments]
        # In its own process group the child does not get the terminal's Ctrl-C; the supervisor passes it on once.
        self._child = subprocess.Popen(command, pass_fds=[self._lifeline], process_group=0)
        code = self._child.wait()
        self._child = None
        return code

    def _wait_before_restart(self, name: str) -> None:
        pause_s = self._restarts.pause_s(time.monotonic())
        if pause_s is None:
            raise HostCrashed(
                f"the host was ended by {name}, and {self._restarts.most} times before that within "
                f"{self._restarts.within_s / 60:.0f} minutes: it is not started again. Its journal is kept; look for "
                "the cause in what was said above and in the system's log (memory, disk), then give the same command"
            )
        print(
            f"The host was ended by {name}; it goes on from its journal in {pause_s:g} s", file=sys.stderr, flush=True
        )
        time.sleep(pause_s)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if self._child is None:
            raise _Asked(number)  # there is no child to pass it on to
        self._child.send_signal(number)

    def _stop_for_a_while(self, number: int, frame: FrameType | None) -> None:
        """Stop on Ctrl-Z, until ``fg`` or ``bg``."""
        child = self._child
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if child is not None:
            child.send_signal(signal.SIGCONT)


class _Asked(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def _end_by(number: int) -> None:
    """End by the same signal as the child, so that the exit status tells it."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def supervise(arguments: Sequence[str], restarts: Restarts) -> int:
    """Run `shoal` with these arguments under a supervisor; returns the exit code."""
    try:
        return Supervisor(arguments, restarts).run()
    except HostCrashed as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


# In the host's process ----------------------------------------------------------------------------------------


def _run_supervised() -> None:
    """Run ``python -m shoal.peer.cli.supervisor LIFELINE host …``: the host's process, which ends with its supervisor.

    ``LIFELINE`` is a pipe's descriptor whose other end the supervisor holds open. Without it, a killed supervisor would
    leave a host behind that still holds the port and the journal."""
    end_with_parent(int(sys.argv.pop(1)))
    # Imported late: the lifeline must be watched while these imports take their time.
    from shoal.peer.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    _run_supervised()
