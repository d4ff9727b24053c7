"""Means of contributions that a minority of the weight cannot move far: centered clipping and a trimmed mean.

Centered clipping after Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization"
(arXiv:2012.10333), at the owners of parts as in Gorbunov et al. 2022, "Secure Distributed Training at Scale"
(arXiv:2106.11257). The trimmed mean after Yin et al. 2018 (arXiv:1803.01498), with weights.

The same contributions give the same bytes on every machine: all work on vectors is elementwise and rounds each
operation once, products before sums; members come in the order of the calls; squares of norms are float64, where the
square of a float32 is exact, and are added up in a tree of elementwise sums, whose order does not depend on threads or
vector units; members are sorted, value by value, by keys of which no two are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shoal.compression.codec import Codec, Packed, rounded_weight
from shoal.compression.codec_map import Span, leaf_spans
from shoal.compression.scratch import scratch, zeros
from shoal.compression.weighted_mean import EncodingLoss

Method: TypeAlias = Literal["clip", "trimmed"]

TRIMMED_SHARE = 0.25
"""Share of the weight that a trimmed mean leaves out at each end, value by value."""

PASSES = 3
"""Of centered clipping. The first starts from zero, so it clips norms; from then on the distance to the mean so far
counts. Further passes change honest means by less than their noise."""

RADIUS = 1.5
"""Distance from the mean within which a contribution is not clipped, of the norm that is usual for its weight."""

LENGTHENING: dict[Method, float] = {"clip": float(PASSES), "trimmed": 1.0 / (1.0 - 2.0 * TRIMMED_SHARE)}
"""Bounds ``norm(mean) <= lengthening * sum(weight * norm) / sum(weight)``.

A trimmed mean of a value is at most the sum of all ``weight * abs(value)`` over the weight that is kept. Each pass of
clipping ends between the mean before and a sum of shortened contributions, so it adds the weighted mean norm once at
most."""

_CPU = torch.device("cpu")
_ABSOLUTE = 0x7FFFFFFF
_MEMBER_BITS = 16
"""A group has fewer than 2**16 members."""

_TILE = 1 << 13
"""Values that are sorted at a time."""

_AT_ONCE = 1 << 17
"""Values of several members on which one operation works: short leaves cost more by the call than by the value."""


@dataclass(frozen=True)
class _Source:
    """A packed contribution, or a row's packed mean. ``usual_norm``: in any unit, the same for all."""

    codec: Codec
    packed: Tensor
    row: int
    weight: float
    factor: float
    usual_norm: float


class RobustMean:
    """Accumulator like ``WeightedMean``: of each row by itself, and then of the rows' means.

    Contributions are noted down, and decoded leaf by leaf and row by row in ``encode``: memory is a row of one leaf."""

    def __init__(self, n: int, method: Method) -> None:
        self._n = n
        self._combine: Callable[[Sequence[Tensor], Sequence[float], Sequence[float]], Tensor]
        self._combine = clipped_mean if method == "clip" else trimmed_mean
        self._sources: list[_Source] = []

    def add_packed(
        self, codec: Codec, packed: Packed, weight: float, factor: float = 1.0, row: int = 0, usual_norm: float = 1.0
    ) -> None:
        """Add ``factor`` times the decoded values. Raises CodecError, and adds nothing, when they cannot be decoded.

        Calls are in the order of rows. ``packed`` is not to change before ``encode``."""
        checked = codec.checked(packed, self._n)
        self._sources.append(_Source(codec, checked, row, weight, rounded_weight(factor), usual_norm))

    def encode(self, codec: Codec, divisor: float, left: Tensor, packed: Tensor) -> EncodingLoss:
        """Encode the mean into ``packed``; see ``WeightedMean.encode``. The weights say how much each counts, so
        ``divisor`` is not needed."""
        mean, sent = scratch("total", self._n, _CPU), [list(leaf_spans(one.codec, self._n)) for one in self._sources]
        edges = sorted(set.intersection(*({span.stop for span, _, _ in one} for one in sent)))
        start = 0
        for stop in edges:
            mean[start:stop] = self._mean_of(start, stop, sent)
            start = stop
        codec.encode_residual(mean, zeros(self._n), left, packed)
        return EncodingLoss.of(left)

    def _mean_of(self, start: int, stop: int, sent: Sequence[Sequence[Span]]) -> Tensor:
        """Return the mean of ``start <= i < stop``, whole spans of every source."""
        means, weights, norms = [], [], []
        for row in dict.fromkeys(one.row for one in self._sources):
            members = [(one, pieces) for one, pieces in zip(self._sources, sent, strict=True) if one.row == row]
            decoded = [_decoded(one, pieces, start, stop) for one, pieces in members]
            shares = [one.weight for one, _ in members]
            weights.append(math.fsum(shares))
            norms.append(math.fsum(one.weight * one.usual_norm for one, _ in members) / weights[-1])
            means.append(
                decoded[0]
                if len(members) == 1
                else self._combine(decoded, shares, [one.usual_norm for one, _ in members])
            )
        return means[0] if len(means) == 1 else self._combine(means, weights, norms)


def clipped_mean(values: Sequence[Tensor], weights: Sequence[float], usual_norms: Sequence[float]) -> Tensor:
    """Return the mean of vectors, ``(n,) float32`` each, by centered clipping.

    The radius of each is ``RADIUS`` times what is usual for it in these vectors: the weighted median of norm over
    ``usual_norm``, times its own ``usual_norm`` or, of short ones, which are far from a long mean, the mean one."""
    at_once = max(1, _AT_ONCE // max(1, values[0].numel()))
    groups = [slice(start, start + at_once) for start in range(0, len(values), at_once)]
    norms = [norm for group in groups for norm in norms_of(torch.stack(list(values[group])))]
    usual = [found / norm for found, norm in zip(norms, usual_norms, strict=True)]
    level = _lower_median(usual, weights)
    total = math.fsum(weights)
    average = math.fsum(weight * norm for weight, norm in zip(weights, usual_norms, strict=True)) / total
    mean = torch.zeros_like(values[0])
    for _ in range(PASSES):
        step = torch.zeros_like(mean)
        for group in groups:
            apart = torch.stack(list(values[group])).sub_(mean)
            for one, distance, weight, norm in zip(
                apart, norms_of(apart), weights[group], usual_norms[group], strict=True
            ):
                radius = RADIUS * level * max(norm, average)
                share = weight / total * (1.0 if distance <= radius else radius / distance)
                if share > 0.0:  # a distance beyond float32 counts for nothing
                    step.add_(one.mul_(rounded_weight(share)))
        mean.add_(step)
    return mean


def trimmed_mean(
    values: Sequence[Tensor], weights: Sequence[float], usual_norms: Sequence[float] = (), share: float = TRIMMED_SHARE
) -> Tensor:
    """Return the trimmed mean of vectors, ``(n,) float32`` each: of each value, the mean of what is left without the
    smallest and the largest, ``share`` of the weight each. Who is on the edge counts in part."""
    mean, total = torch.empty_like(values[0]), math.fsum(weights)
    low, high = share * total, (1.0 - share) * total
    of_member = torch.tensor(weights, dtype=torch.float64)
    for start in range(0, mean.numel(), _TILE):
        tile = slice(start, start + _TILE)
        ordered = sorted_keys([_keys(one[tile], member) for member, one in enumerate(values)])
        before, kept = torch.zeros(ordered[0].numel(), dtype=torch.float64), None
        for value, member in map(_value_and_member, ordered):
            after = of_member.index_select(0, member).add_(before)
            weight = after.clamp(max=high).sub_(before.clamp(min=low)).clamp_(min=0.0)
            term = weight.mul_(value)
            kept = term if kept is None else kept.add_(term)
            before = after
        assert kept is not None
        mean[tile] = kept.div_(high - low)
    return mean


def mean_of_groups(means: Sequence[Tensor]) -> Tensor:
    """Return the robust mean of the means of three groups or more, ``(n,) float32`` each, which are overwritten.

    No group's norm is more than ``RADIUS`` times the lower median of all, and of each value the smallest and the
    largest are left out, a quarter of the groups but one at least. Groups count alike, whatever weight their members
    claim. In the manner of SHARE (Velicheti et al. 2021, arXiv:2110.02940): sums within groups, trimmed among them."""
    assert len(means) >= 3
    norms = [norms_of(one[None])[0] for one in means]
    most, counts = RADIUS * _lower_median(norms, [1.0] * len(norms)), [1.0] * len(means)
    for one, norm in zip(means, norms, strict=True):
        if norm > most:
            one.mul_(rounded_weight(most / norm))
    return trimmed_mean(means, counts, share=max(TRIMMED_SHARE, 1.0 / len(means)))


def norms_of(values: Tensor) -> list[float]:
    """Return the norm of each row of ``(members, n) float32``, the same on every machine."""
    squares = values.double().square_()
    while (n := squares.shape[1]) > 1:
        half = n // 2
        squares[:, :half].add_(squares[:, n - half :])
        squares = squares[:, : n - half]
    return [math.sqrt(one) for one in squares.sum(1).tolist()]  # one is left of each row, or none


def sorted_keys(rows: Sequence[Tensor]) -> list[Tensor]:
    """Sort ``(n,) int64`` vectors position by position: into the first go the smallest values, in the given memory.

    A sort of few rows in all columns at once costs a minimum and a maximum a pair of rows (Batcher's odd-even merge
    sort), which vector units take; ``torch.sort`` takes column by column."""
    rows, least = list(rows), torch.empty_like(rows[0])
    for low, high in _comparators(len(rows)):
        torch.minimum(rows[low], rows[high], out=least)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], least = least, rows[low]
    return rows


@lru_cache
def _comparators(rows: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of rows that Batcher's odd-even merge sort compares, in order (Batcher 1968)."""

    def pairs() -> Iterator[tuple[int, int]]:
        size = 1
        while size < rows:
            apart = size
            while apart:
                for start in range(apart % size, rows - apart, 2 * apart):
                    for low in range(start, min(start + apart, rows - apart)):
                        if low // (2 * size) == (low + apart) // (2 * size):
                            yield low, low + apart
                apart //= 2
            size *= 2

    return tuple(pairs())


def _keys(values: Tensor, member: int) -> Tensor:
    """Return an integer for each value, ``(n,) int64``, ordered as values are and, of equal ones, as members are."""
    bits = values.add(0.0).view(torch.int32)  # there is one zero
    return _ordered(bits).to(torch.int64).bitwise_left_shift_(_MEMBER_BITS).bitwise_or_(member)


def _value_and_member(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``_keys`` was given, ``(n,) float32`` and ``(n,) int64``."""
    member = keys.bitwise_and((1 << _MEMBER_BITS) - 1)
    return _ordered(keys.bitwise_right_shift_(_MEMBER_BITS).to(torch.int32)).view(torch.float32), member


def _ordered(bits: Tensor) -> Tensor:
    """Turn the bits of float32 values, ``(n,) int32``, into integers that are ordered as they are, or back; in
    place."""
    return bits.bitwise_xor_(bits.bitwise_right_shift(31).bitwise_and_(_ABSOLUTE))


def _decoded(one: _Source, pieces: Sequence[Span], start: int, stop: int) -> Tensor:
    out = torch.empty(stop - start)
    for span, room, codec in pieces:
        if start <= span.start and span.stop <= stop:
            codec.decode(one.packed[room], span.stop - span.start, out[span.start - start : span.stop - start])
    return out if one.factor == 1.0 else out.mul_(one.factor)


def _lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    half = math.fsum(weights) / 2
    reached = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= half:
            return value
    return 0.0
