"""What members have sent between two verdicts, from the counters in their heartbeats. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST = 2**62
"""What a message has room for."""


@dataclass
class SentBytes:
    """A counter belongs to one process, which its CURVE key names: a member that starts again begins at 0."""

    _said: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """By peer: the process that it is, and what that one has said last."""
    _since_verdict: int = 0

    def begin(self, peer: str, curve_key: bytes) -> None:
        """A new process: all that it will have sent was sent from now on."""
        self._said[peer] = (curve_key, 0)

    def hear(self, peer: str, curve_key: bytes, sent_bytes: int) -> None:
        """A heartbeat. What a process that was there before us has sent since when nobody knows."""
        key, before = self._said.get(peer, (curve_key, sent_bytes))
        if key != curve_key:
            before = sent_bytes
        self._since_verdict += max(0, sent_bytes - before)
        self._said[peer] = (curve_key, max(before, sent_bytes))

    def forget(self, peer: str) -> None:
        """It has left for good."""
        self._said.pop(peer, None)

    def take(self) -> int:
        """The sum since it was taken last."""
        taken, self._since_verdict = min(self._since_verdict, _MOST), 0
        return taken
