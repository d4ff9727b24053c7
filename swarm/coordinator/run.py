"""Coordinator of a plain run as a pure state machine: requests and moments in, events and views out.

``service.py`` writes the events to the journal before it tells anybody. Replaying them gives the same state again.
"""

from __future__ import annotations

from shoal.swarm.coordinator.barrier import Barrier
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.round_scope import RoundScope, Sign
from shoal.swarm.protocol.run_file import RunFile


class PlainRun:
    """Coordinator of a plain run: a barrier over one scope."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        self.log = EventLog(now_s, epoch)
        self.scope = RoundScope(run, sign, self.log)
        self._barrier = Barrier([self.scope], all_or_none=False)

    def tick(self, now_s: float) -> None:
        """Do whatever time decides: silence, closing, planning, verdict."""
        if stood_s := self.log.tick(now_s, self.scope.deadlines.heartbeat_s):
            self.scope.excuse(stood_s)
        self.scope.admission.lose_silent(now_s)
        self.scope.admission.lose_idle(now_s)
        self._barrier.tick(now_s)
