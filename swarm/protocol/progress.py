"""Progress of a run: share of what its file asks for, speed over wall time, time left. Both sides compute it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.protocol.types import MAX_RATE, Count, Rate, Record, Seconds

if TYPE_CHECKING:
    from shoal.swarm.protocol.run_file import RunSection

_LONGEST_S = 1e9


class RunProgress(Record):
    """How far a run is.

    ``goal_tokens``, ``goal_rounds``, ``goal_s``: where it ends, at the first of them, by its file and amendments;
    ``share``: 0 to 1, of the goal that is nearest; None without goals. ``tokens_per_s``: committed tokens of the
    latest rounds over their wall time, 0 while that is unknown; ``left_s``: time to the end at that speed."""

    goal_tokens: Count | None = None
    goal_rounds: Count | None = None
    goal_s: Seconds | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    tokens_per_s: Rate = 0.0
    left_s: Seconds | None = None


def progress_of(
    ends: RunSection,
    round_tokens: int,
    *,
    tokens: int,
    rounds: int,
    elapsed_s: float | None = None,
    tokens_per_s: float = 0.0,
) -> RunProgress:
    """Return how far a run with these ``ends`` is after so many committed ``tokens`` and ``rounds``.

    ``round_tokens``: of a round, for the time left where the run ends after rounds; ``elapsed_s``: None where it is
    not known."""
    shares, left_s = list[float](), list[float]()
    if ends.tokens is not None:
        shares.append(tokens / ends.tokens)
        if tokens_per_s > 0.0:
            left_s.append((ends.tokens - tokens) / tokens_per_s)
    if ends.rounds is not None:
        shares.append(rounds / ends.rounds)
        if tokens_per_s > 0.0:
            left_s.append((ends.rounds - rounds) * round_tokens / tokens_per_s)
    if ends.max_s is not None and elapsed_s is not None:
        shares.append(elapsed_s / ends.max_s)
        left_s.append(ends.max_s - elapsed_s)
    return RunProgress(
        goal_tokens=ends.tokens,
        goal_rounds=ends.rounds,
        goal_s=ends.max_s,
        share=min(1.0, max(shares)) if shares else None,
        tokens_per_s=min(tokens_per_s, MAX_RATE),
        left_s=min(_LONGEST_S, max(0.0, min(left_s))) if left_s else None,
    )
