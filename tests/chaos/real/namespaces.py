"""Machines on one machine: network namespaces on two Ethernet segments, with a cable between them that can be pulled.

A namespace lasts as long as a process in it, and all of these end with ours, however it ends: nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tests.integration.harness import end_with_parent, eventually

_UP_S = 10.0


class NoNamespaces(Exception):
    """This machine cannot make them; the message says what is missing."""


class Wire:
    """``here`` and ``there``: the names of the machines on the two segments. A pulled cable drops packets and tells
    nobody. Use it as a context; raises ``NoNamespaces``."""

    def __init__(self, here: Sequence[str], there: Sequence[str]) -> None:
        self._segment = {**dict.fromkeys(here, "here"), **dict.fromkeys(there, "there")}
        self._holders: dict[str, int] = {}
        self._open = ExitStack()

    def __enter__(self) -> Wire:
        _check_machine()
        try:
            self._build()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self._open.close()

    def address(self, machine: str) -> str:
        return f"10.79.0.{list(self._segment).index(machine) + 1}"

    def inside(self, machine: str) -> tuple[str, ...]:
        """Return what to put before a command to run it in that namespace."""
        return ("nsenter", f"--net=/proc/{self._holders[machine]}/ns/net")

    def pull(self) -> None:
        self._ip("switch", "link", "set", "cable-here", "down")

    def plug_in(self) -> None:
        self._ip("switch", "link", "set", "cable-here", "up")

    def _build(self) -> None:
        for name in ("switch", *self._segment):
            self._holders[name] = self._hold_namespace()
        for segment in ("here", "there"):
            self._ip("switch", "link", "add", segment, "type", "bridge")
            self._ip("switch", "link", "set", segment, "up")
        self._ip("switch", "link", "add", "cable-here", "type", "veth", "peer", "name", "cable-there")
        for segment in ("here", "there"):
            self._ip("switch", "link", "set", f"cable-{segment}", "master", segment, "up")
        for number, (machine, segment) in enumerate(self._segment.items()):
            port, inside = f"port{number}", str(self._holders[machine])
            self._ip("switch", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            self._ip("switch", "link", "set", port, "master", segment, "up")
            self._ip(machine, "link", "set", "lo", "up")
            self._ip(machine, "address", "add", f"{self.address(machine)}/24", "dev", "eth0")
            self._ip(machine, "link", "set", "eth0", "up")

    def _hold_namespace(self) -> int:
        holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
        )
        self._open.callback(holder.wait)
        self._open.callback(holder.kill)

        def is_apart() -> bool:
            if holder.poll() is not None:
                raise NoNamespaces("this kernel, or container, makes no network namespaces")
            return os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net")

        eventually("a namespace is there", is_apart, _UP_S)
        return holder.pid

    def _ip(self, machine: str, *arguments: str) -> None:
        done = subprocess.run([*self.inside(machine), "ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _check_machine() -> None:
    missing = [
        what
        for what, is_here in (
            ("Linux", sys.platform == "linux"),
            ("root", hasattr(os, "geteuid") and os.geteuid() == 0),
            *((f"the command {name}", shutil.which(name) is not None) for name in ("ip", "unshare", "nsenter")),
        )
        if not is_here
    ]
    if missing:
        raise NoNamespaces(f"a partition needs {', '.join(missing)}")
