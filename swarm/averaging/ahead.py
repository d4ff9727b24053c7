"""Streams that are opened before anybody takes what they bring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from shoal.swarm.errors import ShoalError

Chunks = AsyncGenerator[tuple[int, memoryview], None]
"""Of a stream, with their index, in order."""

_FRESH_S = 1.0
"""Who has sent nothing for so long was not ready when it was asked: it is asked anew, and waited for as anybody."""


class StreamAhead:
    """A stream whose first chunk is on its way; no more come than its first credit allows."""

    def __init__(self, stream: Chunks, tasks: asyncio.TaskGroup) -> None:
        self._stream = stream
        self._opened_s = asyncio.get_running_loop().time()
        self._first = tasks.create_task(self._begin())

    async def _begin(self) -> tuple[int, memoryview] | ShoalError:
        try:
            return await anext(self._stream)
        except ShoalError as error:
            return error

    @property
    def is_good(self) -> bool:
        """Whether to go on with it."""
        if self._first.done():
            return not isinstance(self._first.result(), ShoalError)
        return asyncio.get_running_loop().time() - self._opened_s < _FRESH_S

    async def chunks(self) -> Chunks:
        """All of them, from the first on. Raises ``ShoalError``."""
        try:
            first = await self._first
            if isinstance(first, ShoalError):
                raise first
            yield first
            async for one in self._stream:
                yield one
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop it, wherever it is."""
        self._first.cancel()
        await asyncio.wait([self._first])
        await self._stream.aclose()
