"""Ledger of a round's micro-batches in a pipeline: which were given to drivers, and which are still under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.swarm.sample_ranges import Ranges, count, merge, subtract, union


@dataclass(frozen=True)
class Batch:
    """The samples ``start <= s < stop`` of a round, in micro-batches of ``micro`` samples; the last one may be smaller.

    Of anchor version v it is the v-th batch of the run's sequence of samples: what is behind the anchor is all before
    it, whatever was aborted or undone on the way."""

    start: int
    stop: int
    micro: int

    @property
    def ranges(self) -> Ranges:
        return [(self.start, self.stop)]

    def cells(self, ranges: Ranges) -> Ranges:
        """The micro-batches that ``ranges`` (merged, of this batch) lie in."""
        cells: Ranges = []
        for start, stop in ranges:
            at = start - (start - self.start) % self.micro
            if cells:
                at = max(at, cells[-1][1])
            cells += [(one, min(one + self.micro, self.stop)) for one in range(at, stop, self.micro)]
        return cells


def fair_samples(finished: Mapping[str, int], peer: str, left: int, micro: int) -> int:
    """Whole micro-batches, one at least. ``finished``: samples, by driver; ``left``: those that are not."""
    share = finished[peer] / sum(finished.values())
    return max(1, math.ceil(share * left / micro)) * micro


@dataclass
class MicroBatchLedger:
    """Of one round. ``driven``: what has been given to anybody to drive; ``in_flight``: by driver, what it has not said
    to be done since. Two drivers may have the same: the second one was asked as the first stood still. ``finished``:
    how many samples each driver has said to be done, in this round and lately."""

    driven: Ranges = field(default_factory=list)
    in_flight: dict[str, Ranges] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)

    def next_round(self) -> MicroBatchLedger:
        """Nothing is driven yet; how fast everybody was counts half as much as how fast it will be."""
        return MicroBatchLedger(finished={peer: samples // 2 for peer, samples in self.finished.items()})

    def take(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        """``peer`` drives ``ranges`` now, and ``done`` no longer."""
        left = union(subtract(self.in_flight.pop(peer, []), merge(done)), merge(ranges))
        if left:
            self.in_flight[peer] = left
        if done:
            self.finished[peer] = self.finished.get(peer, 0) + count(done)
        self.driven = union(self.driven, merge(ranges))

    def lose(self, peer: str) -> None:
        """It drives nothing any more."""
        self.in_flight.pop(peer, None)
        self.finished.pop(peer, None)

    def fair_samples(self, peer: str, batch: Batch) -> int | None:
        """The most that a driver should have under way: its part, as fast as it has been, of what is left of the batch,
        or the others would wait for it in the end. None while there is nothing to tell by, and once all was given."""
        fresh = count(subtract(batch.ranges, self.driven))
        if not fresh or not self.finished.get(peer):
            return None
        left = fresh + sum(count(ranges) for ranges in self.in_flight.values())
        return fair_samples(self.finished, peer, left, batch.micro)

    def choose(self, batch: Batch, missing: Ranges, stalled: Sequence[str], samples: int) -> Ranges:
        """The next micro-batches to drive, of about so many samples: those that nobody has driven yet; then those that
        some stage misses and nobody is at, but for the ``stalled``. One range each.

        ``missing`` (merged, of the batch): what some stage has no claim on."""
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
