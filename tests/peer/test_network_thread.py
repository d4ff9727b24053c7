"""Tests of network_thread: calls, interrupts, failures and the end of the thread."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.peer.network_thread import Interrupted, NetworkThread


class Resource:
    """``fail`` makes the root task fail; ``left`` says that its context ended."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.failing = asyncio.Event()
        self.left = False

    async def fail(self) -> None:
        self.failing.set()

    async def root(self) -> None:
        await self.failing.wait()
        raise ConnectionError("the root task failed")


@asynccontextmanager
async def opened() -> AsyncIterator[Resource]:
    resource = Resource()
    async with asyncio.TaskGroup() as tasks:
        root = tasks.create_task(resource.root())
        try:
            yield resource
        finally:
            resource.left = True
            root.cancel()


@pytest.fixture
def network() -> Iterator[NetworkThread[Resource]]:
    made = NetworkThread(opened)
    made.start()
    yield made
    made.stop()


async def add(one: int, other: int) -> int:
    await asyncio.sleep(0)
    return one + other


async def raise_it(error: BaseException) -> None:
    raise error


def later(seconds: float, work: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def test_calls_run_over_there_and_return_here(network: NetworkThread[Resource]) -> None:
    assert network.call(add(1, 2)) == 3
    assert network.call(add(1, 2), interruptible=True) == 3
    assert network.resource.thread != threading.get_ident()


@pytest.mark.parametrize("interruptible", [False, True])
def test_exceptions_reach_the_caller_and_end_nothing(network: NetworkThread[Resource], interruptible: bool) -> None:
    with pytest.raises(ValueError, match="mine"):
        network.call(raise_it(ValueError("mine")), interruptible=interruptible)
    assert network.failure is None
    assert network.call(add(2, 2)) == 4


def test_a_failure_to_open_is_raised_by_start() -> None:
    @asynccontextmanager
    async def closed() -> AsyncIterator[Resource]:
        raise PermissionError("no")
        yield Resource()

    network = NetworkThread(closed)
    with pytest.raises(PermissionError, match="no"):
        network.start()
    network.stop()
    with pytest.raises(PermissionError):
        network.call(add(1, 1))


def test_stopping_leaves_the_context() -> None:
    network = NetworkThread(opened)
    resource = network.start()
    assert not resource.left
    network.stop()
    assert resource.left
    assert network.failure is None
    network.stop()
    with pytest.raises(RuntimeError, match="not running"):
        network.call(add(1, 1))
    network.post(lambda: pytest.fail("nobody is there to do it"))


@pytest.mark.parametrize("interruptible", [False, True])
def test_a_failing_root_task_wakes_callers(interruptible: bool) -> None:
    network = NetworkThread(opened)
    resource = network.start()
    timer = later(0.05, lambda: network.post(resource.failing.set))
    with pytest.raises(ConnectionError, match="root task"):
        network.call(asyncio.sleep(60), interruptible=interruptible)
    timer.join()
    assert isinstance(network.failure, ConnectionError), "not a group around it"
    with pytest.raises(ConnectionError):
        network.call(add(1, 1))
    network.stop()


def test_no_call_is_left_hanging_whenever_the_end_comes() -> None:
    """Calls from another thread race with the end of the loop: each returns or raises, none waits for ever."""
    for _ in range(60):
        network = NetworkThread(opened)
        resource = network.start()
        outcomes: list[object] = []

        def keep_calling(network: NetworkThread[Resource] = network, outcomes: list[object] = outcomes) -> None:
            try:
                while True:
                    outcomes.append(network.call(add(1, 1)))
            except (ConnectionError, RuntimeError) as error:
                outcomes.append(error)

        caller = threading.Thread(target=keep_calling, daemon=True)
        caller.start()
        time.sleep(0.002)
        network.post(resource.failing.set)
        caller.join(10)
        assert not caller.is_alive()
        assert isinstance(outcomes[-1], ConnectionError)
        network.stop()


def test_a_call_that_came_too_late_to_begin_is_not_left_hanging() -> None:
    """It was handed to the loop after its last turn."""
    network = NetworkThread(opened)
    resource = network.start()

    async def never_begins() -> None:
        pytest.fail("the loop had ended")

    coroutine = never_begins()

    def end_at_once() -> None:
        loop = asyncio.get_running_loop()
        resource.failing.set()
        original = loop.close

        def close() -> None:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
            network._calls.add(future)
            futures.append(future)
            original()

        loop.close = close  # type: ignore[method-assign]

    futures: list[Any] = []
    network.post(end_at_once)
    network._thread.join(10)
    assert futures
    assert futures[0].done()
    coroutine.close()
    network.stop()


def test_an_interrupt_ends_what_allows_it(network: NetworkThread[Resource]) -> None:
    cancelled = threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    timer = later(0.05, network.interrupt)
    start = time.monotonic()
    with pytest.raises(Interrupted):
        network.call(long(), interruptible=True)
    timer.join()
    assert time.monotonic() - start < 10
    assert cancelled.wait(10)
    # From now on, too; but not what has to be done in spite of it.
    with pytest.raises(Interrupted):
        network.call(asyncio.sleep(60), interruptible=True)
    assert network.call(add(3, 3)) == 6


def test_what_was_told_is_done_in_the_loop(network: NetworkThread[Resource]) -> None:
    done = threading.Event()
    where: list[int] = []

    def note() -> None:
        where.append(threading.get_ident())
        done.set()

    network.post(note)
    assert done.wait(10)
    assert where == [network.resource.thread]


def test_the_loop_may_tell_itself(network: NetworkThread[Resource]) -> None:
    done = threading.Event()

    async def tell() -> None:
        network.post(done.set)

    network.call(tell())
    assert done.wait(10)
