"""Token buckets: how much of something each key may take at once, and how fast it may take more."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_BUCKETS = 8192


class TokenBuckets(Generic[K]):
    """Token buckets, one for each key: ``burst`` tokens may be taken at once, and ``per_s`` are refilled.

    A key that takes more than its bucket holds goes into debt, at most one burst deep, and is refused until the debt is
    paid. When there are too many buckets, those unused for longest are forgotten."""

    def __init__(self, per_s: float, burst: float, most: int = MAX_BUCKETS) -> None:
        self.per_s, self.burst = per_s, burst
        self._most = most
        self._levels: dict[K, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, key: K, tokens: float, now_s: float) -> bool:
        """Take tokens; returns whether the bucket was not empty. They are taken in any case."""
        level = self.level(key, now_s)
        self._levels.pop(key, None)
        if len(self._levels) >= self._most:
            del self._levels[next(iter(self._levels))]
        self._levels[key] = (max(-self.burst, level - tokens), now_s)
        return level > 0

    def wait_s(self, key: K, tokens: float, now_s: float) -> float:
        """Return how long until there are so many tokens, at most a burst; 0 if there are."""
        return max(0.0, min(tokens, self.burst) - self.level(key, now_s)) / self.per_s

    def is_in_debt(self, key: K, now_s: float) -> bool:
        return self.level(key, now_s) <= 0

    def level(self, key: K, now_s: float) -> float:
        """Tokens that are left; negative for a debt."""
        level, since_s = self._levels.get(key, (self.burst, now_s))
        return min(self.burst, level + self.per_s * max(0.0, now_s - since_s))
