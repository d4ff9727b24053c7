"""Micro-batches that a peer of stage 0 drives: samples requested ahead, cut, and reported when they are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from shoal.swarm.pipeline.engine.effects import AskToDrive, MicroBatch, as_range
from shoal.swarm.sample_ranges import Ranges, merge, subtract


def cut_micro_batches(round_number: int, ranges: Ranges, samples: int) -> list[MicroBatch]:
    """Cut ranges at the multiples of ``samples``, so that samples driven again are cut as before, however leased."""
    pieces = []
    for start, stop in ranges:
        at = start
        while at < stop:
            end = min(stop, (at // samples + 1) * samples)
            pieces.append(MicroBatch(round_number, at, end))
            at = end
    return pieces


class MicroBatchSource:
    """Source of one round's micro-batches; it asks for one ahead, so that a free slot need not wait for the answer."""

    def __init__(self, round_number: int, samples: int, retry_s: float) -> None:
        self.round = round_number
        self.is_closing = False
        self._samples = samples
        self._retry_s = retry_s
        self._queue: deque[MicroBatch] = deque()
        self._done: Ranges = []
        self._asked: AskToDrive | None = None
        self._ask_again_s = 0.0

    @property
    def has_more(self) -> bool:
        """Whether a micro-batch waits to be begun."""
        return bool(self._queue)

    def ask(self, free: int, now_s: float) -> list[AskToDrive]:
        """Request to make now: none while an answer is due, nor soon after an empty one.

        ``free``: slots for a forward.
        """
        samples = max(0, free + 1 - len(self._queue)) * self._samples
        is_time = now_s >= self._ask_again_s or bool(self._done)
        if self._asked is not None or self.is_closing or not samples or not is_time:
            return []
        self._asked = AskToDrive(self.round, samples, tuple(self._done))
        return [self._asked]

    def granted(self, ask: AskToDrive, ranges: Ranges, in_work: Container[MicroBatch], now_s: float) -> None:
        """Take in the answer to ``ask``; micro-batches ``in_work`` or queued already are not queued again."""
        if ask != self._asked:
            return
        self._asked = None
        self._done = subtract(self._done, merge(ask.done))
        self._ask_again_s = now_s if ranges else now_s + self._retry_s
        for micro_batch in cut_micro_batches(self.round, merge(ranges), self._samples):
            if micro_batch not in self._queue and micro_batch not in in_work:
                self._queue.append(micro_batch)

    def next(self, in_work: Container[MicroBatch]) -> MicroBatch | None:
        """Next micro-batch to drive. One that is under way here for another driver has to end first."""
        for micro_batch in self._queue:
            if micro_batch not in in_work:
                self._queue.remove(micro_batch)
                return micro_batch
        return None

    def finished(self, micro_batch: MicroBatch) -> None:
        """Have the next request report this micro-batch as done."""
        self._done = merge([*subtract(self._done, as_range(micro_batch)), *as_range(micro_batch)])
