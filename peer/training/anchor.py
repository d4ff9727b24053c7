"""Anchor and outer optimizer state, bit-identical on all peers of a run: one memory, stepped in place, with digests.

States are hashed, stepped and sent in chunks: a chunk has all rows of one range of elements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from shoal.compression.range_reader import RangeReader
from shoal.compression.scratch import empty_aligned

CHUNK_ELEMENTS = 2**18
"""Elements of each row in a chunk, the unit in which states are hashed and sent; the last chunk may be shorter."""

DIGEST_BYTES = 32
_CHUNKS_A_THREAD = 4  # starting a thread for less than 8 MiB costs more than it saves

Piece = tuple[int, int, Tensor]
"""Start, stop and values of a range of a vector."""

Change = Callable[[int, Tensor, Tensor], None]
"""Is called with the start of a range, all rows of it, (1 + slots, k), which it changes, and the values, (k,), of a
piece."""


class OverwriteGuard(Protocol):
    """Reader of a state that is not done with it when the next step comes."""

    def before_overwrite(self, start: int, stop: int) -> None:
        """Read now what is still needed of the elements [start, stop) of all rows; in the thread of the step, which
        goes on afterwards."""


@dataclass(frozen=True, eq=False)
class _Content:
    """Version and digests of the state that is in a memory."""

    version: int
    digest: bytes
    chunk_digests: bytes


class _StateMemory:
    """Memory for the states of successive versions, of which only one is in it.

    ``current``: what is in it, None while it is overwritten and after a step that failed; ``before``: what was in it
    last, of which the elements from ``intact_from`` on are still there. It refers to no state, which would keep it in
    memory."""

    def __init__(self, values: Tensor, current: _Content) -> None:
        self.values = values
        self.lock = threading.Lock()
        self.current: _Content | None = current
        self.before: _Content | None = None
        self.intact_from = 0
        self.guards: list[OverwriteGuard] = []


class AnchorState:
    """Anchor and outer optimizer state of one version.

    ``version``: number of committed rounds behind it; ``shape``: (1 + slots, n); ``chunk_digests``: BLAKE3 of each
    chunk, concatenated.

    Its values are in a memory of which the next version takes possession range by range (``step``). Version, shape and
    digests stay true afterwards; the values are those of another state then, and are not given out any more. Whoever
    holds the state, and alone may step it, reads ``values`` as they are. All others, in any thread, use ``read``, which
    gives a copy of a range, or a guard, which is called before a range is overwritten."""

    def __init__(self, values: Tensor, version: int, digest: bytes, chunk_digests: bytes) -> None:
        """``values``: (1 + slots, n) float32 on the CPU, contiguous, which belong to the state from now on."""
        assert values.is_contiguous()
        self.shape = (values.shape[0], values.shape[1])
        self._content = _Content(version, digest, chunk_digests)
        self._memory = _StateMemory(values, self._content)

    @classmethod
    def _in_memory(cls, memory: _StateMemory, content: _Content) -> AnchorState:
        state = cls.__new__(cls)
        state.shape = (memory.values.shape[0], memory.values.shape[1])
        state._content, state._memory = content, memory
        return state

    @classmethod
    def make(cls, anchor: Tensor, outer: Tensor, version: int) -> AnchorState:
        """Make a state of copies of ``anchor``, (n,), and ``outer``, (slots, n), and hash it."""
        values = _new_values(1 + len(outer), anchor.numel())
        return cls.of(torch.cat([anchor.unsqueeze(0), outer], out=values), version)

    @classmethod
    def first(cls, reader: RangeReader, slots: int) -> AnchorState:
        """Make version 0: the values that are read, and state vectors of zeros. Copies nothing else."""
        values = _new_values(1 + slots, reader.elements)
        reader.read(0, reader.elements, values[0])
        values[1:].zero_()
        return cls.of(values, 0)

    @classmethod
    def of(cls, values: Tensor, version: int, digest: bytes | None = None) -> AnchorState:
        """Make a state of ``values`` without a copy, and hash it.

        ``digest``: the run's digest of a state that is not hashed by its chunks (``StartSection.state_digest``).
        """
        chunk_digests = _chunk_digests(values)
        return cls(values, version, digest or state_digest(version, tuple(values.shape), chunk_digests), chunk_digests)

    def copy(self) -> AnchorState:
        """Return the same state in a memory of its own."""
        values = _new_values(*self.shape).copy_(self.values)
        return AnchorState(values, self.version, self.digest, self.chunk_digests)

    @property
    def version(self) -> int:
        return self._content.version

    @property
    def digest(self) -> bytes:
        return self._content.digest

    @property
    def chunk_digests(self) -> bytes:
        return self._content.chunk_digests

    # Values, for whoever holds the state ----------------------------------------------------------------------

    @property
    def current(self) -> AnchorState | None:
        """State that is in this state's memory now: the same, a later version, or none."""
        content = self._memory.current
        return None if content is None else AnchorState._in_memory(self._memory, content)

    @property
    def is_current(self) -> bool:
        """Whether the values are still there, all of them."""
        return self._memory.current is self._content

    @property
    def values(self) -> Tensor:
        """Anchor and the outer optimizer's vectors, (1 + slots, n) float32 on the CPU."""
        assert self.is_current, f"version {self.version} has been overwritten"
        return self._memory.values

    @property
    def anchor(self) -> Tensor:
        return self.values[0]

    @property
    def outer(self) -> Tensor:
        return self.values[1:]

    @property
    def elements(self) -> int:
        return self.shape[1]

    @property
    def size_bytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]

    def release(self) -> None:
        """Give the memory back: nobody needs the values any more."""
        with self._memory.lock:
            if self._memory.current is self._content:
                self._memory.current = None
                self._memory.values = torch.empty(0)

    # Values, for others ---------------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Tensor | None:
        """Return a copy of the elements [start, stop) of all rows, or None once some of them have been overwritten."""
        memory = self._memory
        with memory.lock:
            is_intact = memory.current is self._content or (
                memory.before is self._content and start >= memory.intact_from
            )
            return _copy_of(memory.values, start, stop) if is_intact else None

    def add_guard(self, guard: OverwriteGuard) -> bool:
        """Have the guard called before any range is overwritten; return False where that has begun already."""
        with self._memory.lock:
            if self._memory.current is not self._content:
                return False
            self._memory.guards.append(guard)
            return True

    def remove_guard(self, guard: OverwriteGuard) -> None:
        """Call the guard no more, if it still is to be called."""
        with self._memory.lock:
            if guard in self._memory.guards:
                self._memory.guards.remove(guard)

    # The next version -----------------------------------------------------------------------------------------

    def step(self, version: int, pieces: Iterable[Piece], change: Change) -> AnchorState:
        """Overwrite the state by the next one, which is returned, range by range.

        ``pieces``: consecutive ranges of a vector, (n,), that cover it. When ``change`` fails, or the pieces end with
        an error after the first, neither state is left: the memory has no state then."""
        memory, hashes = self._memory, _ChunkHasher(self.shape)
        at = 0
        for start, stop, values in pieces:
            assert start == at < stop <= self.elements, "consecutive ranges"
            if at == 0:
                self._begin_overwrite()
            with memory.lock:
                guards = tuple(memory.guards)
            for guard in guards:
                guard.before_overwrite(start, stop)
            with memory.lock:
                memory.intact_from = stop
            change(start, memory.values[:, start:stop], values)
            hashes.take_all(memory.values, stop)
            at = stop
        assert at == self.elements, "ranges that cover the vector"
        return self._end_overwrite(version, hashes.digests())

    def _begin_overwrite(self) -> None:
        memory = self._memory
        with memory.lock:
            assert memory.current is self._content, f"version {self.version} has been overwritten"
            memory.current, memory.before, memory.intact_from = None, self._content, 0

    def _end_overwrite(self, version: int, chunk_digests: bytes) -> AnchorState:
        memory = self._memory
        content = _Content(version, state_digest(version, self.shape, chunk_digests), chunk_digests)
        with memory.lock:
            memory.current, memory.before = content, None
            memory.guards.clear()  # they were for the version before
        return AnchorState._in_memory(memory, content)


# Digests ------------------------------------------------------------------------------------------------------


def state_digest(version: int, shape: tuple[int, ...], chunk_digests: bytes) -> bytes:
    """Return the digest of a state whose chunks have these digests.

    With the run's digest a peer checks a received list of chunk digests, and with that list every chunk by itself.
    """
    return blake3(f"shoal state 3 {version} {shape}\0".encode() + chunk_digests).digest()


def chunk_digest(data: memoryview) -> bytes:
    """Return the digest of a chunk: of its rows' bytes, one row after the other."""
    return blake3(data).digest()


def chunks_in(elements: int) -> int:
    return -(-elements // CHUNK_ELEMENTS)


def chunk_bounds(chunk: int, elements: int) -> tuple[int, int]:
    """Return the range of elements that a chunk has."""
    return chunk * CHUNK_ELEMENTS, min((chunk + 1) * CHUNK_ELEMENTS, elements)


class GrowingDigest:
    """Digest of a state whose values come range by range; keeps no more of them than an unfinished chunk."""

    def __init__(self, version: int, shape: tuple[int, int]) -> None:
        self._version, self._shape = version, shape
        self._digests = b""
        self._open = torch.empty(shape[0], min(CHUNK_ELEMENTS, shape[1]))
        self._at = 0

    def take(self, values: Tensor) -> None:
        """Add the values, (1 + slots, k) float32, of all rows that follow those that were added before."""
        while values.shape[1]:
            first, stop = chunk_bounds(self._at // CHUNK_ELEMENTS, self._shape[1])
            size = min(values.shape[1], stop - self._at)
            self._open[:, self._at - first : self._at - first + size] = values[:, :size]
            self._at, values = self._at + size, values[:, size:]
            if self._at == stop:
                self._digests += _rows_digest(self._open, 0, stop - first)

    def digest(self) -> bytes:
        """Return the state's digest, after all values were added."""
        assert self._at == self._shape[1], "some values were not added"
        return state_digest(self._version, self._shape, self._digests)


class _ChunkHasher:
    """Hasher of the chunks of values that are overwritten from the first to the last."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._chunks = iter([chunk_bounds(chunk, shape[1]) for chunk in range(chunks_in(shape[1]))])
        self._next = next(self._chunks, None)
        self._digests: list[bytes] = []

    def take_all(self, values: Tensor, stop: int) -> None:
        """Hash the chunks that end at ``stop`` or before it, and were not hashed yet."""
        while self._next is not None and self._next[1] <= stop:
            self._digests.append(_rows_digest(values, *self._next))
            self._next = next(self._chunks, None)

    def digests(self) -> bytes:
        assert self._next is None
        return b"".join(self._digests)


def _chunk_digests(values: Tensor) -> bytes:
    elements = values.shape[1]
    chunks = chunks_in(elements)

    def digest(chunk: int) -> bytes:
        return _rows_digest(values, *chunk_bounds(chunk, elements))

    threads = min(torch.get_num_threads(), chunks // _CHUNKS_A_THREAD)
    if threads < 2:
        return b"".join(map(digest, range(chunks)))
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(pool.map(digest, range(chunks)))


def _rows_digest(values: Tensor, start: int, stop: int) -> bytes:
    digest = blake3()
    for row in row_bytes(values, start, stop):
        digest.update(row)
    return digest.digest()


def row_bytes(values: Tensor, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the memory of the elements [start, stop) of each row."""
    for row in values:
        yield bytes_of(row[start:stop])


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    assert values.is_contiguous()
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


def _copy_of(values: Tensor, start: int, stop: int) -> Tensor:
    return values[:, start:stop].clone(memory_format=torch.contiguous_format)


def _new_values(rows: int, elements: int) -> Tensor:
    return empty_aligned(rows * elements).view(rows, elements)
