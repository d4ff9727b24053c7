"""Costs of the coordinator and of members, which are not simulated but added up.

Processor seconds are derived from what ``benchmarks/coordinator.py`` and ``allreduce.py`` measured as a whole; the
bytes of messages are those that they have on the wire, requests encoded now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.swarm.simulation.links import message_on_links

_REQUEST_S, _PUSH_S, _ROUND_S = 6e-4, 1.5e-4, 1.2e-3
CPU_S_BY_MESSAGE = {
    "join": 30e-3,
    "heartbeat": _REQUEST_S,
    "lease": _REQUEST_S,
    "ready": _REQUEST_S + _ROUND_S,
    "report": _REQUEST_S + _ROUND_S,
    "leave": _REQUEST_S,
    "push": _PUSH_S,
    "capability": _REQUEST_S,
    "claim": _REQUEST_S,
    "drive": _REQUEST_S,
}
"""Processor seconds for a message of each kind with its answer.

``coordinator.py`` measured 9.5 ms a round for each of a thousand members, which ask ten times in a round of 20 s and
are told something six times (``docs/benchmarks.md``). By a profile of it, 31 % go to receiving, 25 % to sending, 16 %
to views and heartbeats, and 25 % to ticks, plans and verdicts, which are divided among ``ready`` and ``report``. A join
takes 30 ms with its dial-backs."""

HOST_CORES = 0.016
"""What is left of the 0.023 cores of a host with ten members."""

CPU_S_PER_BYTE = 2.5e-9
"""For each byte that the coordinator sends: encryption, copies and the kernel."""

PACK_S_PER_ELEMENT = 1.5e-9
"""A member's seconds from the last step to ``ready``: difference to the anchor, norms, encoding and hashes."""

APPLY_S_PER_ELEMENT = 2.0e-9
"""A member's seconds from the verdict to the next step: decoding, outer step, digest, copy to the model."""

START_S = 4.0
"""A member's seconds from the start of its process until it asks to join: imports and the model's building."""


@dataclass
class HostMeter:
    """Messages, bytes and processor time of the coordinator. Sums are over the run; bytes are those on its link."""

    messages: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    _sizes: dict[str, int] = field(default_factory=dict)
    _until_next: Counter[str] = field(default_factory=Counter)

    _EVERY = 997

    def count(self, kind: str, received: Callable[[], int], answer_bytes: float, times: float = 1.0) -> None:
        """Count a request and its answer, ``times`` times. ``received``: encodes the request; now and then it is
        asked, and its last answer is taken in between."""
        if not self._until_next[kind]:
            self._sizes[kind], self._until_next[kind] = received(), self._EVERY
        self._until_next[kind] -= 1
        self.messages[kind] += 1 if times == 1.0 else round(times)
        self.received_bytes += times * message_on_links(self._sizes[kind])
        self.sent_bytes += times * message_on_links(answer_bytes)

    def push(self, members: int, each_bytes: float) -> None:
        """Count a view that so many members are sent."""
        self.messages["push"] += members
        self.sent_bytes += members * message_on_links(each_bytes)

    @property
    def cpu_s(self) -> float:
        """Processor seconds of everything counted, which ``HOST_CORES`` come on top of."""
        of_messages = sum(CPU_S_BY_MESSAGE[kind] * times for kind, times in self.messages.items())
        return of_messages + CPU_S_PER_BYTE * self.sent_bytes


def push_s(each_bytes: float, host_bps: float) -> float:
    """Return the seconds that a view takes for each member: the processor's, or the link's."""
    return max(CPU_S_BY_MESSAGE["push"] + CPU_S_PER_BYTE * each_bytes, 8 * each_bytes / host_bps)
