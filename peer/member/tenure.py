"""How long a membership is this peer's: what it waits for gives way when stages go to others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.swarm.aio import task_scope
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.messages import RunView

T = TypeVar("T")


class Tenure:
    """Of ``what``, for as long as ``is_ours`` holds of the run's views, which ``client`` hears."""

    def __init__(self, client: CoordinatorClient, is_ours: Callable[[RunView], bool], what: str) -> None:
        self._client = client
        self._is_ours = is_ours
        self._what = what

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives, or raises. Raises ``NotAdmitted``, and cancels it, when the tenure ends before."""
        async with task_scope() as tasks:
            working = tasks.create_task(work)
            working.add_done_callback(lambda _: self._client.wake())
            await self._client.wait_for(lambda view: working.done() or not self._is_ours(view))
            if working.done():
                return working.result()
            working.cancel()
        raise NotAdmitted(f"{self._what} is not this peer's any more: the plan has given it to others")


async def during(tenure: Tenure | None, work: Coroutine[Any, Any, T]) -> T:
    """``Tenure.during``; without one as long as it takes."""
    return await (work if tenure is None else tenure.during(work))
