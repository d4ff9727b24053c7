"""When a member has to close the round that it works for. Pure."""

from __future__ import annotations

import math

from shoal.swarm.protocol.messages import RunView


def is_due(
    view: RunView,
    closes_at_s: float | None,
    now_s: float,
    step_s: float,
    *,
    round_number: int,
    exchanging: bool,
) -> bool:
    """Whether there is no time for another step of ``step_s``; infinity: nothing to do it with, for this round.

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
    """What there has to be time for, or the round may as well be closed at once: nothing where there are samples
    (``left``), a step where they may be had, ``unknown_s`` before the first one; infinity where they may not."""
    if left:
        return 0.0
    return (step_s or unknown_s) if may_ask else math.inf
