"""Trend of the training and the held-out loss: tells divergence from noise, from spikes and from a warm-up.

A curve is named when the median of its newest values is above the best such median before it, by more than chance and
by more than a share of it, and is not falling again. A median does not see a spike of fewer values than half of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

TrendKind = Literal["", "diverging", "overfitting", "not finite"]

_ROUNDS = 8
"""Committed rounds of which the training loss's median is taken: it sees no spike of three, and what lasts for five."""

_EVALUATIONS = 3
"""The same for held-out losses. They are few, and of the same samples each time."""

_LOOKED_AT = 512
"""Newest rounds that are looked at."""

_RISE = 0.05
"""Share of the best level by which the training loss is above it: of a loss of 3, 0.15 nats."""

_HELD_OUT_RISE = 0.02

_BEYOND_CHANCE = 4.0
"""Standard errors of the median by which a level is above the best one, too."""

_SILENT_ROUNDS = 2
"""Newest rounds without any finite loss, after rounds that had one, until that is named."""

_ADVICE = (
    "lower the learning rate (shoal amend RUN inner.lr=…; of virtual_batch outer.lr), or start a new run from a "
    "checkpoint before it (shoal host --from FOLDER)"
)


@dataclass(frozen=True)
class Trend:
    """What is wrong with a run's losses, in a sentence with what to do; both empty where nothing is."""

    kind: TrendKind = ""
    text: str = ""


@dataclass(frozen=True)
class _Rise:
    level: float
    best: float
    since: int
    """Number of the value with which the best window ends."""


def trend_of(training: Sequence[float | None], held_out: Sequence[tuple[int, float | None]]) -> Trend:
    """Return what is wrong with a run's losses.

    ``training``: of its committed rounds, None where no member had a finite one; ``held_out``: version and loss of its
    evaluations that are not disputed, None for no finite number; both oldest first."""
    if held_out and held_out[-1][1] is None:
        words = f"the held-out loss of version {held_out[-1][0]} is no finite number"
        return Trend("not finite", f"training has diverged: {words}. To do: {_ADVICE}")
    known = [loss for loss in training[-_LOOKED_AT:] if loss is not None]
    if known and len(training) > _SILENT_ROUNDS and all(loss is None for loss in training[-_SILENT_ROUNDS:]):
        words = f"no member had a finite loss in the last {_SILENT_ROUNDS} rounds"
        return Trend("not finite", f"training has diverged: {words}. To do: {_ADVICE}")
    rise = _rise_of(known, _ROUNDS, _RISE)
    if rise is not None:
        words = f"the training loss has risen to {rise.level:.4g} from {rise.best:.4g}, and not in a single round"
        return Trend("diverging", f"training diverges: {words}. To do: {_ADVICE}")
    figures = [(version, loss) for version, loss in held_out if loss is not None]
    rise = _rise_of([loss for _, loss in figures], _EVALUATIONS, _HELD_OUT_RISE)
    if rise is None:
        return Trend()
    words = (
        f"the held-out loss has risen to {rise.level:.4g}, from {rise.best:.4g} up to version {figures[rise.since][0]}"
    )
    if _is_falling(known):
        return Trend(
            "overfitting",
            f"{words}, while the training loss falls: the model learns its samples by heart. To do: take an earlier "
            "checkpoint, more data or a smaller model; run.stop_when with patience ends such a run",
        )
    return Trend("diverging", f"training diverges: {words}. To do: {_ADVICE}")


def _rise_of(losses: Sequence[float], window: int, share: float) -> _Rise | None:
    """Return how far a curve is above its best level and still there; None where it is not, or is too short."""
    if len(losses) < 2 * window:
        return None
    levels = [median(losses[at - window : at]) for at in range(window, len(losses) + 1)]
    level = levels[-1]
    earlier = levels[:-window]  # windows that have no value in common with the newest one
    best = min(earlier)
    least = max(share * max(abs(best), 0.1), _BEYOND_CHANCE * _error_of_median(losses, window))
    half = (window + 1) // 2
    is_falling = median(losses[-half:]) < min(level, median(losses[-window:-half] or losses[-window:]))
    if level <= best + least or (is_falling and losses[-1] < level):
        return None
    return _Rise(level, best, earlier.index(best) + window - 1)


def _error_of_median(losses: Sequence[float], window: int) -> float:
    """Estimate the standard error of a window's median from the steps between neighbours, which no slow trend moves.

    For normal noise: the median size of a step is 0.954 of its deviation, and a median's error 1.25 of a mean's."""
    steps = [abs(after - before) for before, after in pairwise(losses)]
    return 1.25 * (median(steps) / 0.954) / math.sqrt(window)


def _is_falling(losses: Sequence[float]) -> bool:
    """Whether the newest level is no higher than the one before it."""
    if len(losses) < 2 * _ROUNDS:
        return len(losses) > 1 and losses[-1] < losses[0]
    return median(losses[-_ROUNDS:]) <= median(losses[-2 * _ROUNDS : -_ROUNDS])
