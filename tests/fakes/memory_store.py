"""An engine in memory, on any clock: shared by the stores of several hosts, each of which can be cut off from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP, HEAD, Entry, StoreLimits
from shoal.swarm.errors import JournalUnavailable, LeaseLost


class MemoryEngine:
    """What all hosts share. ``now_s``: the engine's clock, by which leases end."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.head, self.epoch, self.until_s, self.holder = 0, 0, -1.0, ""
        self.commits = 0


class MemoryStore:
    """One host's way to the engine (``fenced_store.FencedStore``).

    ``trouble``: what every call fails with while it is set; ``after_commit``: called when a commit is made, before it
    is answered, and may raise."""

    limits = StoreLimits(commit_bytes=2**20, commit_keys=64)

    def __init__(self, engine: MemoryEngine, limits: StoreLimits | None = None) -> None:
        self.engine = engine
        self.location = "memory"
        self.limits = limits or self.limits
        self.trouble = ""
        self.after_commit: Callable[[], None] = lambda: None
        self._epoch, self._ttl_s = 0, 0.0

    def _check(self) -> None:
        if self.trouble:
            raise JournalUnavailable(self.trouble)

    def open(self) -> None:
        self._check()

    def read(self, key: str) -> Entry | None:
        self._check()
        value = self.engine.values.get(key)
        return None if value is None else Entry(value, self.engine.head)

    def scan(self, first: str, stop: str, limit: int) -> list[tuple[str, bytes]]:
        self._check()
        keys = sorted(key for key in self.engine.values if first <= key < stop)
        return [(key, self.engine.values[key]) for key in keys[:limit]]

    def acquire(self, holder: str, ttl_s: float, epoch: int) -> int | None:
        self._check()
        engine = self.engine
        with engine.lock:
            if engine.until_s >= engine.now_s():
                return None
            engine.epoch = max(epoch, engine.epoch + EPOCH_STEP)
            engine.until_s, engine.holder = engine.now_s() + ttl_s, holder
        self._epoch, self._ttl_s = engine.epoch, ttl_s
        return self._epoch

    def _has_lease(self) -> bool:
        return self.engine.epoch == self._epoch and self.engine.until_s >= self.engine.now_s()

    def renew(self) -> None:
        self._check()
        if not self._has_lease():
            raise LeaseLost("the lease has ended")
        self.engine.until_s = self.engine.now_s() + self._ttl_s

    def holder(self) -> str:
        self._check()
        return self.engine.holder if self.engine.until_s >= self.engine.now_s() else ""

    def commit(self, head_revision: int, puts: Mapping[str, bytes], deletes: Sequence[tuple[str, str]]) -> int:
        self._check()
        engine = self.engine
        size = sum(len(key) + len(value) for key, value in puts.items())
        assert size <= self.limits.commit_bytes, "more than the engine takes"
        assert len(puts) <= self.limits.commit_keys + 1
        with engine.lock:
            if not self._has_lease() or engine.head != head_revision:
                raise LeaseLost("another host has the lease, or has written")
            for first, stop in deletes:
                for key in [key for key in engine.values if first <= key < stop]:
                    del engine.values[key]
            engine.values |= puts
            engine.head += HEAD in puts
            engine.commits += 1
            head = engine.head
        self.after_commit()
        return head

    def put(self, key: str, value: bytes) -> None:
        self._check()
        self.engine.values[key] = value

    def compact(self) -> None:
        pass

    def release(self) -> None:
        if not self.trouble and self._has_lease():
            self.engine.until_s = -1.0

    def close(self) -> None:
        pass
