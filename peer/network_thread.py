"""Network thread with an asyncio loop and one root task: the one place where the training thread meets the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from shoal.swarm.aio import leaf

_INTERRUPT_POLL_S = 0.2


class Interrupted(Exception):
    """The wait was given up because somebody asked to stop; not an error."""


T = TypeVar("T")
R = TypeVar("R")


class NetworkThread(Generic[R]):
    """Runs ``open()``'s context in its own thread from ``start`` to ``stop``; ``resource`` is what it yields.

    Everything asynchronous happens in there; the training thread only submits coroutines and waits for them.
    """

    def __init__(self, open: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        self._open = open
        self._thread = threading.Thread(target=self._main, name="shoal-network", daemon=True)
        self._started: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        """Held to hand something to the loop, and to say that it takes no more."""
        self._calls: set[concurrent.futures.Future[Any]] = set()

    @property
    def resource(self) -> R:
        """Value that the context yielded; after ``start``."""
        return self._started.result(timeout=0)

    def start(self) -> R:
        """Start the thread; returns the resource or raises what opening it raised."""
        self._thread.start()
        return self._started.result()

    def interrupt(self) -> None:
        """Make the calls that allow it, now and later, raise ``Interrupted``; from any thread or signal handler."""
        self._interrupted.set()

    def call(self, coroutine: Coroutine[Any, Any, T], *, interruptible: bool | Callable[[], bool] = False) -> T:
        """Run it in the loop and wait. Raises what it raises, or what ended the network thread meanwhile.

        ``interruptible``: whether ``interrupt`` may end the wait, or a function that says whether it may now."""
        return self.wait_for(self.submit(coroutine), interruptible=interruptible)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run it in the loop beside the training thread, which has to ``finish`` it. Raises what ended the thread."""
        with self._lock:
            loop = self._loop
            if loop is None:
                coroutine.close()
                raise self._failure or _not_running()
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
            self._calls.add(future)
        return future

    def wait_for(self, future: concurrent.futures.Future[T], *, interruptible: bool | Callable[[], bool] = False) -> T:
        """The second half of ``call``."""
        try:
            return self._wait(future, interruptible)
        except (concurrent.futures.CancelledError, asyncio.CancelledError):
            if self._loop is None or self._failure is not None:
                raise (self._failure or _not_running()) from None
            raise
        except (KeyboardInterrupt, Interrupted):
            future.cancel()
            raise
        finally:
            self._calls.discard(future)

    def _wait(self, future: concurrent.futures.Future[T], interruptible: bool | Callable[[], bool]) -> T:
        # A plain lock: Ctrl-C may strike anywhere, and within a condition's methods it would leave the condition
        # locked, with the loop waiting on it for ever.
        finished = threading.Lock()
        finished.acquire()
        future.add_done_callback(lambda _: finished.release())
        wait_s = 0.0
        while not finished.acquire(timeout=wait_s):
            if self._interrupted.is_set() and (interruptible() if callable(interruptible) else interruptible):
                raise Interrupted
            wait_s = _INTERRUPT_POLL_S
        return future.result()

    def post(self, callback: Callable[[], object]) -> None:
        """Run a plain function in the loop, soon; does nothing once the thread has ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the thread before its time, or None."""
        return self._failure

    def stop(self) -> None:
        """Leave the context and join the thread."""
        stop = self._stop
        if stop is not None:
            self.post(stop.set)
        self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._failure = leaf(error)
        # The loop is closed: what it was given last has not even begun.
        if not self._started.done():
            self._started.set_exception(self._failure or _not_running())
        for call in list(self._calls):
            call.cancel()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._open() as resource:
                self._started.set_result(resource)
                await self._stop.wait()
        except BaseException as error:
            # Before the loop cancels the calls that are under way, so that they know why.
            self._failure = leaf(error)
            raise
        finally:
            with self._lock:
                self._loop = None


def _not_running() -> RuntimeError:
    return RuntimeError("the network thread is not running")
