"""A pipeline run's coordinator as a pure state machine: the run's own scope with its peers, their stages and what they
drive through them, and each stage, whose rounds begin and end with those of the others.

Every decision is a fact, in one list for all scopes, which the journal writes at once: after a crash there is all of it
or none. So a round is committed in all stages or in none."""

from __future__ import annotations

from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator.barrier import Barrier
from shoal.swarm.coordinator.ending import Sign
from shoal.swarm.coordinator.leases import Ranges, count, from_wire, is_tidy, merge, overlap, to_wire
from shoal.swarm.coordinator.pipeline_spans import Spans
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.coordinator.pipeline_status import status_of
from shoal.swarm.coordinator.pipeline_view import optimizer_values
from shoal.swarm.coordinator.stall_detector import Places
from shoal.swarm.errors import ModelMismatch, NotAdmitted, WireError
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    DeviceInfo,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorHeartbeat,
    RosterEntry,
)
from shoal.swarm.protocol.run_file import RunFile


class PipelineMachine(Spans):
    """Methods named for events may raise a typed error for whoever caused it. What a stage's members say goes to
    ``stage(scope)``, but for what other scopes have a say in."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, sign, now_s, epoch)
        self._barrier = Barrier()
        self._places = Places(self.deadlines, 1 + optimizer_values(run.outer))
        self._resting: set[str] = set()
        self._looks_s = now_s
        self._drove_s: dict[str, float] = {}
        """When each driver was given something, or had done something, the last time."""

    def stage(self, scope: int) -> StageMachine:
        """Raises ``NotAdmitted`` when the run has no such stage, yet or ever."""
        if not 1 <= scope <= len(self.stages):
            raise NotAdmitted(f"the run has no stage {scope - 1} (yet): wait for the view that says so")
        return self.stages[scope - 1]

    # Members --------------------------------------------------------------------------------------------

    def join(self, entry: RosterEntry, device: DeviceInfo, now_s: float, network: str = "") -> None:
        super().join(entry, device, now_s, network)
        self._is_plan_due = True

    def join_stage(self, scope: int, entry: RosterEntry, device: DeviceInfo, now_s: float) -> None:
        """A member of the run comes to a stage that it holds. Observers may look at any."""
        stage = self.stage(scope)
        if self.membership.holder(entry.certificate.curve_key) != entry.peer:
            raise NotAdmitted("not a member of this run (any more): join it before its stages")
        if entry.role != "observer" and not self.holds(entry.peer, stage.stage):
            raise NotAdmitted(f"stage {stage.stage} is not this peer's: the view says which stages are")
        stage.join(entry, device, now_s, self.membership.members[entry.peer].network)

    def describe_stage(self, scope: int, peer: str, model: PeerToCoordinatorDescribeModel) -> None:
        """Raises ``ModelMismatch`` or ``CorpusError`` naming the first difference to the others."""
        for other in [one.model for one in (self, *self.stages) if one.model is not None]:
            if other.tokens_per_sample != model.tokens_per_sample:
                raise ModelMismatch(
                    f"this model takes {model.tokens_per_sample} tokens a sample, the run's {other.tokens_per_sample}"
                )
        self.stage(scope).describe_model(peer, model)

    def heartbeat(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, now_s: float) -> None:
        """In the run's own scope: it is there. How far it is, it says in its stages."""
        self.now_s = now_s
        self.membership.hear(peer, heartbeat, self.round_number, now_s)

    def record(self, fact: f.Fact) -> None:
        """Whoever leaves the run leaves its stages."""
        super().record(fact)
        if isinstance(fact, f.MemberLost):
            self._is_plan_due = True
            self._drove_s.pop(fact.peer, None)
            for stage in self.stages:
                member = stage.membership.members.get(fact.peer)
                if member is not None and member.alive:
                    stage.record(fact)

    # Driving --------------------------------------------------------------------------------------------

    def drive(self, peer: str, ask: PeerToCoordinatorDrive, now_s: float) -> Ranges:
        """All micro-batches that this peer is to drive, one range each: those that it has not said to be done, and new
        ones until there are ``samples`` of them, or its part of the batch. Asking again changes nothing, so a lost
        answer costs nothing. What it said to be done and stands there nonetheless is to be driven once more.

        Raises ``WireError`` for samples that overlap."""
        self.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        batch, done = self.batch(), from_wire(ask.done)
        if batch is None or ask.round != self.round_number:
            return []
        if not is_tidy(done):
            raise WireError("the sample ranges of what was driven must not be empty or overlap")
        done = overlap(self.drives.in_flight.get(peer, []), merge(done))
        if done:
            self._give_to_drive(peer, [], done)
        fair = self.drives.fair_samples(peer, batch)
        most = ask.samples if fair is None else min(ask.samples, fair)
        missing = most - count(self.drives.in_flight.get(peer, []))
        if missing > 0 and self._may_drive(peer):
            stalled = [one for one in self.drives.in_flight if one != peer and self._has_stalled(one, now_s)]
            fresh = self.drives.choose(batch, self.missing(batch), stalled, missing)
            if fresh:
                self._give_to_drive(peer, fresh, [])
        return batch.cells(self.drives.in_flight.get(peer, []))

    def _give_to_drive(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        self._drove_s[peer] = self.now_s
        self.record(f.SamplesDriven(peer=peer, ranges=to_wire(ranges), done=to_wire(done)))

    def is_assembled(self) -> bool:
        """Whether every stage has somebody who works for the round, so that there is anything to drive."""
        return all(stage.round.phase == "training" and stage.working() for stage in self.stages)

    def _may_drive(self, peer: str) -> bool:
        return self.is_assembled() and self.holds(peer, 0) and peer in self.stages[0].working()

    def _has_stalled(self, peer: str, now_s: float) -> bool:
        """A driver that has finished nothing for as long as a micro-batch could wait for others."""
        return now_s > self._drove_s.setdefault(peer, now_s) + self.deadlines.result_s

    # Time -----------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Whatever time decides: silence, spans, and how rounds go on."""
        self.now_s = now_s
        stood_s = self.excuse_own_silence(now_s)
        self._places.excuse(stood_s)
        self._drove_s = {peer: since_s + stood_s for peer, since_s in self._drove_s.items()}
        for stage in self.stages:
            stage.now_s, stage.unix_offset_s = now_s, self.unix_offset_s
            stage.excuse_own_silence(now_s)
        self.lose_silent(now_s)
        self.lose_idle(now_s)
        for stage in self.stages:
            stage.lose_silent(now_s)
        has_ended = bool(self.stages) and self._barrier.tick(self.stages, now_s)
        if has_ended:
            self._drove_s.clear()
            if not self.has_ended:
                for peer in self._barrier.take_hopeless():
                    if peer in self.spans:
                        self.take_span(peer, "brought nothing that could be averaged")
                self._between_rounds()
        if not self.has_ended:
            self._look_at_places(now_s)

    def _look_at_places(self, now_s: float) -> None:
        """Now and then: who keeps the others waiting has to go, and whoever has rested may come again."""
        if now_s < self._looks_s:
            return
        self._looks_s = now_s + self.deadlines.heartbeat_s / 2
        resting = self.resting()
        if resting != self._resting:
            self._resting, self._is_plan_due = resting, True
        for overdue in self._places.look(self, now_s):
            self.take_span(overdue.peer, overdue.reason)

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        return status_of(self, now_s)
