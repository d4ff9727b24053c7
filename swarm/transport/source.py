"""Chunk sources: the interface of what a member offers to others in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


class ChunkSource(Protocol):
    """Chunked bytes that a member offers; ``chunk`` waits until that one exists.

    It raises ``BlobUnavailable`` (or another ``ShoalError``) when it never will; that ends the stream.
    """

    @property
    def chunks(self) -> int: ...

    async def chunk(self, index: int) -> memoryview: ...


@runtime_checkable
class CountedSource(ChunkSource, Protocol):
    """A source that knows who is reading it. ``begin`` raises ``Busy`` for a stream that it does not want to serve
    now; each other one is ended. ``reader``: the other side's key."""

    def begin(self, reader: bytes) -> None: ...

    def end(self, reader: bytes) -> None: ...


@contextmanager
def reading(source: ChunkSource, reader: bytes) -> Iterator[None]:
    """Raises what the source's ``begin`` raises."""
    if not isinstance(source, CountedSource):
        yield
        return
    source.begin(reader)
    try:
        yield
    finally:
        source.end(reader)
