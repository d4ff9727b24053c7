"""Observation of a machine's power supply and of its use by others."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from shoal.peer.guest.gate import Observation


class MachineObserver:
    """Observes the machine: its battery, key presses at its terminals, and what other programs compute.

    Programs that give way to all others (``nice``) do not count as in use: other peers of this machine are such."""

    def __init__(self) -> None:
        self._busy_s = _busy_s()
        self._looked_s = time.monotonic()

    def observe(self) -> Observation:
        """Observe. The load is that since the last observation."""
        busy_s, looked_s = _busy_s(), time.monotonic()
        passed_s = max(looked_s - self._looked_s, 1e-3) * (psutil.cpu_count() or 1)
        load = max(0.0, busy_s - self._busy_s) / passed_s
        self._busy_s, self._looked_s = busy_s, looked_s
        return Observation(_on_battery(), _input_s(), load)


def _busy_s() -> float:
    """Return the processor time of all other programs so far."""
    every, me = psutil.cpu_times(), psutil.Process()
    ours = [me.cpu_times()]
    for child in me.children(recursive=True):
        with suppress(psutil.Error):
            ours.append(child.cpu_times())
    own_s: float = sum(one.system + (0.0 if _gives_way() else one.user) for one in ours)
    busy_s: float = every.user + every.system
    return busy_s - own_s


def _gives_way() -> bool:
    """Whether this process's own work is not in ``psutil.cpu_times().user``."""
    return hasattr(os, "nice") and os.nice(0) > 0


def _on_battery() -> bool | None:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    plugged = None if battery is None else battery.power_plugged
    return None if plugged is None else not plugged


def _input_s() -> float | None:
    """Return the seconds since the last key press at any terminal; None where nobody is logged in."""
    touched = []
    for user in psutil.users():
        with suppress(OSError, TypeError):
            touched.append(os.stat(f"/dev/{user.terminal}").st_atime)
    return max(0.0, time.time() - max(touched)) if touched else None
