"""Who reduces which elements: parts on a grid of chunks, sized by what each member's link can carry."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_CHUNK_ELEMENTS = 2**18
"""1 MiB of float32."""

MIN_CHUNK_ELEMENTS = 2**12
_CHUNKS_PER_MEMBER = 8


def chunk_elements(elements: int, members: int) -> int:
    """Elements a chunk: 1 MiB of float32, less for small models so that every member gets several.

    Always a multiple of 4096, so that codec blocks never straddle two chunks.
    """
    fair = math.ceil(elements / (members * _CHUNKS_PER_MEMBER))
    rounded = math.ceil(fair / MIN_CHUNK_ELEMENTS) * MIN_CHUNK_ELEMENTS
    return min(MAX_CHUNK_ELEMENTS, max(MIN_CHUNK_ELEMENTS, rounded))


def owner_shares(bandwidths_bps: Sequence[float | None], can_own: Sequence[bool]) -> list[float]:
    """Each member's share of the elements, summing to 1.

    In proportion to bandwidth: every owner moves its part once for each other member, so this is what lets all
    finish together. Unknown bandwidth counts as the median of those that can own; less than an eighth of it, or
    unreachable, owns nothing. When nobody can own, everybody who contributes does: a group of one needs no link.
    """
    known = sorted(bps for bps, able in zip(bandwidths_bps, can_own, strict=True) if bps and able)
    median = known[len(known) // 2] if known else 1.0
    weights = [
        0.0 if not able or (bps and bps < median / 8) else (bps or median)
        for bps, able in zip(bandwidths_bps, can_own, strict=True)
    ]
    total = sum(weights)
    if total == 0:
        return [1 / len(weights)] * len(weights)
    return [weight / total for weight in weights]


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
