"""Journals over shared engines: what the tests of all engines have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.coordinator.stores.fenced_store import Entry, FencedStore, StoreLimits


class HostDied(BaseException):
    """The host has died. Nothing catches this: whoever runs next is another process."""


class DyingStore:
    """Another store, whose host dies before its n-th commit, or after it, before the answer."""

    def __init__(self, store: FencedStore, die_at: int | None = None, *, after: bool = False) -> None:
        self.store, self.die_at, self.after = store, die_at, after
        self.location, self.limits = store.location, store.limits
        self.commits = 0

    def commit(self, head_revision: int, puts: Mapping[str, bytes], deletes: Sequence[tuple[str, str]]) -> int:
        self.commits += 1
        if self.commits - 1 == self.die_at and not self.after:
            raise HostDied
        made = self.store.commit(head_revision, puts, deletes)
        if self.commits - 1 == self.die_at:
            raise HostDied
        return made

    def open(self) -> None:
        self.store.open()

    def read(self, key: str) -> Entry | None:
        return self.store.read(key)

    def scan(self, first: str, stop: str, limit: int) -> list[tuple[str, bytes]]:
        return self.store.scan(first, stop, limit)

    def acquire(self, holder: str, ttl_s: float, epoch: int) -> int | None:
        return self.store.acquire(holder, ttl_s, epoch)

    def renew(self) -> None:
        self.store.renew()

    def holder(self) -> str:
        return self.store.holder()

    def put(self, key: str, value: bytes) -> None:
        self.store.put(key, value)

    def compact(self) -> None:
        self.store.compact()

    def release(self) -> None:
        self.store.release()

    def close(self) -> None:
        self.store.close()


@dataclass
class SharedEngine:
    """An engine with the means to open journals on it.

    ``store``: makes one host's way to it; ``pass_lease``: returns when a silent holder's lease has ended."""

    store: Callable[[], FencedStore]
    pass_lease: Callable[[], None]
    folder: Path
    now_s: Callable[[], float]
    ttl_s: float
    run: SharedRun
    opened: list[SharedJournal] = field(default_factory=list)
    limits: StoreLimits | None = None

    def host(self, name: str = "host", store: FencedStore | None = None) -> SharedJournal:
        """A host that does not lead yet."""
        folder = self.folder / f"{name}-{len(self.opened)}"
        folder.mkdir(parents=True)
        journal = SharedJournal(store or self.store(), name, self.ttl_s, folder, self.now_s)
        journal.open()
        self.opened.append(journal)
        return journal

    def leader(self, name: str = "host", store: FencedStore | None = None) -> SharedJournal:
        """A host that leads, as nobody else does."""
        journal = self.host(name, store)
        assert journal.begin(self.run) is not None
        return journal

    def close(self) -> None:
        for one in self.opened:
            one.close()
