"""When a member has to close the round that it works for. Pure."""

from __future__ import annotations

from shoal.swarm.messages import RunView


def is_due(
    view: RunView,
    closes_at_s: float | None,
    now_s: float,
    step_s: float,
    *,
    round_number: int,
    exchanging: bool,
    has_samples: bool,
) -> bool:
    """Whether there is no time for another step of ``step_s``; 0 asks whether there is anything left to do at all.

    ``closes_at_s``: the announced moment, on the clock of ``now_s``. ``round_number``: the round that the local work is
    for. ``exchanging``: the round before that one may still be averaged, which is no reason to stop.
    """
    if exchanging and view.round < round_number:
        return False
    if view.round != round_number or view.phase == "averaging":
        return True
    if view.phase != "closing" or closes_at_s is None:
        return False
    return (step_s == 0.0 and not has_samples) or now_s + step_s > closes_at_s
