"""Who serves which span of a given cut, so that the slowest stage is as fast as can be (pure).

Max-min allocation is NP-hard. Peers choose their spans one after the other by a smooth stand-in for the minimum,
the sum of -exp(-sharpness x load), which grows sharper from pass to pass; then pairs of peers choose together.
"""

from __future__ import annotations

import numpy as np

from shoal.swarm.pipeline.span_rates import Flags, Floats, Indices, SpanTable

SHARPNESS = (4.0, 8.0, 16.0, 32.0, 64.0)
SWEEPS = 4
"""Passes over all peers at one sharpness, at most."""
PRICE_STEPS = 40
PAIR_WORK = 5 * 10**6
"""Loads that one look at all pairs of peers may compute; it is left out where that is not enough."""
PAIR_CALL = 5_000
"""What looking at one pair costs beside that, in the same unit."""
PAIR_SHARPNESS = 1000.0
PAIR_ROUNDS = 10
CLOSE_ENOUGH = 0.999
FLOOR = 1e-12


def prices(table: SpanTable, steps: int = PRICE_STEPS) -> tuple[Floats, float]:
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
    for sharpness in SHARPNESS if start is None else SHARPNESS[-2:]:
        for _ in range(SWEEPS):
            changed = _sweep(table, choice, order, sharpness / max(best_rate, bound / 4))
            if (rate := table.rate(choice)) > best_rate:
                best, best_rate = choice.copy(), rate
            if not changed or best_rate >= CLOSE_ENOUGH * bound:
                break
        if best_rate >= CLOSE_ENOUGH * bound:
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


def _sweep(table: SpanTable, choice: Indices, order: list[int], scale: float) -> bool:
    """Each peer in turn chooses again, all others' choices given. Changes ``choice``; whether anything changed."""
    load = table.load(choice)
    gains = -np.expm1(-scale * table.rates)
    stop = table.last + 1
    sums = np.zeros(table.stages + 1)
    changed = False
    for peer in order:
        old = int(choice[peer])
        if old >= 0:
            held = slice(table.first[old], stop[old])
            load[held] -= table.rates[peer, old]
        # Without the common factor exp(-scale x the least load), and a floor, everything could be zero.
        np.cumsum(np.maximum(np.exp(scale * (load.min() - load)), FLOOR), out=sums[1:])
        value = gains[peer] * (sums[stop] - sums[table.first])
        new = int(value.argmax())
        if old >= 0 and value[new] <= value[old] * (1 + 1e-9):
            new = old
        if new != old:
            changed, choice[peer] = True, new
        load[table.first[new] : stop[new]] += table.rates[peer, new]
    return changed


def in_pairs(table: SpanTable, start: Indices, movable: Flags | None = None) -> Indices:
    """Two peers at a time choose together, as long as that helps; as it was in swarms too large for it."""
    movable = np.ones(len(table.rates), dtype=np.bool_) if movable is None else movable
    who = [int(one) for one in np.flatnonzero(movable)]
    spans = len(table.first)
    if len(who) ** 2 * (spans**2 * table.stages + PAIR_CALL) > 2 * PAIR_WORK:
        return start
    stages = np.arange(table.stages)
    covers = ((table.first[:, None] <= stages) & (stages <= table.last[:, None])).astype(np.float64)
    choice = start.copy()
    scale = PAIR_SHARPNESS / _unit(table, choice)
    best = float(_smooth_least(table.load(choice), scale))
    for _ in range(PAIR_ROUNDS):
        improved = False
        for index, one in enumerate(who):
            for other in who[index + 1 :]:
                rest = choice.copy()
                rest[[one, other]] = -1
                mine = table.rates[one][:, None] * covers
                theirs = table.rates[other][:, None] * covers
                scores = _smooth_least(table.load(rest) + mine[:, None] + theirs[None, :], scale)
                at = int(scores.argmax())
                # Clearly more: sums that are rounded differently are no improvement.
                if scores.flat[at] > best + 1e-9 * abs(best):
                    choice[one], choice[other] = divmod(at, spans)
                    best = float(scores.flat[at])
                    improved = True
        if not improved:
            break
    # A span of rate 0 is none.
    placed = np.flatnonzero(choice >= 0)
    choice[placed[table.rates[placed, choice[placed]] <= 0]] = -1
    choice = with_everybody(table, choice, movable)
    return choice if table.rate(choice) >= table.rate(start) else start


def _unit(table: SpanTable, choice: Indices) -> float:
    """The rate that sharpness is counted in."""
    rate = table.rate(choice)
    return rate if rate > 0 else max(float(table.rates.max(initial=0.0)), 1e-9)


def _smooth_least(load: Floats, scale: float) -> Floats:
    """``(...)``: a smooth minimum of ``(..., stages)`` loads."""
    least = load.min(axis=-1)
    smooth: Floats = least - np.log(np.exp(scale * (least[..., None] - load)).sum(axis=-1)) / scale
    return smooth
