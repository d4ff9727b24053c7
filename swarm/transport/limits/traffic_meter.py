"""Meter of bulk traffic: bytes sent and received by scope, and the bandwidth that they have shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_BUSY_BYTES = 2**18
_BUCKET_S = 0.25
_DECAY = 0.99
"""Factor by which the shown bandwidth falls after a busy bucket that showed less."""


@dataclass
class TrafficMeter:
    """Bytes of bulk frames, with their headers and tags, and the bandwidth that they have shown."""

    sent_bytes: int = 0
    received_bytes: int = 0
    bandwidth_bps: float = 0.0
    """Of the busiest recent quarter second, both directions together; 0 before anything large was transferred."""
    probed_bps: float = 0.0
    """The result of a bandwidth probe, made before anything large was transferred."""
    sent_by_scope: Counter[int] = field(default_factory=Counter)
    received_by_scope: Counter[int] = field(default_factory=Counter)
    _bucket: int = -1
    _bucket_bytes: int = 0

    def count_sent(self, size: int, now_s: float, scope: int = 0) -> None:
        self.sent_bytes += size
        self.sent_by_scope[scope] += size
        self._count(size, now_s)

    def count_received(self, size: int, now_s: float, scope: int = 0) -> None:
        self.received_bytes += size
        self.received_by_scope[scope] += size
        self._count(size, now_s)

    def totals(self, scope: int) -> tuple[int, int]:
        """Bytes sent and received in a stage's scope; for the run's scope those of all scopes."""
        if scope:
            return self.sent_by_scope[scope], self.received_by_scope[scope]
        return self.sent_bytes, self.received_bytes

    def _count(self, size: int, now_s: float) -> None:
        bucket = int(now_s / _BUCKET_S)
        if bucket != self._bucket:
            # Only busy buckets show what the link can carry. The figure decays slowly, in case the link gets worse:
            # a round with little to transfer does not mean a slower link.
            if self._bucket_bytes >= _BUSY_BYTES:
                shown = 8 * self._bucket_bytes / _BUCKET_S
                self.bandwidth_bps = max(shown, _DECAY * self.bandwidth_bps)
            self._bucket, self._bucket_bytes = bucket, 0
        self._bucket_bytes += size
