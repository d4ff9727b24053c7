"""An event loop whose clock jumps: when nothing is ready, it is at once the time of the next timer."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """Raised when nothing will ever happen again, or the horizon is passed."""


class _Selector(selectors.SelectSelector):
    def __init__(self, horizon_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self.horizon_s = horizon_s

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Stuck(f"at {self.now_s:.1f} s nobody waits for anything that can come")
        self.now_s += max(timeout, 0.0)
        if self.now_s > self.horizon_s:
            self.horizon_s = float("inf")  # once: what is cancelled now may take its time
            raise Stuck(f"still not done after {self.now_s:.0f} virtual seconds")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A deterministic event loop: no sockets, no threads (executors run inline), no time but its own."""

    def __init__(self, horizon_s: float) -> None:
        self._virtual = _Selector(horizon_s)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits it, as an executor does
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T], horizon_s: float = 3600.0) -> T:
    """Run a coroutine as ``asyncio.run`` does, on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(horizon_s)) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], object], step_s: float = 0.001) -> None:
    """Poll until the condition holds; time is free here."""
    while True:
        if condition():
            return
        await asyncio.sleep(step_s)
