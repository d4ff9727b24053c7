"""Ranges of the run's endless sample sequence: set operations, counting, and conversion to and from messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from shoal.swarm.protocol.types import SampleRange

Ranges = list[tuple[int, int]]


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges, drop empty ones and join neighbours. The ranges must not overlap."""
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
    """The samples of ``ranges`` that are not in ``taken``; both merged."""
    left: Ranges = []
    first = 0
    for start, stop in ranges:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = start
        for other_start, other_stop in itertools.islice(taken, first, None):
            if other_start >= stop:
                break
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
    """The samples that are in both; both merged."""
    return subtract(ranges, subtract(ranges, others))


def union(ranges: Ranges, others: Ranges) -> Ranges:
    """The samples that are in either; both merged."""
    return merge([*ranges, *subtract(others, ranges)])


def is_tidy(ranges: Ranges) -> bool:
    """Whether no range is empty and no two overlap, so that ``count`` is the number of samples."""
    ordered = sorted(ranges)
    return all(start < stop for start, stop in ordered) and all(
        one[1] <= other[0] for one, other in itertools.pairwise(ordered)
    )


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """Number of samples in ranges that do not overlap."""
    return sum(stop - start for start, stop in ranges)


def from_wire(ranges: Sequence[SampleRange]) -> Ranges:
    return [(one.start, one.stop) for one in ranges]


def within(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> int:
    """Number of samples of the ranges in ``start <= s < stop``."""
    return sum(max(0, min(other_stop, stop) - max(other_start, start)) for other_start, other_stop in ranges)


def to_wire(ranges: Iterable[tuple[int, int]]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(start=start, stop=stop) for start, stop in ranges)
