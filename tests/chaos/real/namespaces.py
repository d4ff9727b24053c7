"""Two Ethernet segments of network namespaces, with a cable between them that can be pulled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.integration.namespaces import Namespaces, check_machine

T = TypeVar("T")


class Wire:
    """``here`` and ``there``: the names of the machines on the two segments. A pulled cable drops packets and tells
    nobody. Use it as a context; raises ``NoNamespaces``."""

    def __init__(self, here: Sequence[str], there: Sequence[str]) -> None:
        self._segment = {**dict.fromkeys(here, "here"), **dict.fromkeys(there, "there")}
        self._namespaces = Namespaces()

    def __enter__(self) -> Wire:
        check_machine()
        try:
            self._build()
        except BaseException:
            self._namespaces.close()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self._namespaces.close()

    def address(self, machine: str) -> str:
        return f"10.79.0.{list(self._segment).index(machine) + 1}"

    def inside(self, machine: str) -> tuple[str, ...]:
        """Return what to put before a command to run it in that namespace."""
        return self._namespaces.inside(machine)

    def call(self, machine: str, function: Callable[[], T]) -> T:
        """Call a function whose connections are that machine's."""
        return self._namespaces.call(machine, function)

    def pull(self) -> None:
        self._namespaces.ip("switch", "link set cable-here down")

    def plug_in(self) -> None:
        self._namespaces.ip("switch", "link set cable-here up")

    def _build(self) -> None:
        spaces = self._namespaces
        spaces.make("switch", *self._segment)
        spaces.ip("switch", "link add cable-here type veth peer name cable-there")
        for segment in ("here", "there"):
            spaces.ip("switch", f"link add {segment} type bridge", f"link set {segment} up")
            spaces.ip("switch", f"link set cable-{segment} master {segment} up")
        for number, (machine, segment) in enumerate(self._segment.items()):
            port, inside = f"port{number}", spaces.holder(machine)
            spaces.ip("switch", f"link add {port} type veth peer name eth0 netns {inside}")
            spaces.ip("switch", f"link set {port} master {segment} up")
            spaces.ip(machine, f"address add {self.address(machine)}/24 dev eth0", "link set eth0 up")
