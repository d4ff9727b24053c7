"""Training threads beside a virtual event loop: the loop stands while one of them works, and so does the clock.

Each of them runs in turns, from one wait for the network to the next, and each turn is a callback of its process: a
process that is stopped has none, and one that is killed never has one again."""

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from typing import Any, TypeVar

from tests.fakes.processes import context_of, the_loop

from shoal.peer.network_thread import NetworkThread

T = TypeVar("T")
R = TypeVar("R")


class Killed(BaseException):
    """Ends a dead process's thread when the test is over."""


class TrainingThread:
    """``failure``: what ended it before its time. ``is_over`` when it has ended."""

    _own = threading.local()

    def __init__(self, process: str, body: Callable[[], None]) -> None:
        self.is_over = False
        self.is_killed = False
        self.failure: BaseException | None = None
        self._loop = the_loop()
        self._process = process
        self.context: Context = context_of(process)
        self._body = body
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self.context.copy().run, args=(self._main,), daemon=True)
        self._thread.start()
        self.go_on()

    @classmethod
    def current(cls) -> "TrainingThread":
        thread: TrainingThread = cls._own.thread
        return thread

    def go_on(self) -> None:
        """Give the thread a turn soon; callable from any thread."""
        self._loop.call_soon_threadsafe(self._turn, context=self.context)

    def end(self) -> None:
        """End the thread of a process that was killed."""
        self.is_killed = True
        while not self.is_over:
            self._turn()
        self._thread.join()

    def _turn(self) -> None:
        if not self.is_over:
            self._may_go.release()
            self._waits.acquire()

    def wait_for(self, future: futures.Future[Any]) -> None:
        """Called in the thread: let the loop go on until there is a result."""
        if not future.done():
            future.add_done_callback(lambda _: self.go_on())
        while not future.done():
            self._pause()

    def sleep(self, seconds: float) -> None:
        """Called in the thread: sleep on the loop's clock."""
        self.wait_for(asyncio.run_coroutine_threadsafe(asyncio.sleep(seconds), self._loop))

    def wait_if_stopped(self) -> None:
        """Called in the thread: a process that was just stopped or killed goes on in its next turn, or never."""
        if self._loop.is_stopped(self._process):
            self.go_on()
            self._pause()

    def _pause(self) -> None:
        if self.is_killed:
            raise Killed
        self._waits.release()
        self._may_go.acquire()
        if self.is_killed:
            raise Killed

    def _main(self) -> None:
        TrainingThread._own.thread = self
        self._may_go.acquire()
        try:
            if not self.is_killed:
                self._body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.failure = error
        self.is_over = True
        self._waits.release()


class SharedLoop(NetworkThread[R]):
    """A network thread without a thread: its loop is the test's. Calls come from ``TrainingThread``s."""

    def __init__(self, open: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        super().__init__(open)
        self._test_loop = TrainingThread.current()._loop
        self._running: futures.Future[None] | None = None

    def start(self) -> R:
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._test_loop)
        self._running.add_done_callback(self._ended)
        TrainingThread.current().wait_for(self._started)
        return self._started.result()

    def stop(self) -> None:
        assert self._running is not None
        if self._stop is not None:
            self.post(self._stop.set)
        TrainingThread.current().wait_for(self._running)

    def _ended(self, running: futures.Future[None]) -> None:
        if not self._started.done():
            self._started.set_exception(self._failure or RuntimeError("it could not be opened"))
        for call in list(self._calls):
            call.cancel()

    def _wait(self, future: "futures.Future[T]", interruptible: bool | Callable[[], bool]) -> T:
        TrainingThread.current().wait_for(future)
        return future.result()

    def post(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            self._test_loop.call_soon_threadsafe(callback, context=copy_context())
