"""Which micro-batches of a round are driven through the stages, and by whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.swarm.coordinator.leases import Ranges, merge, subtract, union


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


@dataclass
class Drives:
    """Of one round. ``driven``: what has been given to anybody to drive; ``in_flight``: by driver, what it has not said
    to be done since. Two drivers may have the same: the second one was asked as the first stood still."""

    driven: Ranges = field(default_factory=list)
    in_flight: dict[str, Ranges] = field(default_factory=dict)

    def take(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        """``peer`` drives ``ranges`` now, and ``done`` no longer."""
        left = union(subtract(self.in_flight.get(peer, []), merge(done)), merge(ranges))
        self.lose(peer)
        if left:
            self.in_flight[peer] = left
        self.driven = union(self.driven, merge(ranges))

    def lose(self, peer: str) -> None:
        """It drives nothing any more."""
        self.in_flight.pop(peer, None)

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
