"""Streams of a device for tests on a CPU: copies happen later, in a thread, as a GPU's copy engines do them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shoal.peer.training.device_streams import Mark, RingStreams


class QueueMark:
    """End of what was queued before it."""

    def __init__(self, done: Future[float]) -> None:
        self.done = done

    def wait(self) -> None:
        self.done.result()

    def is_reached(self) -> bool:
        return self.done.done()

    def seconds_since(self, earlier: QueueMark) -> float:
        return self.done.result() - earlier.done.result()


class ThreadQueue:
    """Queue that a thread works off, each copy when ``may_copy`` lets it."""

    def __init__(self, may_copy: threading.Event | None = None) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._may_copy = may_copy
        self.copied = 0

    def follow(self, mark: Mark) -> None:
        self._thread.submit(mark.wait)

    def copy(self, target: Tensor, source: Tensor) -> QueueMark:
        assert (target.shape, target.dtype) == (source.shape, source.dtype)

        def work() -> float:
            if self._may_copy is not None:
                self._may_copy.wait(10)
            target.copy_(source)
            self.copied += 1
            return time.perf_counter()

        return QueueMark(self._thread.submit(work))

    def mark(self) -> QueueMark:
        return QueueMark(self._thread.submit(time.perf_counter))


class InlineCompute:
    """Computations of the calling thread, which are done when they are queued."""

    def mark(self) -> QueueMark:
        done: Future[float] = Future()
        done.set_result(time.perf_counter())
        return QueueMark(done)

    def follow(self, mark: Mark) -> None:
        mark.wait()


def thread_streams(
    outgoing: ThreadQueue | None = None, incoming: ThreadQueue | None = None
) -> tuple[RingStreams, ThreadQueue, ThreadQueue]:
    """Make the streams of a GPU out of threads and the machine's memory."""
    out, into = outgoing or ThreadQueue(), incoming or ThreadQueue()
    return RingStreams(torch.device("cpu"), InlineCompute(), out, into, pin_memory=False), out, into
