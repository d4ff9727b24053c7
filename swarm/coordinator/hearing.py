"""What members of a scope with rounds say: their state and progress, contributions, how the averaging went. Pure."""

from __future__ import annotations

from shoal.swarm.averaging.norm_claims import claim_bytes
from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator.ending import Ending
from shoal.swarm.coordinator.status import status_of
from shoal.swarm.errors import StaleWork, WireError
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.sample_ranges import count, from_wire, is_tidy


class Hearing(Ending):
    """Methods named for events may raise a typed error for whoever caused it."""

    def heartbeat(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, now_s: float) -> None:
        self.now_s = now_s
        moved = self.membership.hear(peer, heartbeat, self.round.number, now_s)
        if not self.membership.is_observer(peer):
            process = self.membership.members[peer].entry.certificate.curve_key
            self.sent_bytes.hear(peer, process, heartbeat.bytes_sent)
        if moved and self.round.moves_left.get(peer) and peer not in self.round.reports:
            self.round.moves_left[peer] -= 1
            self.round.progress_s = now_s
        if moved:
            self._outage.saw_progress(now_s, self.membership.members[peer], self.history)
        if self.anchor_version == 0 and not self.is_beginning_written:
            self._agree_on_beginning()
        if self.round.phase == "waiting" and self.synced():
            self.round.phase = "training"
            self.round.opened_s = now_s
            self.announcements += 1

    def _agree_on_beginning(self) -> None:
        """The first to be here says what the run begins with; if nobody has that any more, somebody else does."""
        if self.agreed_digest is None or not (self.synced() or self.unheard()):
            digest = self.membership.common_digest(0)
            if digest is not None:
                self.record(f.StateAgreed(anchor_version=0, digest=digest))

    def ready(self, peer: str, ready: PeerToCoordinatorRoundReady, now_s: float) -> None:
        """A contribution is waiting. Raises ``StaleWork`` when its samples are not this peer's (any more)."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        if ready.round != self.round.number or self.round.phase != "closing" or not member.is_trainer:
            return  # also when the round goes on: its samples would not be all that this peer has done by the end
        ranges = from_wire(ready.ranges)
        if not is_tidy(ranges):
            raise WireError("the sample ranges of a contribution must not be empty or overlap")
        if not self.leases.holds(peer, ranges) or ready.anchor_version != self.anchor_version:
            raise StaleWork("these samples were given to others while this peer was silent; start from the anchor")
        if self.agreed_digest not in (None, ready.state_digest):
            raise StaleWork("this peer's state is not the run's; start from the anchor")
        if self.model is None or count(ranges) * self.model.tokens_per_sample != ready.weight_tokens:
            raise WireError("the weight of a contribution must be the tokens of its samples")
        if ready.norms and len(ready.norms) != claim_bytes(self.elements):
            raise WireError("a contribution's norms must be one for each range of the model")
        member.tokens_done = ready.weight_tokens
        before = self.round.ready.get(peer)
        if before is None:
            self.lease_clock.offer(peer, now_s)
            if self.counts(peer):
                self._ready_delays.saw(now_s - self.round.closes_s)
            self.round.ready_s = min(self.round.ready_s, now_s)
        elif before != ready:
            self.round.expected = None  # others may have got some of what it brought before
        self.round.ready[peer] = ready

    def report(self, peer: str, report: PeerToCoordinatorRoundReport, now_s: float) -> None:
        self.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        plan = self.round.plan
        if plan is None or report.round != self.round.number or peer not in self.averaging():
            return
        if len(report.digests) != len(plan.parts) or any(
            one >= len(plan.members)
            for one in (
                *report.dropped,
                *report.failed,
                *report.undelivered,
                *(one.member for one in report.deliveries),
            )
        ):
            raise WireError("the report does not fit the plan of its round")
        if peer not in self.round.reports:  # saying it again, or otherwise, holds off no verdict
            if self.counts(peer):
                self._report_delays.saw(now_s - self.round.reported_s if self.round.reports else 0.0)
            self.round.progress_s = self.round.reported_s = now_s
        self.round.reports[peer] = report

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        return status_of(self, now_s, self.say_outlook())
