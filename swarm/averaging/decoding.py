"""The mean of a round, decoded part by part while others are still on their way. For worker threads."""

from __future__ import annotations

import operator
import threading

from torch import Tensor

from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.messages import Part


class Decoding:
    """What is decoded of a store's results counts as long as the store holds the very same bytes."""

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._mean: Tensor | None = None
        self._lock = threading.Lock()
        self._decoded: dict[int, list[memoryview]] = {}

    def decode(self, part: Part) -> None:
        """A part whose chunks are all here, or that is void. Several may be decoded at once."""
        self._decoded.pop(part.start, None)
        chunks = [] if self._store.is_dropped(part) else self._store.bytes_of(part)
        self._store.decode(part, self._room())
        self._decoded[part.start] = chunks

    def finish(self) -> Tensor:
        """The whole mean, as ``ResultStore.mean``; what is decoded already is not decoded again."""
        for part in self._store.plan.parts:
            if not self._is_decoded(part):
                self.decode(part)
        return self._room()

    def _is_decoded(self, part: Part) -> bool:
        chunks = self._decoded.get(part.start)
        if not chunks or self._store.is_dropped(part) or not self._store.has(part):
            return False
        return all(map(operator.is_, chunks, self._store.bytes_of(part)))

    def _room(self) -> Tensor:
        with self._lock:
            if self._mean is None:
                self._mean = self._store.buffers.passing.floats(self._store.elements)
            return self._mean
