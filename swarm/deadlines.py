"""Deadlines: every time-out of a run, derived from ``patience_s`` of its run file."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

CONNECT_S = 8.0
"""Time for a first connection, which is made before any run file is known."""


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds. Those of transfers are progress deadlines: they start again whenever something arrives.

    The straggler guard derives from them how long members wait in total for a far slower one."""

    patience_s: float

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats; several may be lost before a member counts as dead."""
        return min(5.0, self.patience_s / 6)

    @property
    def dead_s(self) -> float:
        """After this long without a sign of life a member is removed."""
        return self.patience_s

    @property
    def request_s(self) -> float:
        """Time for the answer to a request; two tries fit into the patience."""
        return self.patience_s / 2

    @property
    def announce_s(self) -> float:
        """Lead with which the closing of a round is announced, so that all members know of it in time."""
        return 2 * self.heartbeat_s

    @property
    def first_step_s(self) -> float:
        """Time that a member reserves for its first step before a closing.

        A quarter of the announcement's lead, so that the step also fits into the shortest possible rounds."""
        return self.announce_s / 4

    @property
    def ready_s(self) -> float:
        """Time from the announced closing until the round continues without members that are not ready."""
        return self.patience_s

    @property
    def contribution_s(self) -> float:
        """Time without a chunk from a contributor, until the owner continues without it."""
        return self.patience_s

    @property
    def partial_s(self) -> float:
        """Time without a chunk of a partial sum from a row reducer, until the row's members are asked.

        The row reducer waits for those members itself."""
        return 1.5 * self.patience_s

    @property
    def result_s(self) -> float:
        """Time without a chunk from an owner, which may itself wait for several contributors in turn."""
        return 2.5 * self.patience_s

    @property
    def grid_result_s(self) -> float:
        """The same in a grid, where the owner may wait for a row reducer, and that one for its row's members."""
        return 3 * self.patience_s

    @property
    def row_result_s(self) -> float:
        """Time without a chunk of a result from our row reducer, which may itself wait for the owner."""
        return 3.5 * self.patience_s

    @property
    def adopt_s(self) -> float:
        """Time without a chunk from a member that may hold a failed owner's results, until the next one is asked."""
        return self.patience_s / 4

    @property
    def report_s(self) -> float:
        """Time without progress of any member, until the verdict is given on the reports at hand."""
        return 4 * self.patience_s

    @property
    def return_s(self) -> float:
        """Shortest time for which a run whose newest state nobody holds waits for a holder before it rolls back.

        A machine that holds the state may be restarting. A rollback that undoes much waits longer
        (``coordinator/rollback.py``)."""
        return 4 * self.patience_s

    def enter_s(self, fetch_s: float) -> float:
        """Time without progress of a peer that enters its stages, until others get them.

        The peer may first have to finish a round of the stages that it leaves. ``fetch_s``: the time to fetch the
        stages' state at its link's rate; building the layers takes no longer than that."""
        return self.report_s + self.patience_s + 2 * fetch_s

    def idle_s(self, micro_batch_s: float) -> float:
        """Time without a computation in a pipeline that has work, until the member that the others wait for is removed.

        ``micro_batch_s``: the longest time of a micro-batch on any peer."""
        return self.report_s + 4 * micro_batch_s

    def newcomer_s(self, round_s: float) -> float:
        """Time without progress of a member without credit, until it is removed.

        Long enough to build a large model and wait for some rounds. ``round_s``: the longest time of a round's work."""
        return 4 * (round_s + 4 * self.patience_s)

    def rest_s(self, times: int) -> float:
        """Time during which a peer that stalled a pipeline is assigned no stage, after ``times`` earlier rests."""
        return self.patience_s * min(4 << min(times, 8), 64)

    @property
    def lease_s(self) -> float:
        """Seconds of work in one lease: enough to continue while the coordinator restarts."""
        return 2 * self.heartbeat_s


class Delays:
    """Recent delays of one kind of event, and the time to wait that follows from them.

    Uses the median and the median absolute deviation, which single stragglers do not move; after too few delays, the
    time to wait is the longest one."""

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
        """Delay that only stragglers exceed; None after too few delays."""
        if self._usual_s is None and len(self._seen) >= self._FEWEST:
            median_s = statistics.median(self._seen)
            spread_s = statistics.median(abs(seconds - median_s) for seconds in self._seen)
            self._usual_s = median_s + self._SPREADS * spread_s
        return self._usual_s

    @property
    def wait_s(self) -> float:
        """Time to wait: at least a third of the longest, as even regular delays vary, and at most the longest."""
        usual_s = self.usual_s
        return self._longest_s if usual_s is None else min(self._longest_s, self._longest_s / 3 + usual_s)
