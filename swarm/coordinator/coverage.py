"""How far each epoch is: which of its samples are committed, with somebody, or free again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.swarm.coordinator.leases import LeaseLedger, Ranges, merge, subtract, within
from shoal.swarm.protocol.messages import MAX_EPOCHS, Coverage


def epochs_covered(leases: LeaseLedger, samples: int) -> int:
    """So many epochs, from the first on, have all their samples committed."""
    open_from = [ranges[0][0] for ranges in (leases.pool, *leases.held.values()) if ranges]
    return min([leases.fresh, *open_from]) // samples


def coverage_of(leases: LeaseLedger, samples: int) -> tuple[Coverage, ...]:
    """Of the newest epoch that was begun and of those before it, the oldest first; as many as a status has room for."""
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
class Again:
    """Samples that were trained on and have to be once more: ``lost`` as their contributor died in its round,
    ``undone`` as their round was. Each once, until its epoch is covered."""

    lost: Ranges = field(default_factory=list)
    undone: Ranges = field(default_factory=list)

    def lose(self, ranges: Ranges) -> None:
        self.lost = merge([*self.lost, *subtract(merge(ranges), self.lost)])

    def undo(self, ranges: Ranges) -> None:
        self.undone = merge([*self.undone, *subtract(merge(ranges), self.undone)])

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """How many lost ones and undone ones are among the samples ``start <= s < stop``."""
        return within(self.lost, start, stop), within(self.undone, start, stop)

    def forget(self, stop: int) -> None:
        """All samples below ``stop`` are committed."""
        self.lost, self.undone = subtract(self.lost, [(0, stop)]), subtract(self.undone, [(0, stop)])
