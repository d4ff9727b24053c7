"""A driver's own samples: asked for in time, cut into micro-batches, reported when they are done. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from shoal.swarm.pipeline.engine.effects import AskToDrive, MicroBatch, as_range
from shoal.swarm.sample_ranges import Ranges, merge, subtract


def cut_micro_batches(round_number: int, ranges: Ranges, samples: int) -> list[MicroBatch]:
    """On the multiples of ``samples``: samples that are driven again are cut as they were, however they are leased."""
    pieces = []
    for start, stop in ranges:
        at = start
        while at < stop:
            end = min(stop, (at // samples + 1) * samples)
            pieces.append(MicroBatch(round_number, at, end))
            at = end
    return pieces


class MicroBatchSource:
    """Of one round. One micro-batch is asked for ahead, so that a place that gets free does not wait for the answer."""

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
        """Whether there is something to drive that was not begun."""
        return bool(self._queue)

    def ask(self, free: int, now_s: float) -> list[AskToDrive]:
        """``free``: places for a forward. Nothing while an answer is due, or soon after there was nothing to do."""
        samples = max(0, free + 1 - len(self._queue)) * self._samples
        is_time = now_s >= self._ask_again_s or bool(self._done)
        if self._asked is not None or self.is_closing or not samples or not is_time:
            return []
        self._asked = AskToDrive(self.round, samples, tuple(self._done))
        return [self._asked]

    def granted(self, ask: AskToDrive, ranges: Ranges, in_work: Container[MicroBatch], now_s: float) -> None:
        if ask != self._asked:
            return
        self._asked = None
        self._done = subtract(self._done, merge(ask.done))
        self._ask_again_s = now_s if ranges else now_s + self._retry_s
        for micro_batch in cut_micro_batches(self.round, merge(ranges), self._samples):
            if micro_batch not in self._queue and micro_batch not in in_work:
                self._queue.append(micro_batch)

    def next(self, in_work: Container[MicroBatch]) -> MicroBatch | None:
        """What to drive now. Others' attempts at the same micro-batch, under way here, end first."""
        for micro_batch in self._queue:
            if micro_batch not in in_work:
                self._queue.remove(micro_batch)
                return micro_batch
        return None

    def finished(self, micro_batch: MicroBatch) -> None:
        self._done = merge([*subtract(self._done, as_range(micro_batch)), *as_range(micro_batch)])
