"""Chunks that come one by one, for whoever waits for them."""

from __future__ import annotations

from shoal.swarm.changes import Changes
from shoal.swarm.errors import BlobUnavailable


class ChunkStore:
    """Chunks by index, each from when it arrives or is made until ``close`` (a ``ChunkSource``). ``about``: what they
    are, for errors; ``moved``: how many have come."""

    def __init__(self, chunks: int, about: str) -> None:
        self.chunks = chunks
        self.moved = 0
        self._about = about
        self._held: list[memoryview | None] = [None] * chunks
        self._closed = False
        self._changes = Changes()

    async def put(self, chunk: int, data: memoryview) -> None:
        self._held[chunk] = data
        self.moved += 1
        self._changes.announce()

    async def chunk(self, index: int) -> memoryview:
        """Waits until that chunk exists here. Raises ``BlobUnavailable`` when it never will."""
        await self._changes.until(lambda: self._closed or self._held[index] is not None)
        return self[index]

    async def close(self) -> None:
        """Nobody needs them any more: ends the streams that wait for one."""
        self._closed = True
        self._held = [None] * self.chunks
        self._changes.announce()

    def __getitem__(self, index: int) -> memoryview:
        data = self._held[index]
        if data is None:
            raise BlobUnavailable(f"chunk {index} of {self._about} is not here")
        return data
