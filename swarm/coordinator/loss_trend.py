"""Trend of the training and the held-out loss: tells divergence from noise, from spikes and from a warm-up.

A curve is named when the median of its newest values is above the best such median before it, by more than chance and
by more than a share of it, while it still climbs or when it has not come back for long. A median does not see a spike
of fewer values than half of it, and one whose peak is past is given time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

TrendKind = Literal["", "diverging", "overfitting", "not finite"]

_ROUNDS, _MANY_ROUNDS = 12, 32
"""Committed rounds of which the training loss's median is taken. The first sees no spike of five rounds; the second a
slow rise in noisy losses, later."""

_EVALUATIONS = 3
"""The same for held-out losses. They are few, and of the same samples each time."""

_LOOKED_AT = 512
"""Newest rounds that are looked at."""

_RISE = 0.05
"""Share of the best level by which the training loss is above it: of a loss of 3, 0.15 nats."""

_BEYOND_CHANCE = 6.0
"""Standard errors of a median by which a level is above the best one, too, which is the best of many."""

_HELD_OUT_RISE, _HELD_OUT_BEYOND_CHANCE = 0.02, 3.0
"""The same for held-out losses: less of them is chance, and there are fewer."""

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


def trend_of(
    training: Sequence[float | None], held_out: Sequence[tuple[int, float | None]], *, is_claimed: bool = False
) -> Trend:
    """Return what is wrong with a run's losses.

    ``training``: of its committed rounds, None where no member had a finite one; ``held_out``: version and loss of its
    evaluations that are used, None for no finite number; both oldest first. ``is_claimed``: whether those are one
    validator's word."""
    whose = "held-out loss, as the only validator says," if is_claimed else "held-out loss"
    if held_out and held_out[-1][1] is None:
        words = f"the {whose} of version {held_out[-1][0]} is no finite number"
        return Trend("not finite", f"training has diverged: {words}. To do: {_ADVICE}")
    known = [loss for loss in training[-_LOOKED_AT:] if loss is not None]
    if known and len(training) > _SILENT_ROUNDS and all(loss is None for loss in training[-_SILENT_ROUNDS:]):
        words = f"no member had a finite loss in the last {_SILENT_ROUNDS} rounds"
        return Trend("not finite", f"training has diverged: {words}. To do: {_ADVICE}")
    rule = _RISE, _BEYOND_CHANCE
    rise = _rise_of(known, _ROUNDS, *rule) or _rise_of(known, _MANY_ROUNDS, *rule)
    if rise is not None:
        words = f"the training loss has risen to {rise.level:.4g} from {rise.best:.4g}, and not in a single round"
        return Trend("diverging", f"training diverges: {words}. To do: {_ADVICE}")
    figures = [(version, loss) for version, loss in held_out if loss is not None]
    rise = _rise_of([loss for _, loss in figures], _EVALUATIONS, _HELD_OUT_RISE, _HELD_OUT_BEYOND_CHANCE)
    if rise is None:
        return Trend()
    words = f"the {whose} has risen to {rise.level:.4g}, from {rise.best:.4g} up to version {figures[rise.since][0]}"
    if _has_fallen_since(training, figures[rise.since][0]):
        return Trend(
            "overfitting",
            f"{words}, while the training loss falls: the model learns its samples by heart. To do: take an earlier "
            "checkpoint, more data or a smaller model; run.stop_when with patience ends such a run",
        )
    return Trend("diverging", f"training diverges: {words}. To do: {_ADVICE}")


def _rise_of(losses: Sequence[float], window: int, share: float, errors: float) -> _Rise | None:
    """Return how far a curve is above its best level; None where it is not, is about to recover, or is too short.

    A curve that is above it is named once it still climbs, and stays so until it is back; one whose peak is past gets
    one and a half windows to come back by itself. ``share``, ``errors``: by which it is above, of the best level and
    of its chance."""
    if len(losses) < 2 * window:
        return None
    ends, third = range(window, len(losses) + 1), window // 3
    levels = [median(losses[end - window : end]) for end in ends]
    recent = [median(losses[end - third : end]) for end in ends]
    error = errors * _error_of_median(losses, window)
    best, best_at, above, is_named = levels[0], 0, 0, False
    for at in range(window, len(levels)):  # windows that have no value in common with the one that is looked at
        if levels[at - window] < best:
            best, best_at = levels[at - window], at - window
        if levels[at] <= best + max(share * max(abs(best), 0.1), error):
            above, is_named = 0, False
            continue
        above += 1
        climbs = recent[at] >= max(recent[at - window : at])
        is_named = is_named or climbs or 2 * above > 3 * window
    return _Rise(levels[-1], best, best_at + window - 1) if is_named else None


def _error_of_median(losses: Sequence[float], window: int) -> float:
    """Estimate the standard error of a window's median from the steps between neighbours, which no slow trend moves.

    For normal noise: the median size of a step is 0.954 of its deviation, and a median's error 1.25 of a mean's."""
    steps = [abs(after - before) for before, after in pairwise(losses)]
    return 1.25 * (median(steps) / 0.954) / math.sqrt(window)


def _has_fallen_since(training: Sequence[float | None], version: int) -> bool:
    """Whether the training loss is lower than it was when ``version`` was made."""
    before = [loss for loss in training[max(0, version - _ROUNDS) : version] if loss is not None]
    now = [loss for loss in training[-_ROUNDS:] if loss is not None]
    return bool(before and now) and median(now) < median(before)
