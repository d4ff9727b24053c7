"""Machines on one machine: network namespaces that last as long as the test, whatever becomes of it.

A namespace lasts as long as a process or a socket in it. Each is held by a process that ends with ours, however it
ends, so nothing is left behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tests.integration.harness import end_with_parent, eventually

_UP_S = 10.0
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


class NoNamespaces(Exception):
    """This machine cannot make them; the message says what is missing."""


class Namespaces:
    """Namespaces with names, with nothing in them but a loopback interface that is up. ``close`` removes them."""

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}
        self._open = ExitStack()

    def make(self, *names: str) -> None:
        for name in names:
            self._holders[name] = self._hold()
        for name in names:
            self.ip(name, "link set lo up")

    def close(self) -> None:
        self._open.close()
        self._holders.clear()

    @property
    def names(self) -> list[str]:
        return list(self._holders)

    def holder(self, name: str) -> int:
        """Return the id of the process that holds a namespace, by which ``ip`` names it."""
        return self._holders[name]

    def inside(self, name: str) -> tuple[str, ...]:
        """Return what to put before a command to run it in that namespace."""
        return ("nsenter", f"--net=/proc/{self._holders[name]}/ns/net")

    def ip(self, name: str, *lines: str) -> None:
        """Run ``ip`` in a namespace once, with one command a line."""
        self.feed(name, ("ip", "-batch", "-"), "".join(f"{line}\n" for line in lines))

    def feed(self, name: str, command: Sequence[str], text: str = "") -> None:
        """Run a command in a namespace with ``text`` as its input. Raises ``NoNamespaces`` if it fails."""
        done = subprocess.run([*self.inside(name), *command], input=text, capture_output=True, text=True)
        if done.returncode:
            raise NoNamespaces(f"{' '.join(command)} in {name}: {done.stderr.strip()}\n{text}")

    def call(self, name: str, function: Callable[[], T]) -> T:
        """Call a function in a thread that is in that namespace, as all sockets and threads are that it makes."""

        def work() -> T:
            _enter(Path(f"/proc/{self._holders[name]}/ns/net"))
            return function()

        with ThreadPoolExecutor(1) as thread:  # of its own: it stays in the namespace
            return thread.submit(work).result()

    def socket(self, name: str, kind: socket.SocketKind, port: int = 0) -> socket.socket:
        """Make a socket in a namespace, bound to all of its IPv4 addresses. It stays there, whichever thread uses it,
        and is closed with the namespaces."""
        made = self.call(name, lambda: socket.socket(socket.AF_INET, kind))
        self._open.callback(made.close)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("0.0.0.0", port))
        return made

    def _hold(self) -> int:
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


def check_machine(commands: Iterable[str] = ()) -> None:
    """Raises ``NoNamespaces`` that names all that is missing here."""
    missing = [
        what
        for what, is_here in (
            ("Linux", sys.platform == "linux"),
            ("root", hasattr(os, "geteuid") and os.geteuid() == 0),
            *((f"the command {name}", shutil.which(name) is not None) for name in ("ip", "unshare", "nsenter")),
            *((f"the command {name}", shutil.which(name) is not None) for name in commands),
        )
        if not is_here
    ]
    if missing:
        raise NoNamespaces(f"network namespaces need {', '.join(missing)}")


def _enter(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise NoNamespaces(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
