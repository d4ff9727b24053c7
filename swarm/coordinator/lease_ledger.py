"""Ledger of samples: which are leased, returned or committed, and how far each epoch is covered."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.swarm.protocol.types import MAX_EPOCHS, Coverage
from shoal.swarm.sample_ranges import Ranges, count, covers, merge, subtract, within

# The ledger -------------------------------------------------------------------------------------------------

MAX_FRAGMENTS = 256
"""Most ranges in one lease: well below ``MAX_RANGES``, which a member's whole work has to fit into."""


@dataclass
class LeaseLedger:
    """Ledger of samples: each one below ``fresh`` is committed, in the pool, or held by exactly one peer."""

    fresh: int = 0
    pool: Ranges = field(default_factory=list)
    held: dict[str, Ranges] = field(default_factory=dict)
    _counts: dict[str, int] = field(init=False, compare=False, repr=False)
    """Number of samples that each peer holds."""

    def __post_init__(self) -> None:
        self._counts = {peer: count(ranges) for peer, ranges in self.held.items()}

    def outstanding(self) -> int:
        """Return the number of samples that peers hold."""
        return sum(self._counts.values())

    def samples_of(self, peer: str) -> int:
        """Return the number of samples that a peer holds."""
        return self._counts.get(peer, 0)

    def choose(self, samples: int) -> Ranges:
        """Return the next ``samples`` to lease, returned ones first; fewer where they are in too many pieces."""
        chosen: Ranges = []
        missing = samples
        for start, stop in self.pool[:MAX_FRAGMENTS]:
            take = min(stop - start, missing)
            if take:
                chosen.append((start, start + take))
                missing -= take
        if missing and len(self.pool) < MAX_FRAGMENTS:
            chosen.append((self.fresh, self.fresh + missing))
        return merge(chosen)

    def grant(self, peer: str, ranges: Ranges) -> None:
        """Give ``ranges`` from the pool, or new ones, to ``peer``; samples that new ones skip go to the pool."""
        fresh = max([self.fresh, *(stop for _, stop in ranges)])
        self.pool = subtract(merge([*self.pool, (self.fresh, fresh)]), merge(ranges))
        self.fresh = fresh
        self._hold(peer, merge([*self.held.get(peer, []), *ranges]))

    def holds(self, peer: str, ranges: Ranges) -> bool:
        """Whether ``peer`` holds all of them."""
        return covers(self.held.get(peer, []), merge(ranges))

    def commit(self, peer: str, ranges: Ranges) -> None:
        """Note that samples of ``peer`` are in the anchor."""
        self._take(peer, ranges)

    def uncommit(self, ranges: Ranges) -> None:
        """Return samples that are no longer in the anchor to the pool, and everything that peers hold."""
        held = [one for mine in self.held.values() for one in mine]
        self.pool, self.held = merge([*self.pool, *ranges, *held]), {}
        self._counts.clear()

    def give_back(self, peer: str, keep: Ranges | None = None) -> None:
        """Return what ``peer`` holds to the pool, all but ``keep``."""
        held = self.held.get(peer, [])
        free = subtract(held, merge(keep or []))
        self._take(peer, free)
        self.pool = merge([*self.pool, *free])

    def _take(self, peer: str, ranges: Ranges) -> None:
        self._hold(peer, subtract(self.held.get(peer, []), merge(ranges)))

    def _hold(self, peer: str, ranges: Ranges) -> None:
        if ranges:
            self.held[peer], self._counts[peer] = ranges, count(ranges)
        else:
            self.held.pop(peer, None)
            self._counts.pop(peer, None)


# Coverage of epochs -----------------------------------------------------------------------------------------


def epochs_covered(leases: LeaseLedger, samples: int) -> int:
    """Return how many epochs, from the first on, have all their samples committed."""
    open_from = [ranges[0][0] for ranges in (leases.pool, *leases.held.values()) if ranges]
    return min([leases.fresh, *open_from]) // samples


def coverage_of(leases: LeaseLedger, samples: int) -> tuple[Coverage, ...]:
    """Return the coverage of the newest epochs, oldest first; as many as a status has room for."""
    newest = max(0, leases.fresh - 1) // samples
    return tuple(_one(leases, epoch, samples) for epoch in range(max(0, newest + 1 - MAX_EPOCHS), newest + 1))


def _one(leases: LeaseLedger, epoch: int, samples: int) -> Coverage:
    start, stop = epoch * samples, (epoch + 1) * samples
    leased = sum(within(ranges, start, stop) for ranges in leases.held.values())
    returned = within(leases.pool, start, stop)
    given_out = min(leases.fresh, stop) - start
    return Coverage(
        epoch=epoch, samples=samples, committed=max(0, given_out) - leased - returned, leased=leased, returned=returned
    )


@dataclass
class RetrainedSamples:
    """Samples that have to be trained on once more, until their epoch is covered.

    ``lost``: their contributor died in its round; ``undone``: their round was undone."""

    lost: Ranges = field(default_factory=list)
    undone: Ranges = field(default_factory=list)

    def lose(self, ranges: Ranges) -> None:
        self.lost = merge([*self.lost, *subtract(merge(ranges), self.lost)])

    def undo(self, ranges: Ranges) -> None:
        self.undone = merge([*self.undone, *subtract(merge(ranges), self.undone)])

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return how many of the samples ``start <= s < stop`` are lost, and how many undone."""
        return within(self.lost, start, stop), within(self.undone, start, stop)

    def forget(self, stop: int) -> None:
        """Forget the samples below ``stop``: all are committed."""
        self.lost, self.undone = subtract(self.lost, [(0, stop)]), subtract(self.undone, [(0, stop)])
