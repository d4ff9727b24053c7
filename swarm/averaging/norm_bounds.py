"""Bounds on contributions, partial sums and means that follow from the claimed norms of contributions.

Owners leave out contributions above their claims (``norm_claims.py``). A mean is bounded by the triangle inequality:
``norm(mean) <= sum(weight * factor * claim) / sum(weight)`` over the included members, times what
robust means may add (``robust_mean.LENGTHENING``), at each of a grid's two levels. Gathered contributions have the
claims of all of them. Every bound allows for what
codecs may add (``Codec.growth``, proven for each of them), so only a dishonest member exceeds a bound, and no honest
value is ever scaled down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.compression.codec_map import CodecMap
from shoal.compression.fixed_point import largest_code
from shoal.compression.robust_mean import LENGTHENING
from shoal.swarm.averaging.norm_claims import claimed_squares, range_elements
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.secure import SecurePlan

_ROUNDING = 1.01
"""Factor on squares, above what float32 rounding in codecs, sums of 4,096 members and measured norms can add."""

_SUBNORMAL = 2.0**-250
"""Added to squares for each value: codecs may round a subnormal float32 up to a multiple of the smallest normal one."""


class NormBounds:
    """Bounds on squared norms of values ``start <= i < stop``, any number of chunks, in one plan."""

    def __init__(self, plan: RoundPlan, codec_map: CodecMap, leeway: float = 1.0) -> None:
        """``leeway``: factor on the squares that contributions and partial sums may have."""
        elements = plan.parts[-1].stop
        self._elements = elements
        self._codec_map = codec_map
        self._leeway = leeway
        self._members = len(plan.members)
        self._levels = 2 if plan.columns else 1
        self._lengthening = LENGTHENING[plan.mean] if plan.mean in ("clip", "trimmed") else 1.0
        self._step = range_elements(elements)
        self._squares = np.stack([claimed_squares(member.norms, elements) for member in plan.members])
        self._weights = np.array([float(member.weight) for member in plan.members])
        self._pulls = np.array([float(member.weight) * member.factor for member in plan.members])
        self.factors = tuple(member.factor for member in plan.members)
        self.usual_norms = tuple(member.usual_norm for member in plan.members)
        self.kind = plan.mean
        self.copies = plan.copies

    def contribution(self, member: int, start: int, stop: int) -> float:
        """Bound on a member's contribution before encoding."""
        claim = float(self._squares[member, self._touched(start, stop)].sum())
        return _with_slack(claim * self._leeway, 1.0, stop - start)

    def partial_sum(self, included: Sequence[int], start: int, stop: int) -> float:
        """Bound on a row's mean of these members as its row reducer encodes it."""
        return self._mean(included, start, stop, 1, 1) * self._leeway

    def mean(self, included: Sequence[int], start: int, stop: int, *, with_partial_sums: bool) -> float:
        """Bound on a mean of these members as its owner encodes it. ``with_partial_sums``: some came as partial sums,
        which are encoded, too."""
        return self._mean(included, start, stop, 1 + with_partial_sums, self._levels)

    def influence(self, member: int, included: Sequence[int], start: int, stop: int) -> float:
        """Return how far this member's own contribution can move the mean of ``included`` members at these values.

        Its claim for a range is spread evenly over the range's values, so over the chunks of a vector the squares add
        up to that of its whole contribution's influence."""
        spans = range(self._step * (start // self._step), stop, self._step)
        square = 0.0
        for index, first in zip(range(start // self._step, len(self._squares[member])), spans, strict=False):
            size = min(first + self._step, self._elements) - first
            square += float(self._squares[member, index]) * (min(stop, first + size) - max(start, first)) / size
        total = float(self._weights[sorted({*included, member})].sum())
        return float(self._pulls[member]) / total * math.sqrt(square)

    def _mean(self, included: Sequence[int], start: int, stop: int, times_packed: int, levels: int) -> float:
        who = list(included)
        if self.kind == "gather":  # they stand one after the other, each with its own length
            gathered = float(self._squares[who, self._touched(start, stop)].sum())
            return _with_slack(gathered, self._codec_map.contribution(start, stop).growth, (stop - start) * len(who))
        norms = np.sqrt(self._squares[who, self._touched(start, stop)].sum(1))
        longest = float(np.dot(self._pulls[who], norms) / self._weights[who].sum())
        longest *= self._lengthening**levels
        growth = self._codec_map.result(start, stop, self._members).growth ** times_packed
        growth *= self._codec_map.contribution(start, stop).growth
        return _with_slack(longest * longest, growth, stop - start)

    def _touched(self, start: int, stop: int) -> slice:
        """Return the claimed ranges that these values lie in."""
        return slice(start // self._step, math.ceil(stop / self._step))


def secure_mean_bound(plan: RoundPlan, secure: SecurePlan, growth: float, bounds: tuple[int, int]) -> float:
    """Bound on the squared norm of a secure round's mean of these values, whoever is in it.

    Nobody claims a norm there, but each group's sum is in the range of its lanes, twice that of all its members' codes,
    in the weight of the heaviest, and more than two thirds of the group are in it."""
    start, stop = bounds
    weights = [member.weight for member in plan.members]
    codes = 3 * ((1 << secure.bits - 1) - 1) * max(weights) / min(weights)
    exponents = np.frombuffer(secure.scales, np.int8)[start // secure.block : -(-stop // secure.block)]
    square = float(np.square(np.ldexp(codes, exponents.astype(np.int64))).sum()) * secure.block
    return _with_slack(square, growth, stop - start)


def secure_influence(
    plan: RoundPlan, secure: SecurePlan, member: int, included: Sequence[int], bounds: tuple[int, int]
) -> float:
    """Return how far this member's own contribution, with the largest codes, can move the mean of ``included`` members
    at these values, in a secure round."""
    start, stop = bounds
    units = np.ldexp(1.0, np.frombuffer(secure.scales, np.int8)[start // secure.block : -(-stop // secure.block)])
    sizes = np.minimum(secure.block, stop - np.arange(start, stop, secure.block))
    total = sum(plan.members[one].weight for one in {*included, member})
    return largest_code(secure.bits) * plan.members[member].weight / total * math.sqrt(float((units**2 * sizes).sum()))


def _with_slack(square: float, growth: float, values: int) -> float:
    return square * growth * growth * _ROUNDING + values * _SUBNORMAL if square else 0.0
