"""The mean of a round, decoded piece by piece while others are still on their way. For worker threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from shoal.swarm.averaging.results import ResultStore


class Decoding:
    """What is decoded of a store's results counts as long as the store holds the very same bytes."""

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._mean: Tensor | None = None
        self._lock = threading.Lock()
        self._decoded: dict[int, memoryview] = {}

    def decode(self, chunks: Sequence[int]) -> None:
        """Those of them that are not decoded already: all are here, or void. Several may be decoded at once."""
        store = self._store
        left = [index for index in chunks if not self._is_decoded(index)]
        decoded = {index: store[index] for index in left if not store.is_dropped(index)}
        store.decode(left, self._room())
        self._decoded |= decoded

    def finish(self) -> Tensor:
        """The whole mean, as ``ResultStore.mean``."""
        self.decode(range(self._store.chunks))
        return self._room()

    def _is_decoded(self, index: int) -> bool:
        chunk = None if self._store.is_dropped(index) else self._decoded.get(index)
        return chunk is not None and self._store[index] is chunk

    def _room(self) -> Tensor:
        with self._lock:
            if self._mean is None:
                self._mean = self._store.buffers.passing.floats(self._store.elements)
            return self._mean
