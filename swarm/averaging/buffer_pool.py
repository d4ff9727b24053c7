"""Buffer pool for chunks, reused round after round: touching fresh pages costs more than writing their contents.

Chunk sizes change from round to round with the measured links, so free memory is not kept by size: chunks lie side by
side in large segments, and adjacent free ranges are merged.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_STEP_BYTES = 2**12
_ALIGNMENT_BYTES = 64
_SEGMENT_BYTES = 2**23 + 2**16  # two of the largest chunks, with their headers

MOST_FREE_BYTES = 2**26
"""Free memory that a member keeps from round to round."""

_Range = tuple[int, int, int]
"""Segment number, start and stop within the segment."""


class BufferPool:
    """Pool of memory that is returned when the last view of it is garbage-collected. Thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[int, np.ndarray] = {}
        self._free: list[_Range] = []  # for chunks; sorted, and no two are neighbours
        self._free_vectors: list[_Range] = []  # whole segments, each for one vector larger than a chunk
        self._leases: dict[_Range, weakref.ref[np.ndarray]] = {}
        # The garbage collector may call back within a lease, which holds the lock: the callback only appends here.
        self._returned: deque[_Range] = deque()
        self._lock = threading.Lock()
        self._numbers = 0
        self._needed: set[int] = set()
        self._used_bytes = self._most_used_bytes = 0

    def take(self, size_bytes: int, header_bytes: int = 0) -> memoryview:
        """Return ``size_bytes`` uninitialised bytes; the first byte after the header is aligned to a cache line."""
        lead = -header_bytes % _ALIGNMENT_BYTES
        return self._lease(lead + size_bytes)[lead : lead + size_bytes]

    def floats(self, n: int) -> Tensor:
        """Return an uninitialised ``(n,) float32``, aligned to a cache line."""
        if n == 0:
            return torch.empty(0)
        return torch.frombuffer(self._lease(4 * n), dtype=torch.float32, count=n)

    def trim(self, most_free_bytes: int = MOST_FREE_BYTES) -> None:
        """Free segments that were not used since the last call, but keep a quarter more than the peak of bytes in use.

        The peak alone would be too little, as chunks do not fill segments: a segment that the next round needs would be
        freed, and its pages mapped anew, in every round. No more than ``most_free_bytes`` are kept, though, nor what
        lies between chunks in use."""
        with self._lock:
            self._take_back()
            enough = self._most_used_bytes + self._most_used_bytes // 4
            for free in (self._free_vectors, self._free):
                for number, start, stop in reversed(free[:]):
                    size = self._segments[number].nbytes
                    is_spare = number not in self._needed and self.held_bytes - size >= enough
                    is_too_much = self.held_bytes - self._used_bytes > most_free_bytes
                    if stop - start == size and (is_spare or is_too_much):
                        free.remove((number, start, stop))
                        del self._segments[number]
            self._most_used_bytes = self._used_bytes
            self._needed = {number for number, _, _ in self._leases}

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool holds, in use or free."""
        return sum(segment.nbytes for segment in self._segments.values())

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self.held_bytes - self._used_bytes

    def _lease(self, size_bytes: int) -> memoryview:
        size = -(-max(1, size_bytes) // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            self._take_back()
            number, start, stop = self._find(size)
            self._needed.add(number)
            if start + size < stop:
                insort(self._free, (number, start + size, stop))
            self._used_bytes += size
            self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
            leased = self._segments[number][start : start + size]  # every view of it keeps this one alive
            lease = number, start, start + size
            # A plain reference: ``weakref.finalize`` would double the time of a lease.
            self._leases[lease] = weakref.ref(leased, lambda _: self._returned.append(lease))
        return leased.data

    def _find(self, size: int) -> _Range:
        """Remove and return the first free range that is large enough; vectors have segments of their own."""
        if size > _SEGMENT_BYTES:
            for at, (_, _, stop) in enumerate(self._free_vectors):
                if stop == size:
                    return self._free_vectors.pop(at)
        else:
            for at, (_, start, stop) in enumerate(self._free):
                if stop - start >= size:
                    return self._free.pop(at)
        self._numbers += 1
        room = np.empty(max(size, _SEGMENT_BYTES) + _ALIGNMENT_BYTES, np.uint8)
        lead = -room.ctypes.data % _ALIGNMENT_BYTES
        self._segments[self._numbers] = room[lead : lead + max(size, _SEGMENT_BYTES)]
        return self._numbers, 0, max(size, _SEGMENT_BYTES)

    def _take_back(self) -> None:
        while self._returned:
            number, start, stop = lease = self._returned.popleft()
            del self._leases[lease]
            self._used_bytes -= stop - start
            if stop > _SEGMENT_BYTES:
                self._free_vectors.append((number, start, stop))
                continue
            at = bisect_left(self._free, (number, start, stop))
            if at < len(self._free) and self._free[at][:2] == (number, stop):
                stop = self._free.pop(at)[2]
            if at > 0 and (self._free[at - 1][0], self._free[at - 1][2]) == (number, start):
                at -= 1
                start = self._free.pop(at)[1]
            self._free.insert(at, (number, start, stop))


@dataclass(frozen=True)
class RoundBuffers:
    """Memory for a member's rounds: ``results`` outlive their round, ``passing`` is for everything else.

    In one pool, the chunks that are freed would leave gaps between those that stay, which the next round's chunks, of
    another size, do not fit into."""

    results: BufferPool = field(default_factory=BufferPool)
    passing: BufferPool = field(default_factory=BufferPool)

    def trim(self) -> None:
        """See ``BufferPool.trim``; both together keep up to ``MOST_FREE_BYTES``."""
        self.passing.trim(MOST_FREE_BYTES)
        self.results.trim(max(0, MOST_FREE_BYTES - self.passing.free_bytes))

    @property
    def held_bytes(self) -> int:
        """See ``BufferPool.held_bytes``."""
        return self.results.held_bytes + self.passing.held_bytes


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Whether two views hold equal bytes; ``==`` of two views compares byte by byte, twenty times slower."""
    return one is other or bytes(one) == bytes(other)
