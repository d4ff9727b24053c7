"""Decisions on what goes before local work: a round to close, a lost membership, the run's end.

Whole models and stages decide by the same list (``attention``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

from shoal.swarm.protocol.rounds import RunView


class Attention(Enum):
    """Something that the training thread has to do before it computes."""

    NOTHING = ""
    ROUND = "round"
    """A round is to be closed or concluded, or was."""
    AFRESH = "afresh"
    """The membership was lost, or the state held here is not the run's."""
    SPOILT = "spoilt"
    """Results are infinite or not a number."""
    MOVED = "moved"
    """The plan has given this peer other stages."""
    ENDED = "ended"


def attention(
    views: Sequence[RunView], is_due: Callable[[RunView], bool], *, rejoined: bool, stopping: bool = False
) -> Attention:
    """Decide what goes before local work, from the newest views of a run or of all stages held here.

    ``is_due``: whether a round has to be closed here by its view; ``rejoined``: a membership was lost and begun anew. A
    peer that is ``stopping`` starts nothing afresh, and closes a round that is closing.
    """
    if any(view.phase == "ended" for view in views) and not any(map(is_due, views)):
        return Attention.ENDED
    if not stopping and (rejoined or any(view.must_resync for view in views)):
        return Attention.AFRESH
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
    """Return whether the round has to be closed because another step of ``step_s`` does not fit.

    ``step_s``: infinity when there is nothing left to train on in this round.

    ``closes_at_s``: the announced moment, on the clock of ``now_s``. ``round_number``: the round that the local work is
    for. ``exchanging``: the round before that one may still be averaged, which is no reason to stop.
    """
    if exchanging and view.round < round_number:
        return False
    if view.round != round_number or view.phase == "averaging":
        return True
    if view.phase != "closing" or closes_at_s is None:
        return False
    return now_s + step_s > closes_at_s


def least_s(left: int, step_s: float, unknown_s: float, *, may_ask: bool) -> float:
    """Return the shortest time to the round's end with which it is worth going on, in seconds.

    Zero while samples are ``left``; else one step if more may be leased (``unknown_s`` before the first step), or
    infinity if not."""
    if left:
        return 0.0
    return (step_s or unknown_s) if may_ask else math.inf
