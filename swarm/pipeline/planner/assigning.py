"""Who serves which span of a given cut, so that the slowest stage is as fast as can be (pure).

Max-min allocation is NP-hard. Peers choose their spans one after the other by a smooth stand-in for the minimum,
the sum of -exp(-sharpness x load), which grows sharper from pass to pass; then pairs of peers choose together.
"""

from __future__ import annotations

import numpy as np

from shoal.swarm.pipeline.planner.span_rates import Flags, Floats, Indices, SpanTable

# Sharpness is counted in 1 / the rate that could be reached at best.
SHARPNESS = tuple(float(one) for one in np.geomspace(0.3, 128, 24))
"""From so little that everybody goes where it is worth most, to so much that only the slowest stages count."""
FEW_SHARPNESS = SHARPNESS[1::2]
"""For large swarms, where single peers matter less."""
LARGE = 80
"""So many peers are a large swarm."""
PAIR_SHARPNESS = (60.0, 200.0)
PAIR_EFFORT = 100_000
"""For pairs: about as many microseconds. Counted and not timed, so that equal inputs give equal plans."""
CLOSE_ENOUGH = 0.999
FLOOR = 1e-12
CEILING = 1e9
"""Of exponentials, so that their sums keep the small ones apart."""


def prices(table: SpanTable, steps: int = 40) -> tuple[Floats, float]:
    """``(stages,)`` prices that add up to 1, and the upper bound of every assignment's rate that they prove.

    With prices w no assignment is faster than the sum over peers of their best span's rate times its price: the
    dual of the linear program in which a peer may share its time among spans. Multiplicative weights find w.
    """
    weights = np.full(table.stages, 1.0 / table.stages)
    best, bound = weights, np.inf
    for step in range(steps):
        worth = np.concatenate([[0.0], np.cumsum(weights)])
        values = table.rates * (worth[table.last + 1] - worth[table.first])
        choice = values.argmax(axis=1)
        value = float(values.max(axis=1).sum())
        if value < bound:
            best, bound = weights, value
        load = table.load(choice)
        mean = float(load.mean())
        if mean <= 0:
            break
        weights = weights * np.exp(-np.clip(load / mean - 1, -2, 2) * 0.5 / (1 + 0.1 * step))
        weights /= weights.sum()
    return best, bound


def assign(table: SpanTable, start: Indices | None = None, movable: Flags | None = None) -> Indices:
    """``(peers,)``: the index of each peer's span, -1 for a peer that can hold none.

    Peers that are not ``movable`` keep what they have in ``start``. The rate is never below that of ``start``.
    """
    able = table.rates.max(axis=1, initial=0.0) > 0
    movable = able if movable is None else movable & able
    choice = np.full(len(able), -1, dtype=np.int64) if start is None else start.copy()
    if not movable.any():
        return choice
    _, bound = prices(table)
    # The strongest first: the weak ones then even out what these leave.
    order = [int(one) for one in np.argsort(-table.rates.max(axis=1), kind="stable") if movable[one]]
    best, best_rate = choice.copy(), table.rate(choice)
    passes = SHARPNESS if len(order) < LARGE else FEW_SHARPNESS
    for sharpness in passes if start is None else passes[len(passes) // 2 :]:
        _sweep(table, choice, order, sharpness / bound)
        if (rate := table.rate(choice)) > best_rate:
            best, best_rate = choice.copy(), rate
            if rate >= CLOSE_ENOUGH * bound:
                break
    return with_everybody(table, best, movable)


def with_everybody(table: SpanTable, choice: Indices, movable: Flags) -> Indices:
    """The same with a place for every movable peer that has none and can hold one: where it helps most."""
    choice = choice.copy()
    idle = [int(one) for one in np.flatnonzero((choice < 0) & movable & (table.rates.max(axis=1, initial=0.0) > 0))]
    if idle:
        idle.sort(key=lambda one: -float(table.rates[one].max()))
        _sweep(table, choice, idle, SHARPNESS[-1] / _unit(table, choice))
    return choice


def _sweep(table: SpanTable, choice: Indices, order: list[int], scale: float) -> None:
    """Each peer in turn chooses again, all others' choices given. Changes ``choice``."""
    load = table.load(choice)
    gains = -np.expm1(-scale * table.rates)
    first, stop = table.first, table.last + 1
    sums = np.zeros(table.stages + 1)
    for peer in order:
        old = int(choice[peer])
        if old >= 0:
            load[first[old] : stop[old]] -= table.rates[peer, old]
        # Without the common factor exp(-scale x the least load), and a floor, everything could be zero.
        worth = np.exp(scale * (np.minimum.reduce(load) - load))
        np.maximum(worth, FLOOR, out=worth)
        np.add.accumulate(worth, out=sums[1:])
        value = gains[peer] * (sums[stop] - sums[first])
        new = int(value.argmax())
        if old < 0 or value[new] > value[old] * (1 + 1e-9):
            choice[peer] = new
        else:
            new = old
        load[first[new] : stop[new]] += table.rates[peer, new]


def in_pairs(table: SpanTable, start: Indices, effort: int = PAIR_EFFORT) -> Indices:
    """The same with pairs of peers moved, as long as that makes the slowest stages faster and effort is left."""
    choice = start.copy()
    for sharpness in PAIR_SHARPNESS:
        rate = table.rate(choice)
        if rate <= 0:
            break
        pairs = _Pairs(table, sharpness / rate)
        while effort > 0:
            tried, better = pairs.improved(choice, effort)
            effort -= tried
            if better is None:
                break
            choice = better
    return choice if table.rate(choice) >= table.rate(start) else start


class _Pairs:
    """One peer moves to the slowest stage, and whoever gains most by it moves after it."""

    def __init__(self, table: SpanTable, scale: float) -> None:
        self._table, self._scale = table, scale
        stages = np.arange(table.stages)
        self._covers = ((table.first[:, None] <= stages) & (stages <= table.last[:, None])).astype(np.float64)
        self._gains = -np.expm1(-scale * table.rates)
        self._each = 20 + table.rates.size // 50
        """What looking at all answers to one move takes."""

    def improved(self, choice: Indices, effort: int) -> tuple[int, Indices | None]:
        """The effort that it took, and the first better assignment; None if there is none, or too little effort."""
        table = self._table
        own = np.where(choice[:, None] >= 0, self._own(np.arange(len(choice)), choice), 0.0)
        load = own.sum(axis=0)
        least = load.min()
        current = self._cost(load, least)
        tried = 0
        for span in np.flatnonzero(self._covers[:, int(load.argmin())]):
            for peer in np.flatnonzero((table.rates[:, span] > 0) & (choice != span)):
                tried += self._each
                if tried > effort:
                    return tried, None
                moved = load - own[peer] + table.rates[peer, span] * self._covers[span]
                other, answer = self._answer(moved, own, least, int(peer))
                after = moved if other == peer else moved - own[other] + self._own(other, answer)
                if other == peer:
                    answer = int(span)
                if self._cost(after, least) < current * (1 - 1e-6):
                    better = choice.copy()
                    better[peer], better[other] = span, answer
                    return tried, better
        return tried, None

    def _answer(self, moved: Floats, own: Floats, least: float, peer: int) -> tuple[int, int]:
        """Who else should move, and to which span; the peer itself if nobody should."""
        without = np.clip(np.exp(np.minimum(self._scale * (least - moved + own), 60)), FLOOR, CEILING)
        sums = np.zeros((len(own), self._table.stages + 1))
        np.cumsum(without, axis=1, out=sums[:, 1:])
        cost = sums[:, -1:] - (sums[:, self._table.last + 1] - sums[:, self._table.first]) * self._gains
        cost[peer] = np.inf
        at = int(cost.argmin())
        other, answer = divmod(at, cost.shape[1])
        if cost.flat[at] >= self._cost(moved, least) or self._table.rates[other, answer] <= 0:
            return peer, 0
        return other, answer

    def _own(self, peers: Indices | int, spans: Indices | int) -> Floats:
        rates = np.asarray(self._table.rates[peers, spans])
        own: Floats = rates[..., None] * self._covers[spans]
        return own

    def _cost(self, load: Floats, least: float) -> float:
        return float(np.exp(np.minimum(self._scale * (least - load), 600)).sum())


def _unit(table: SpanTable, choice: Indices) -> float:
    """The rate that sharpness is counted in."""
    rate = table.rate(choice)
    return rate if rate > 0 else max(float(table.rates.max(initial=0.0)), 1e-9)


def smooth_least(load: Floats, scale: float) -> float:
    """A smooth minimum of ``(stages,)`` loads: it counts the second slowest stage a little, too."""
    least = float(load.min())
    return least - float(np.log(np.exp(scale * (least - load)).sum())) / scale
