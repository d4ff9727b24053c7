"""Partition of a vector: parts on a grid of chunks, sized by what each owner's link can carry."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.swarm.protocol.rounds import MIN_CHUNK_ELEMENTS

CHUNK_ELEMENTS = 2**20
"""4 MiB of float32, for codecs of which nothing else is known. Every chunk costs event loops and kernels some steps,
each of which finds the caches full of it."""

_SMALL_CHUNK_ELEMENTS, _USUAL_CHUNK_ELEMENTS = 2**16, 2**19
"""Below the first a chunk costs more than its bytes do; above the other a slow link is long busy with one."""

_MOST_A_MEMBER, _FEWEST_A_MEMBER = 8, 4
"""Most while nobody knows how slow a link there is; fewest cost processors least, which fast links wait for."""

_CHUNK_S, _MOST_CHUNKS = 0.01, 1024

FAST_BPS = 5e8
"""From there on processors set the pace, and chunks cost them more than they bring."""


def chunk_elements(elements: int, members: int, slowest_bps: float | None = None, most: int = CHUNK_ELEMENTS) -> int:
    """Elements a chunk: ``most``, less for small models so that every member gets a few.

    Less, too, for links that are slow, or may be: every owner's last chunk arrives when all other work is done. As many
    for one member as for another, or equal shares would not be equal. Always a multiple of 4096, so that codec blocks
    never straddle two chunks.
    """
    coarse = math.ceil(elements / (members * _FEWEST_A_MEMBER))
    wanted = min(most, coarse)
    if not slowest_bps:
        fine = math.ceil(elements / (members * _MOST_A_MEMBER))
        wanted = min(wanted, max(fine, _SMALL_CHUNK_ELEMENTS), _USUAL_CHUNK_ELEMENTS)
    elif slowest_bps < FAST_BPS:
        # At a byte an element, as int8 has it; but not so many that the chunks cost more than the link.
        wanted = min(wanted, CHUNK_ELEMENTS, max(int(slowest_bps * _CHUNK_S / 8), math.ceil(elements / _MOST_CHUNKS)))
    a_member = math.ceil(elements / (members * wanted))
    return math.ceil(elements / (members * a_member) / MIN_CHUNK_ELEMENTS) * MIN_CHUNK_ELEMENTS


def owner_shares(bandwidths_bps: Sequence[float | None], can_own: Sequence[bool]) -> list[float]:
    """Each member's share of the elements, summing to 1, such that the slowest member is done as early as can be.

    A member with share w of V bytes sends, and receives, (1 - w) V for the others' parts and (n - 1) w V for its own,
    so it needs (1 + (n - 2) w) V / b seconds at bandwidth b (the objective of Ryabinin et al. 2021, "Moshpit SGD",
    arXiv:2103.03239). The best shares let all owners finish at one moment T, w = (T b - 1) / (n - 2), and leave out
    whoever needs longer than that for the others' parts alone. Unknown bandwidth counts as the median of those that can
    own. When nobody can own, everybody who contributes does: a group of one needs no link.
    """
    n = len(can_own)
    known = sorted(bps for bps, able in zip(bandwidths_bps, can_own, strict=True) if bps and able)
    median = known[len(known) // 2] if known else 1.0
    speeds = {index: bandwidths_bps[index] or median for index in range(n) if can_own[index]}
    if not speeds:
        return [1 / n] * n
    largest = max(speeds.values())
    speeds = {index: speed / largest for index, speed in speeds.items()}
    if n <= 2:  # everybody sends V, however it is shared
        total = sum(speeds.values())
        return [speeds.get(index, 0.0) / total for index in range(n)]
    fastest = sorted(speeds, key=lambda index: (-speeds[index], index))
    together, owners, moment = 0.0, 0, math.inf
    for index in fastest:
        if speeds[index] * moment <= 1.0:
            break
        together += speeds[index]
        owners += 1
        moment = (n - 2 + owners) / together
    shares = {index: (moment * speeds[index] - 1.0) / (n - 2) for index in fastest[:owners]}
    return [max(0.0, shares.get(index, 0.0)) for index in range(n)]


class StandIns:
    """Who reduces a part when its owner fails, for all parts of a plan.

    Whoever owns most comes first, as it has the best link; owners of one part after the other begin with different
    ones, so that the death of one does not fall on the same member as the next. When nobody can own, everybody does.
    """

    def __init__(self, shares: Sequence[float], can_own: Sequence[bool]) -> None:
        able = [index for index, one in enumerate(can_own) if one] or range(len(can_own))
        self._able = sorted(able, key=lambda index: (-shares[index], index))
        self._places = {index: place for place, index in enumerate(self._able)}

    def of(self, owner: int, most: int) -> list[int]:
        """In their order: up to ``most`` of those that can own."""
        place = self._places.get(owner)
        first, others = (owner, len(self._able)) if place is None else (place + 1, len(self._able) - 1)
        return [self._able[(first + step) % len(self._able)] for step in range(min(most, others))]


def split(elements: int, shares: Sequence[float], chunk: int) -> list[tuple[int, int, int]]:
    """Tile ``elements`` into ``(owner, start, stop)`` on the grid of chunks, by largest remainder.

    Owners come in order; one whose share rounds to no chunk is left out.
    """
    chunks = math.ceil(elements / chunk)
    exact = [share * chunks for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: chunks - sum(counts)]:
        counts[index] += 1
    parts, at = [], 0
    for owner, count in enumerate(counts):
        if count:
            parts.append((owner, at * chunk, min((at + count) * chunk, elements)))
            at += count
    return parts
