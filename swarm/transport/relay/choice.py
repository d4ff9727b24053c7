"""Choice among several relays, by the measured round trip and by what they say that they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.swarm.protocol.types import Address, RelayLoad

_BASE_S = 0.005
"""Added to each round trip: that of 1 ms is no better than that of 2 ms, but a relay without load is."""

_LEAST_ROOM = 0.02
_STICKY = 0.5
"""Factor for relays in use, and once more for the first: another one has to be twice as good, as a change costs
everybody's links a reconnect."""


@dataclass(frozen=True)
class RelayMeasure:
    """Round trip to a relay, and its load."""

    trip_s: float
    load: RelayLoad


def choose(measures: Mapping[Address, RelayMeasure | None], used: Sequence[Address], most: int) -> tuple[Address, ...]:
    """Choose the relays to be registered with, the best one first.

    ``measures``: in the order of the run's list, which decides between equal ones; None for a relay that does not
    answer, which is taken only where there are too few others: it may come back. ``used``: those in use, in their
    order. What a relay says of its load may be a lie: it then gets more or fewer clients, and no more than that."""

    def cost(relay: Address) -> tuple[bool, float]:
        measure = measures[relay]
        if measure is None:
            return True, 0.0
        cost = (measure.trip_s + _BASE_S) / max(_LEAST_ROOM, 1.0 - measure.load.busy)
        stays = _STICKY**2 if relay in used[:1] else _STICKY if relay in used else 1.0
        return False, cost * stays

    return tuple(sorted(measures, key=cost)[:most])
