"""Port of a shared store: keys with values, a lease that one host has at a time, and commits that are fenced by it.

A journal needs little of an engine: atomic commits that fail when somebody else has written or has the lease, reads of
what was committed before they began, and a lease that the engine itself ends when its holder is silent. Every engine
passes the same contract test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

EPOCH_STEP = 2**30
"""Smallest distance between the epochs of two leases. A coordinator numbers its rosters from its epoch on, so this many
rosters have a version before those of the next coordinator begin."""

HEAD = "head"
"""Key whose changes order the commits of all hosts: a commit names the revision of it that it follows."""


@dataclass(frozen=True)
class Entry:
    """Value of a key. ``revision``: for the head, changes with every write and never repeats."""

    value: bytes
    revision: int


@dataclass(frozen=True)
class StoreLimits:
    """Most that one commit takes: bytes of keys and values together, and number of puts and deletes."""

    commit_bytes: int
    commit_keys: int


class FencedStore(Protocol):
    """One run's part of an engine. Methods may block, for a few seconds at most, and may be called from any thread.

    All raise ``JournalUnavailable`` when the engine does not answer, or refuses because it is full or read-only. Then
    it is not known whether a commit was made. Keys are short ASCII texts, and sorted as such."""

    location: str
    """The store's place for messages to people, without credentials."""

    limits: StoreLimits

    def open(self) -> None:
        """Connect, and make what the engine needs for the run. Also raises ``UserError`` for wrong credentials."""

    def read(self, key: str) -> Entry | None:
        """Read one key, with everything that was committed before the call."""

    def scan(self, first: str, stop: str, limit: int) -> list[tuple[str, bytes]]:
        """Read at most ``limit`` keys from ``first`` to below ``stop``, in order."""

    def acquire(self, holder: str, ttl_s: float, epoch: int) -> int | None:
        """Take the lease if nobody has it; ``holder``: who, for people. Return its fencing epoch, which is at least
        ``epoch`` and larger than that of any earlier lease by ``EPOCH_STEP`` or more; None if another host has it.

        The engine ends the lease ``ttl_s`` after the last ``renew``, by its own clock. It may be more, never less."""

    def renew(self) -> None:
        """Keep the lease for its whole time from now on. Raises ``LeaseLost`` if it has ended."""

    def holder(self) -> str:
        """Return who has the lease; empty for nobody."""

    def commit(self, head_revision: int, puts: Mapping[str, bytes], deletes: Sequence[tuple[str, str]]) -> int:
        """Write keys, and delete those from ``first`` to below ``stop``: all of it or nothing. Return the head's
        revision then.

        Raises ``LeaseLost``, and changes nothing, unless this process has the lease and the head has this revision (0:
        there is none). As a commit without an answer may have been made, it says so for its own repetition, too."""

    def put(self, key: str, value: bytes) -> None:
        """Write a key without the lease: what a host says of itself. It must not be one that commits write."""

    def compact(self) -> None:
        """Let the engine forget old revisions of what was deleted or replaced. Never raises."""

    def release(self) -> None:
        """End the lease, so that others need not wait for its end. Never raises."""

    def close(self) -> None:
        """Close all connections. Never raises."""


class LeaseClock:
    """What the holder of a lease knows of it by its own clock: whether it surely has it.

    ``now_s``: a clock that goes on while the machine sleeps. Time runs from before a renewal was sent, so the engine
    ends the lease later than this does, by ``_MARGIN`` of it or more."""

    _MARGIN = 0.15

    def __init__(self, ttl_s: float, now_s: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self.now_s = now_s
        self._until_s = -1.0

    def renewed(self, sent_s: float) -> None:
        """Count a renewal that was sent at ``sent_s``, and has been answered."""
        self._until_s = max(self._until_s, sent_s + self.ttl_s * (1 - self._MARGIN))

    @property
    def left_s(self) -> float:
        """Seconds for which the lease is surely held; negative when it may have ended."""
        return self._until_s - self.now_s()


def boot_time_s() -> float:
    """Seconds on a clock that nobody sets and that goes on while the machine sleeps, where the system has one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
