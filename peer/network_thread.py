"""Network thread, which runs an asyncio loop, and the calls with which the training thread uses it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from shoal.swarm.aio import leaf
from shoal.swarm.system import run_loop

_INTERRUPT_POLL_S = 0.2


class Interrupted(Exception):
    """A wait ended early because this peer was asked to stop; not an error."""


T = TypeVar("T")
R = TypeVar("R")


class NetworkThread(Generic[R]):
    """Thread that runs an asyncio loop inside the context ``open()``, from ``start`` to ``stop``.

    Everything asynchronous happens on this thread; the training thread submits coroutines and waits for them.
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
        """Guards submissions to the loop against its end."""
        self._calls: set[concurrent.futures.Future[Any]] = set()

    @property
    def resource(self) -> R:
        """Value that the context yields; after ``start``."""
        return self._started.result(timeout=0)

    def start(self) -> R:
        """Start the thread and return the resource; raises the error of opening it."""
        self._thread.start()
        return self._started.result()

    def interrupt(self) -> None:
        """Make all interruptible waits, now and later, raise ``Interrupted``; from any thread or signal handler."""
        self._interrupted.set()

    def call(self, coroutine: Coroutine[Any, Any, T], *, interruptible: bool | Callable[[], bool] = False) -> T:
        """Run a coroutine on the loop and wait for its result.

        ``interruptible``: whether ``interrupt`` may end the wait, or a function that returns whether it may now. Raises
        the coroutine's error, ``Interrupted``, or the error that ended the thread.
        """
        return self.wait_for(self.submit(coroutine), interruptible=interruptible)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin a coroutine on the loop; ``wait_for`` its result later. Raises the error that ended the thread."""
        with self._lock:
            loop = self._loop
            if loop is None:
                coroutine.close()
                raise self._failure or _not_running()
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
            self._calls.add(future)
        return future

    def wait_for(self, future: concurrent.futures.Future[T], *, interruptible: bool | Callable[[], bool] = False) -> T:
        """Wait for a submitted coroutine; raises as ``call``. An interrupted wait cancels the coroutine."""
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
        # A plain lock, because Ctrl-C may strike anywhere: inside the methods of a condition it would leave the
        # condition locked, and the loop would wait for it for ever.
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
        """Run a function on the loop soon, without waiting; does nothing once the thread has ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the thread before ``stop``, or None."""
        return self._failure

    def stop(self) -> None:
        """Leave the context and join the thread."""
        stop = self._stop
        if stop is not None:
            self.post(stop.set)
        self._thread.join()

    def _main(self) -> None:
        try:
            run_loop(self._run())
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._failure = leaf(error)
        # The loop is closed; calls submitted last have not even begun.
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
            # Before the loop cancels the pending calls, so that these raise this error.
            self._failure = leaf(error)
            raise
        finally:
            with self._lock:
                self._loop = None


def _not_running() -> RuntimeError:
    return RuntimeError("the network thread is not running")
