"""Helpers for asyncio: task groups with plain errors, threads that are waited for, conditions without a lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def leaf(error: BaseException) -> BaseException:
    """The first single error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def task_scope() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out alone: callers expect what the body raised, not a group of it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise leaf(group) from None


class Changes:
    """A condition variable for one event loop, without the lock of ``asyncio.Condition``: chunks come and go by the
    hundred, and hardly any of them is waited for."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def announce(self) -> None:
        """Have everybody who waits test its condition again."""
        if self._next is not None:
            self._next.set()
            self._next = None

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()`` is true; it is tested at once and after every ``announce``."""
        while not holds():
            if self._next is None:
                self._next = asyncio.Event()
            await self._next.wait()


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """``asyncio.to_thread`` that, when cancelled, first waits until the thread has left the memory alone.

    The caller of a cancelled fetch may use its buffers for something else at once.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work, *args)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()
        raise
    return future.result()
