"""Chunk sources: the interface through which a member offers bytes to other members in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


class ChunkSource(Protocol):
    """Bytes in chunks. ``chunk`` waits until the chunk exists.

    ``chunk`` raises ``BlobUnavailable`` (or another ``ShoalError``) if the chunk will never exist, which ends the
    stream."""

    @property
    def chunks(self) -> int: ...

    async def chunk(self, index: int) -> memoryview: ...


@runtime_checkable
class CountedSource(ChunkSource, Protocol):
    """A source that counts its readers. ``reader`` is the transport key of the receiving member.

    ``begin_reading`` raises ``Busy`` to refuse a stream for now; ``end_reading`` follows each accepted one."""

    def begin_reading(self, reader: bytes) -> None: ...

    def end_reading(self, reader: bytes) -> None: ...


@runtime_checkable
class DownloadSource(ChunkSource, Protocol):
    """A source of what members and guests download, which counts towards the donor's quota for them
    (``download_quota.py``). ``state_bytes``: size of a state of the run, of which its bytes are a part."""

    @property
    def state_bytes(self) -> int: ...


@contextmanager
def reading(source: ChunkSource, reader: bytes) -> Iterator[None]:
    """Count a reader while a stream is being sent. Raises what ``begin_reading`` raises."""
    if not isinstance(source, CountedSource):
        yield
        return
    source.begin_reading(reader)
    try:
        yield
    finally:
        source.end_reading(reader)
