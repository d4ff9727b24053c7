"""Ledger of a round's micro-batches in a pipeline: which were given to drivers, and which are still under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.swarm.sample_ranges import Ranges, count, merge, subtract, union


@dataclass(frozen=True)
class Batch:
    """Samples ``start <= s < stop`` of a round, in micro-batches of ``micro`` samples; the last one may be smaller.

    The round that starts from anchor version v has the v-th batch of the run's sequence of samples: exactly the samples
    before it are in the anchor, whatever was aborted or undone meanwhile."""

    start: int
    stop: int
    micro: int

    @property
    def ranges(self) -> Ranges:
        return [(self.start, self.stop)]

    def cells(self, ranges: Ranges) -> Ranges:
        """Return the micro-batches that ``ranges`` (merged, of this batch) overlap."""
        cells: Ranges = []
        for start, stop in ranges:
            at = start - (start - self.start) % self.micro
            if cells:
                at = max(at, cells[-1][1])
            cells += [(one, min(one + self.micro, self.stop)) for one in range(at, stop, self.micro)]
        return cells


def fair_samples(finished: Mapping[str, int], peer: str, left: int, micro: int) -> int:
    """Return a driver's fair part of the ``left`` samples, in whole micro-batches and at least one. ``finished``: the
    samples that each driver has finished."""
    share = finished[peer] / sum(finished.values())
    return max(1, math.ceil(share * left / micro)) * micro


@dataclass
class MicroBatchLedger:
    """Ledger of one round. ``driven``: samples that were given to any driver; ``in_flight``: by driver, those that it
    has not reported as done; two drivers may have the same samples, if the second was asked because the first had
    stalled. ``finished``: by driver, the number of samples that it has reported as done in this round, and a decaying
    part of those before."""

    driven: Ranges = field(default_factory=list)
    in_flight: dict[str, Ranges] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)

    def next_round(self) -> MicroBatchLedger:
        """Return the ledger of the next round. What drivers have finished so far counts half."""
        return MicroBatchLedger(finished={peer: samples // 2 for peer, samples in self.finished.items()})

    def take(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        """Note that ``peer`` drives ``ranges`` from now on, and has finished ``done``."""
        left = union(subtract(self.in_flight.pop(peer, []), merge(done)), merge(ranges))
        if left:
            self.in_flight[peer] = left
        if done:
            self.finished[peer] = self.finished.get(peer, 0) + count(done)
        self.driven = union(self.driven, merge(ranges))

    def lose(self, peer: str) -> None:
        """Forget a driver that is gone."""
        self.in_flight.pop(peer, None)
        self.finished.pop(peer, None)

    def fair_samples(self, peer: str, batch: Batch) -> int | None:
        """Return the most samples that a driver should have in flight: its part, by its speed so far, of what is left
        of the batch; with more, the others would wait for it in the end. None while its speed is unknown, and once all
        samples were given out."""
        fresh = count(subtract(batch.ranges, self.driven))
        if not fresh or not self.finished.get(peer):
            return None
        left = fresh + sum(count(ranges) for ranges in self.in_flight.values())
        return fair_samples(self.finished, peer, left, batch.micro)

    def choose(self, batch: Batch, missing: Ranges, stalled: Sequence[str], samples: int) -> Ranges:
        """Choose the next micro-batches to drive, one range each, of about ``samples`` samples: those that were never
        driven; else those that some stage is ``missing`` and that no driver has in flight, except ``stalled`` ones.

        ``missing`` (merged, of the batch): samples that are not claimed in every stage."""
        chosen = self._first(batch, subtract(batch.ranges, self.driven), samples)
        if not chosen:
            flying: Ranges = []
            for peer, ranges in self.in_flight.items():
                if peer not in stalled:
                    flying = union(flying, ranges)
            chosen = self._first(batch, subtract(missing, merge(batch.cells(flying))), samples)
        return chosen

    @staticmethod
    def _first(batch: Batch, ranges: Ranges, samples: int) -> Ranges:
        cells = batch.cells(ranges)
        return cells[: -(-samples // batch.micro)]
