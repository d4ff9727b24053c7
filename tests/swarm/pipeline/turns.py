"""A plain choice of replicas for tests: in turn, with a pause for the full and the failed."""

from __future__ import annotations

from collections.abc import Mapping, Set

from shoal.swarm.pipeline.engine.effects import AttemptKey


class Turns:
    """The one that was sent something longest ago is next."""

    def __init__(self, overdue_s: float, pause_s: float) -> None:
        self._overdue_s, self._pause_s = overdue_s, pause_s
        self._replicas: dict[int, list[str]] = {}
        self._paused_s: dict[str, float] = {}
        self._pending: dict[AttemptKey, tuple[str, float]] = {}

    def set_replicas(self, stage: int, rates: Mapping[str, float | None], now_s: float) -> None:
        known = [peer for peer in self._replicas.get(stage, []) if peer in rates]
        self._replicas[stage] = known + sorted(rates.keys() - set(known))

    def pick(self, stage: int, now_s: float, avoid: Set[str] = frozenset()) -> str | None:
        for peer in self._replicas.get(stage, []):
            if peer not in avoid and now_s >= self._paused_s.get(peer, 0.0):
                return peer
        return None

    def sent(self, peer: str, key: AttemptKey, now_s: float) -> None:
        assert key not in self._pending, "each attempt has a key of its own"
        self._pending[key] = peer, now_s
        for peers in self._replicas.values():
            if peer in peers:
                peers.remove(peer)
                peers.append(peer)

    def finished(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        self._paused_s.pop(peer, None)
        return self._settle(peer, key)

    def refused(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        return self._pause(peer, key, now_s)

    def withdrawn(self, peer: str, key: AttemptKey) -> bool:
        return self._settle(peer, key)

    def failed(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        return self._pause(peer, key, now_s)

    def retire(self, peer: str) -> tuple[AttemptKey, ...]:
        lost = tuple(key for key, (other, _) in self._pending.items() if other == peer)
        for key in lost:
            del self._pending[key]
        for peers in self._replicas.values():
            if peer in peers:
                peers.remove(peer)
        return lost

    def overdue(self, now_s: float) -> tuple[AttemptKey, ...]:
        return tuple(key for key, (_, sent_s) in self._pending.items() if now_s >= sent_s + self._overdue_s)

    def _pause(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        if self._settle(peer, key):
            self._paused_s[peer] = now_s + self._pause_s
            return True
        return False

    def _settle(self, peer: str, key: AttemptKey) -> bool:
        if self._pending.get(key, ("",))[0] != peer:
            return False
        del self._pending[key]
        return True
