"""Rounds that get more tokens than ``round.tokens``, as members train more in the shortest round that is possible."""

from __future__ import annotations

from shoal.peer.event_schema import Event, make_event
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.run_file import RunFile

_EXCESS = 1.5
"""Tokens of a round over those wanted from which it counts: a last step of each member is always on top."""

_IN_A_ROW = 2


class ShortRounds:
    """Notices that ``round.tokens`` is too small for a run's members; says it once for each value of it."""

    def __init__(self) -> None:
        self._most: list[int] = []
        """Tokens of the rounds in a row that had too many."""
        self._told_of = 0

    def note(self, run: RunFile, tokens: int) -> Event | None:
        """Take a committed round's tokens; ``run``: with its amendments. Returns an event where there is advice."""
        wanted = run.round.tokens
        if run.algorithm == "virtual_batch" or run.collective is not None or run.pipeline is not None:
            return None  # their rounds have as many as they say
        if wanted == self._told_of or tokens <= _EXCESS * wanted:
            self._most.clear()
            return None
        self._most.append(tokens)
        if len(self._most) < _IN_A_ROW:
            return None
        had, self._told_of = max(self._most), wanted
        self._most.clear()
        least_s = Deadlines(run.round.patience_s).announce_s
        return make_event("rounds_too_short", wanted=wanted, tokens=had, least_s=least_s, advised=_round_up(2 * had))


def _round_up(tokens: int) -> int:
    """Round up to two digits that count."""
    unit = int("1" + "0" * max(0, len(str(tokens)) - 2))
    return -(-tokens // unit) * unit
