"""Coordinator of a plain run as a pure state machine: requests and moments in, events and views out.

``service.py`` writes the events to the journal before it tells anybody. Replaying them gives the same state again.
"""

from __future__ import annotations

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.barrier import Barrier
from shoal.swarm.coordinator.round_scope import RoundScope, Sign
from shoal.swarm.coordinator.stale_journal import is_known, taken_over
from shoal.swarm.protocol.messages import PeerToCoordinatorRequestLease
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.sample_ranges import Ranges, from_wire, to_wire


class PlainRun(RoundScope):
    """The coordinator of a plain run: a barrier over one scope, which is the run itself."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, sign, now_s, epoch)
        self._barrier = Barrier(all_or_none=False)

    def request_lease(self, peer: str, ask: PeerToCoordinatorRequestLease, now_s: float) -> Ranges:
        """Samples for this peer; none when the round has all it needs or has been closed. With ``overlap``, whoever
        has done its part of a round that closes is given samples for the next one.

        The same request again gets the same answer: the first one was lost, with the connection or with us."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        before = self.answered.get(peer)
        if before is not None and (before.round, before.tokens_done) == (ask.round, ask.tokens_done):
            ranges = from_wire(before.ranges)
            if self.leases.holds(peer, ranges):
                return ranges
        if ask.round == self.round.number:
            member.tokens_done = ask.tokens_done
            is_open = self.round.phase in ("training", "waiting") or self._has_time_left(peer)
        elif ask.round == self.round.number + 1:
            member.tokens_ahead = ask.tokens_done
            is_open = self.run.averaging.overlap and (self.round.phase == "averaging" or peer in self.round.ready)
        else:
            return []
        if not is_open or peer not in self.working() or self.model is None:
            return []
        if self.is_suspended(peer) or self.is_left_out(peer):
            return []
        samples = min(ask.samples, self.lease_limit(peer))
        if samples <= 0:
            member.progress_s = now_s  # it would work if it were let
            return []
        ranges = self.leases.choose(samples)
        self.record(ev.LeaseGranted(peer=peer, round=ask.round, tokens_done=ask.tokens_done, ranges=to_wire(ranges)))
        return ranges

    def _has_time_left(self, peer: str) -> bool:
        """Whether it can still do something for a round whose closing is announced: where rounds are short, that is
        most of their time."""
        in_time = self.round.phase == "closing" and self.now_s < self.round.closes_s
        return in_time and peer not in self.round.ready and not self.goal().exact

    def take_over(self, verdict: Verdict, now_s: float) -> bool:
        """A verdict that this host has given (``stale_journal.check_ours``). False: our journal is too old to go on."""
        self.now_s = now_s
        if is_known(self, verdict):
            return True
        event = taken_over(self, verdict, now_s)
        if event is not None:
            self.end_round(event)
        return event is not None

    def tick(self, now_s: float) -> None:
        """Do whatever time decides: silence, closing, planning, verdict."""
        self.now_s = now_s
        self.excuse_own_silence(now_s)
        self.lose_silent(now_s)
        self.lose_idle(now_s)
        self._barrier.tick([self], now_s)
