"""Decisions on what goes before local work: a round to close, a lost membership, the run's end.

Peers of a whole model and of a pipeline's stages decide by the same function, ``attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

from shoal.swarm.protocol.rounds import RunView


class Attention(Enum):
    """Task of the training thread that goes before further local work."""

    NOTHING = ""
    ROUND = "round"
    """Close the round, or conclude it."""
    RESYNC = "resync"
    """Begin again from the run's state: the membership was lost, or the state held here is not the run's."""
    DIVERGED = "diverged"
    """Drop the local work: results are infinite or not a number."""
    MOVED = "moved"
    """Leave the span: the plan has given this peer other stages, or none."""
    ENDED = "ended"
    """Leave the run, which has ended."""


def attention(
    views: Sequence[RunView], is_due: Callable[[RunView], bool], *, rejoined: bool, stopping: bool = False
) -> Attention:
    """Decide what goes before local work, from the newest views of a run or of all stages held here.

    ``is_due``: returns whether the round of a view has to be closed here; ``rejoined``: a membership was lost and this
    peer has joined again; ``stopping``: this peer leaves, so it does not resync and closes a round that is closing.
    """
    if any(view.phase == "ended" for view in views) and not any(map(is_due, views)):
        return Attention.ENDED
    if not stopping and (rejoined or any(view.must_resync for view in views)):
        return Attention.RESYNC
    if any(is_due(view) or (stopping and view.phase == "closing") for view in views):
        return Attention.ROUND
    return Attention.NOTHING


def is_due(
    view: RunView,
    closes_at_s: float | None,
    now_s: float,
    step_s: float,
    *,
    round_number: int,
    exchanging: bool,
) -> bool:
    """Return whether the round has to be closed because another step does not fit.

    ``closes_at_s``: announced closing moment on the clock of ``now_s``; ``step_s``: length of a step, infinite if no
    samples are left; ``round_number``: round that the local work is for; ``exchanging``: the round before it is being
    averaged here, which is no reason to stop.
    """
    if exchanging and view.round < round_number:
        return False
    if view.round != round_number or view.phase == "averaging":
        return True
    if view.phase != "closing" or closes_at_s is None:
        return False
    return now_s + step_s > closes_at_s


def least_s(left: int, step_s: float, unknown_s: float, *, may_ask: bool) -> float:
    """Return the shortest time to the round's end, in seconds, for which it is worth going on.

    Zero while samples are ``left``; else one step, ``unknown_s`` before the first, if the peer ``may_ask`` for more
    samples; else infinity.
    """
    if left:
        return 0.0
    return (step_s or unknown_s) if may_ask else math.inf
