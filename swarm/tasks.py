"""Task groups around a context's body, with errors as they were raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
