"""Helpers for asyncio: task groups with plain errors, a condition without a lock, threads that are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def leaf(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def task_scope() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first error itself, not an exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise leaf(group) from None


class Changes:
    """A condition variable of one event loop, without the lock of ``asyncio.Condition``.

    It is announced for every chunk, and hardly ever awaited, so ``announce`` has to be cheap."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def announce(self) -> None:
        """Make all waiters test their conditions again."""
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
    """Run ``work`` in a thread; when cancelled, wait until the thread has finished.

    The caller of a cancelled fetch may reuse its buffers at once, so no thread may still write to them."""
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
