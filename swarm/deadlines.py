"""Deadlines: every time-out of a run, derived from its one number ``patience_s``."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

CONNECT_S = 8.0
"""How long a first connection may take before it counts as unreachable; known before any run file is."""


@dataclass(frozen=True)
class Deadlines:
    """All in seconds. Progress deadlines: they start again whenever something arrives. How long the
    others wait in all for one that is far slower follows from them, too (``averaging/straggler_guard.py``)."""

    patience_s: float

    @property
    def heartbeat_s(self) -> float:
        """Between two heartbeats: five may get lost before anybody worries."""
        return min(5.0, self.patience_s / 6)

    @property
    def dead_s(self) -> float:
        """A member that was silent for so long is out."""
        return self.patience_s

    @property
    def request_s(self) -> float:
        """For one answer; two tries fit into the patience."""
        return self.patience_s / 2

    @property
    def announce_s(self) -> float:
        """How far ahead the closing of a round is announced: everybody must have heard of it by then."""
        return 2 * self.heartbeat_s

    @property
    def first_step_s(self) -> float:
        """What a member that has not made a step yet leaves for one before a closing: half of what the closing is
        announced ahead at least, so that it is in time wherever rounds are as short as they can be."""
        return self.announce_s / 4

    @property
    def ready_s(self) -> float:
        """From the announced closing until the round goes on without those who are not ready."""
        return self.patience_s

    @property
    def contribution_s(self) -> float:
        """Without a chunk from a contributor, until the owner goes on without it."""
        return self.patience_s

    @property
    def partial_s(self) -> float:
        """Without a chunk of a partial sum from its row reducer, until its members are asked: it waits for them
        itself."""
        return 1.5 * self.patience_s

    @property
    def result_s(self) -> float:
        """Without a chunk from an owner: it may itself be waiting for contributors, one after the other."""
        return 2.5 * self.patience_s

    @property
    def grid_result_s(self) -> float:
        """The same in a grid: it may be waiting for a row reducer, and then for the members of that one's row."""
        return 3 * self.patience_s

    @property
    def row_result_s(self) -> float:
        """Without a chunk of a result from our row reducer: it may be waiting for the owner."""
        return 3.5 * self.patience_s

    @property
    def adopt_s(self) -> float:
        """Without a chunk from somebody who may have results of a failed owner, until the next one is asked."""
        return self.patience_s / 4

    @property
    def report_s(self) -> float:
        """Without any progress of any member, until a verdict falls on what has been reported."""
        return 4 * self.patience_s

    @property
    def return_s(self) -> float:
        """From when nobody has the run's newest state until the run goes back without whoever might bring it: a machine
        may be starting. At least; who would undo much waits longer (``coordinator/rollback.py``)."""
        return 4 * self.patience_s

    def enter_s(self, fetch_s: float) -> float:
        """Without any progress of a peer on its way into its stages, until others get them. It may be in the averaging
        of those that it leaves first. ``fetch_s``: for their state at what its link carries; building layers takes less
        than that again."""
        return self.report_s + self.patience_s + 2 * fetch_s

    def idle_s(self, micro_batch_s: float) -> float:
        """Without any computation in a pipeline that has something to do, until whoever the others wait for loses its
        place. ``micro_batch_s``: the longest that one takes anywhere."""
        return self.report_s + 4 * micro_batch_s

    def newcomer_s(self, round_s: float) -> float:
        """Without anything new from a member without a record, until it loses its place. ``round_s``: the longest that
        a round's own work takes. Long enough for a machine that builds a large model or waits out some rounds."""
        return 4 * (round_s + 4 * self.patience_s)

    def rest_s(self, times: int) -> float:
        """For how long a peer that kept a pipeline waiting is given no stage, after so many such rests."""
        return self.patience_s * min(4 << min(times, 8), 64)

    @property
    def lease_s(self) -> float:
        """How many seconds of work one lease should hold: enough to ride out a coordinator's restart."""
        return 2 * self.heartbeat_s


class Delays:
    """How long others have lately been taking for one thing, and so how long it is worth waiting for it.

    Median and median deviation, which the odd straggler does not move; after too few of them, the whole patience.
    """

    _FEWEST, _MOST = 8, 256
    _SPREADS = 4.0

    def __init__(self, longest_s: float) -> None:
        self._seen: deque[float] = deque(maxlen=self._MOST)
        self._longest_s = longest_s
        self._usual_s: float | None = None

    def saw(self, seconds: float) -> None:
        self._seen.append(max(0.0, seconds))
        self._usual_s = None

    @property
    def usual_s(self) -> float | None:
        """What all but the odd straggler take; None after too few of them."""
        if self._usual_s is None and len(self._seen) >= self._FEWEST:
            median_s = statistics.median(self._seen)
            spread_s = statistics.median(abs(seconds - median_s) for seconds in self._seen)
            self._usual_s = median_s + self._SPREADS * spread_s
        return self._usual_s

    @property
    def wait_s(self) -> float:
        """Between a third of the longest, for nobody's clock is that even, and all of it."""
        usual_s = self.usual_s
        return self._longest_s if usual_s is None else min(self._longest_s, self._longest_s / 3 + usual_s)
