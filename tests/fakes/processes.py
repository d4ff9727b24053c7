"""Processes within one event loop: every task belongs to one, by a context variable, and a process can be stopped."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from tests.fakes.virtual_clock import VirtualLoop

T = TypeVar("T")

_PROCESS: ContextVar[str] = ContextVar("process", default="")


class ProcessLoop(VirtualLoop):
    """A virtual clock under processes that ``stop`` (as by SIGSTOP) holds and ``resume`` lets go on.

    Nothing of a stopped process runs, and its clock goes on: what timed out meanwhile has timed out when it wakes up.
    """

    def __init__(self, horizon_s: float) -> None:
        super().__init__(horizon_s)
        self._stopped: set[str] = set()
        self._parked: list[asyncio.Handle] = []

    def stop_process(self, process: str) -> None:
        """Stop a process from the next turn of the loop on."""
        self._stopped.add(process)

    def resume_process(self, process: str) -> None:
        self._stopped.discard(process)
        self._ready.extendleft(reversed([one for one in self._parked if _process_of(one) == process]))
        self._parked = [one for one in self._parked if _process_of(one) != process]

    def is_stopped(self, process: str) -> bool:
        return process in self._stopped

    def _run_once(self) -> None:
        if self._stopped:
            ready = list(self._ready)
            self._ready.clear()
            for handle in ready:
                (self._parked if _process_of(handle) in self._stopped else self._ready).append(handle)
        super()._run_once()  # type: ignore[misc]


def _process_of(handle: asyncio.Handle) -> str:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(_PROCESS, "")


def context_of(process: str) -> Context:
    """Return a context for ``create_task``: the task and all that it starts belong to this process."""
    context = copy_context()
    context.run(_PROCESS.set, process)
    return context


def current_process() -> str:
    """Return the process of the running task; empty for the test itself."""
    return _PROCESS.get()


def the_loop() -> ProcessLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    return loop


def run_processes(main: Coroutine[Any, Any, T], horizon_s: float = 3600.0) -> T:
    """Run a coroutine as ``run_virtual`` does, with processes."""
    with asyncio.Runner(loop_factory=lambda: ProcessLoop(horizon_s)) as runner:
        return runner.run(main)
