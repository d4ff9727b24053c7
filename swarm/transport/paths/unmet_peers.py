"""Members that this one could not connect to: what it tells the coordinator, which plans no meeting of them."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.swarm.protocol.types import MAX_UNMET


class UnmetPeers:
    """Peers with which no connection was possible, again and again. Moments are on any one clock.

    A peer is named only when attempts have failed for ``patience_s``: one that is dead, or starts anew, is off the
    roster by then."""

    def __init__(self) -> None:
        self.patience_s = 10.0
        self._failed_s: dict[str, tuple[float, float]] = {}
        """Moments of the first and the last failure since a peer was met."""

    def note_failure(self, peer: str, now_s: float) -> None:
        """Note that nothing could be had from a peer, as it could not be connected to."""
        first_s, _ = self._failed_s.get(peer, (now_s, now_s))
        self._failed_s[peer] = first_s, now_s

    def note_met(self, peer: str) -> None:
        """Note that something has come from a peer."""
        if self._failed_s:
            self._failed_s.pop(peer, None)

    def forget(self, peers: Iterable[str]) -> None:
        """Forget peers that are no members any more."""
        for peer in peers:
            self._failed_s.pop(peer, None)

    @property
    def failed(self) -> tuple[str, ...]:
        """Peers that could not be connected to at the last attempt."""
        return tuple(sorted(self._failed_s))

    @property
    def named(self) -> tuple[str, ...]:
        """The peers to name in a heartbeat."""
        lasting = (peer for peer, (first_s, last_s) in self._failed_s.items() if last_s - first_s >= self.patience_s)
        return tuple(sorted(lasting)[:MAX_UNMET])
