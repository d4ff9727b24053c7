"""Memory for chunks, used again round after round: the first touch of fresh pages costs more than what is written."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

_STEP_BYTES = 2**16
_ALIGNMENT_BYTES = 64


class Buffers:
    """Gives out memory that comes back by itself once the last view of it is gone. For any thread."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._used: set[int] = set()

    def take(self, size_bytes: int, header_bytes: int = 0) -> memoryview:
        """``size_bytes`` uninitialised bytes; those after the header are aligned for any type."""
        lead = -header_bytes % _ALIGNMENT_BYTES
        return self._lease(lead + size_bytes)[lead : lead + size_bytes]

    def floats(self, n: int) -> Tensor:
        """An uninitialised ``(n,) float32``."""
        if n == 0:
            return torch.empty(0)
        return torch.frombuffer(self._lease(4 * n), dtype=torch.float32, count=n)

    def trim(self) -> None:
        """Let go of what is free and of a size that nobody has asked for since the last time."""
        for capacity in [one for one in self._free if one not in self._used]:
            del self._free[capacity]
        self._used.clear()

    @property
    def free_bytes(self) -> int:
        return sum(capacity * len(free) for capacity, free in self._free.items())

    def _lease(self, size_bytes: int) -> memoryview:
        capacity = -(-max(1, size_bytes) // _STEP_BYTES) * _STEP_BYTES
        self._used.add(capacity)
        try:
            owned = self._free[capacity].pop()
        except IndexError:
            owned = np.empty(capacity, np.uint8)
        leased = owned.view()  # every view of it keeps this one, and only this one, alive
        weakref.finalize(leased, self._free[capacity].append, owned).atexit = False
        return leased.data


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Whether they are equal; ``==`` on two views compares byte by byte, twenty times slower."""
    return one is other or bytes(one) == bytes(other)
