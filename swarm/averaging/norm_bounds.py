"""Claimed norms of contributions, and the bounds on partial sums and means that follow from them.

A member claims one norm for each of up to 64 ranges of the vector. The claim travels in ``ready``, before any byte of
the contribution may count, and stands in the round's plan. The ranges do not depend on the plan, so a claim can be made
before there is one. Whoever reduces leaves out contributions above their claims. A mean is bounded by the triangle
inequality: ``norm(mean) <= sum(weight * factor * claim) / sum(weight)`` over the included members. Every bound allows
for what codecs may add (``Codec.growth``, proven for each of them), so an honest member never exceeds it and nothing
honest has to be scaled down: whatever is above a bound was made by a liar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.compression.coding import Coding
from shoal.swarm.coordinator.partition import MIN_CHUNK_ELEMENTS
from shoal.swarm.protocol.messages import MAX_CLAIM_BYTES, RoundPlan

MAX_RANGES = MAX_CLAIM_BYTES // 2
"""Ranges that a vector is cut into, at most: 128 bytes a member in every plan."""

_STEPS, _ZERO_AT = 256, 2**15
"""A claim is a whole number of 256ths of an octave, so at most 0.3 % above the norm; 0 stands for nothing at all."""

_ROUNDED = 1.0 + 2.0**-22
"""Bound on how much longer a vector can get when each value is rounded to float32."""


def range_elements(elements: int) -> int:
    """Elements in each claimed range of a vector of so many, but the last: a multiple of the smallest chunk."""
    return math.ceil(elements / MAX_RANGES / MIN_CHUNK_ELEMENTS) * MIN_CHUNK_ELEMENTS


def ranges(elements: int) -> list[tuple[int, int]]:
    """Start and stop of each claimed range of a vector of so many elements."""
    step = range_elements(elements)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def claim_of(contribution: Sequence[float], residual: Sequence[float]) -> bytes:
    """The claim for the sum of two vectors by their norms, (ranges,) each: bounds by the triangle inequality, for which
    nobody has to read the vectors when a round is to end."""
    return pack([(one + other) * _ROUNDED for one, other in zip(contribution, residual, strict=True)])


def claim_bytes(elements: int) -> int:
    """The size of a claim for a vector of so many elements, unless it is empty."""
    return 2 * -(-elements // range_elements(elements))


def pack(norms: Sequence[float]) -> bytes:
    """Norms, (ranges,), each finite and not negative, rounded up to claims: two bytes each."""
    values = np.asarray(norms, dtype=np.float64)
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    with np.errstate(divide="ignore"):
        steps = np.ceil(np.log2(values) * _STEPS)
    claims = np.where(values > 0, np.clip(steps + _ZERO_AT, 1, 2**16 - 1), 0)
    return claims.astype("<u2").tobytes()


def unpack(claim: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The claimed norms, (ranges,) float64; none of an empty claim, which stands for nothing anywhere.

    Raises ValueError when it is no whole number of claims."""
    steps = np.frombuffer(claim, dtype="<u2").astype(np.float64)
    return np.where(steps > 0, np.exp2((steps - _ZERO_AT) / _STEPS), 0.0)


def total_norm(claim: bytes) -> float:
    """The norm of the whole contribution, as claimed."""
    return float(np.sqrt(np.square(unpack(claim)).sum()))


def claimed_squares(claim: bytes, elements: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of each range of a vector of so many elements the square of the claimed norm, (ranges,) float64: zeros of a claim
    that is not for so many."""
    count = len(ranges(elements))
    return np.square(unpack(claim)) if len(claim) == 2 * count else np.zeros(count)


def squared_bound(claim: Sequence[float], elements: int, start: int, stop: int) -> float:
    """The square of what the values ``start <= i < stop`` of a vector of ``elements`` may have as norm, by the claimed
    norms of its ranges: that of all ranges that they touch."""
    step = range_elements(elements)
    first, last = start // step, -(-stop // step)
    return float(sum(norm * norm for norm in claim[first:last]))


_ROUNDING = 1.01
"""Of squares: what the rounding of float32, in codecs, sums over 1024 members and measured norms, can add is less."""

_SUBNORMAL = 2.0**-250
"""Of squares, a value: codecs may round what is below the smallest normal float32 up to a multiple of it."""


class NormBounds:
    """All bounds are of squares. Values are the ``start <= i < stop`` of the contribution, any number of chunks."""

    def __init__(self, plan: RoundPlan, coding: Coding) -> None:
        elements = plan.parts[-1].stop
        self._coding = coding
        self._members = len(plan.members)
        self._step = range_elements(elements)
        self._squares = np.stack([claimed_squares(member.norms, elements) for member in plan.members])
        self._weights = np.array([float(member.weight_tokens) for member in plan.members])
        self.factors = tuple(member.factor for member in plan.members)
        self.pulls = tuple(float(member.weight_tokens) * member.factor for member in plan.members)
        """Factor of each member's contribution in a sum; the mean divides it by the sum of weights."""

    def contribution(self, member: int, start: int, stop: int) -> float:
        """Of what a member brings, before its codec makes it grow."""
        claim = float(self._squares[member, self._touched(start, stop)].sum())
        return _with_slack(claim, 1.0, stop - start)

    def partial(self, included: Sequence[int], start: int, stop: int) -> float:
        """Of a row's mean of these members, as its relay packs it."""
        return self._mean(included, start, stop, 1)

    def mean(self, included: Sequence[int], start: int, stop: int, *, relayed: bool) -> float:
        """Of a mean of these members as its owner packs it. ``relayed``: some of them came as a packed partial."""
        return self._mean(included, start, stop, 1 + relayed)

    def _mean(self, included: Sequence[int], start: int, stop: int, times_packed: int) -> float:
        who = list(included)
        norms = np.sqrt(self._squares[who, self._touched(start, stop)].sum(1))
        longest = float(np.dot(np.array(self.pulls)[who], norms) / self._weights[who].sum())
        growth = self._coding.result(start, stop, self._members).growth ** times_packed
        growth *= self._coding.contribution(start, stop).growth
        return _with_slack(longest * longest, growth, stop - start)

    def _touched(self, start: int, stop: int) -> slice:
        """The claimed ranges that have some of these values."""
        return slice(start // self._step, math.ceil(stop / self._step))


def _with_slack(square: float, growth: float, values: int) -> float:
    return square * growth * growth * _ROUNDING + values * _SUBNORMAL if square else 0.0
