"""Streams that are opened before anybody takes what they bring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from shoal.swarm.errors import LinkError, ShoalError

Chunks = AsyncGenerator[tuple[int, memoryview], None]
"""Of a stream, with their index, in order."""


class StreamAhead:
    """A stream whose first chunk is on its way, or will be; no more come than its window allows."""

    def __init__(self, stream: Chunks, tasks: asyncio.TaskGroup) -> None:
        self._stream = stream
        self._first = tasks.create_task(self._begin())

    async def _begin(self) -> tuple[int, memoryview] | ShoalError | None:
        try:
            return await anext(self._stream, None)
        except ShoalError as error:
            return error

    async def chunks(self, wait_s: float) -> Chunks:
        """All of them, from the first on. Raises ``ShoalError``: ``LinkError`` when ``wait_s`` pass without one."""
        try:
            done, _ = await asyncio.wait([self._first], timeout=wait_s)
            if not done or self._first.cancelled():
                raise LinkError(f"nothing had come ahead, nor for {wait_s:.1f} s")
            following = self._first.result()
            while following is not None:
                if isinstance(following, ShoalError):
                    raise following
                yield following
                try:
                    async with asyncio.timeout(wait_s):
                        following = await anext(self._stream, None)
                except TimeoutError as error:
                    raise LinkError(f"no chunk came for {wait_s:.1f} s") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop it, wherever it is."""
        self._first.cancel()
        await asyncio.wait([self._first])
        await self._stream.aclose()
