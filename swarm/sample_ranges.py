"""Ranges of the run's endless sample sequence: set operations, counting, and their form in messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from shoal.swarm.protocol.types import SampleRange

Ranges = list[tuple[int, int]]


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, without empty ones, neighbours joined. Ranges must not overlap."""
    merged: Ranges = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def subtract(ranges: Ranges, taken: Ranges) -> Ranges:
    """``ranges`` without ``taken``; both merged."""
    left: Ranges = []
    for start, stop in ranges:
        at = start
        for other_start, other_stop in taken:
            if other_stop <= at or other_start >= stop:
                continue
            if other_start > at:
                left.append((at, other_start))
            at = max(at, other_stop)
        if at < stop:
            left.append((at, stop))
    return merge(left)


def covers(ranges: Ranges, wanted: Ranges) -> bool:
    """Whether every sample of ``wanted`` lies in ``ranges``."""
    return not subtract(wanted, ranges)


def overlap(ranges: Ranges, others: Ranges) -> Ranges:
    """What lies in both; both merged."""
    return subtract(ranges, subtract(ranges, others))


def union(ranges: Ranges, others: Ranges) -> Ranges:
    """What lies in one of them or in both; both merged."""
    return merge([*ranges, *subtract(others, ranges)])


def is_tidy(ranges: Ranges) -> bool:
    """Whether no range is empty and no sample is named twice, so that ``count`` counts samples."""
    ordered = sorted(ranges)
    return all(start < stop for start, stop in ordered) and all(
        one[1] <= other[0] for one, other in itertools.pairwise(ordered)
    )


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """Samples in all the ranges."""
    return sum(stop - start for start, stop in ranges)


def from_wire(ranges: Sequence[SampleRange]) -> Ranges:
    return [(one.start, one.stop) for one in ranges]


def within(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> int:
    """How many of their samples lie in ``start <= s < stop``."""
    return sum(max(0, min(other_stop, stop) - max(other_start, start)) for other_start, other_stop in ranges)


def to_wire(ranges: Iterable[tuple[int, int]]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(start=start, stop=stop) for start, stop in ranges)
