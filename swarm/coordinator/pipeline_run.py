"""Coordinator of a run in stages: a barrier over their scopes, and who holds which stages, as a planner proposes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.admission import Admission, Standing
from shoal.swarm.coordinator.amendments import RunSettings
from shoal.swarm.coordinator.barrier import Barrier
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.membership import Membership
from shoal.swarm.coordinator.micro_batch_ledger import Batch, MicroBatchLedger
from shoal.swarm.coordinator.model_check import check_same_tokens
from shoal.swarm.coordinator.placement import PipelineViews, PlacementRequest, believed, cost_of
from shoal.swarm.coordinator.reachability import WHAT_HELPS, can_be_dialed, can_meet, is_limited, say_apart
from shoal.swarm.coordinator.round_scope import RoundScope, Sign, ToldOutlook
from shoal.swarm.coordinator.round_timing import TimingHistory
from shoal.swarm.coordinator.stage import Stage
from shoal.swarm.coordinator.stall_detector import StallDetector
from shoal.swarm.coordinator.trust import ACCUSED_AT_ONCE, DETOUR_ROUNDS, credit_of, outvotes
from shoal.swarm.costs import run_costs
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import ModelMismatch, NotAdmitted, WireError
from shoal.swarm.pipeline.planner.meeting import strangers
from shoal.swarm.pipeline.planner.model import Infeasible, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    PeerToCoordinatorAccuseReplica,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorShowCapability,
)
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import (
    MAX_RATE,
    Capability,
    DeviceInfo,
    LayerSize,
    MemberStatus,
    Phase,
    PipelineView,
    RosterEntry,
    StageStatus,
)
from shoal.swarm.sample_ranges import Ranges, count, from_wire, is_tidy, merge, overlap, to_wire, union


class PipelineRun:
    """Coordinator of a pipeline run, in whose own scope every peer is a member.

    ``scopes`` and ``stages``: of each stage, once the model is cut, its rounds and what it has beside. ``spans``: by
    live member, the first and the last stage that it holds; ``former``: by member, the span that it held last, as the
    state of those stages may be on its disk. ``version``: of the spans. ``moved_s``: when a peer last got another span
    than it had, in Unix time, as the coordinator's own clock starts anew with it; ``rests``: peers that kept others
    waiting, and so get no stage for a while."""

    number = 0

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        self.settings = RunSettings(run)
        self.log = EventLog(now_s, epoch)
        self.deadlines = Deadlines(run.round.patience_s)
        self.membership = Membership(roster_version=epoch)
        self.scopes: list[RoundScope] = []
        self.admission = Admission(run, self.log, self)
        self.stages: list[Stage] = []
        self.barrier = Barrier(self.scopes, all_or_none=True)
        self.layers: tuple[LayerSize, ...] = ()
        self.capabilities: dict[str, Capability] = {}
        self.boundaries: tuple[int, ...] = ()
        self.spans: dict[str, tuple[int, int]] = {}
        self.former: dict[str, tuple[int, int]] = {}
        self.moved_s: dict[str, float] = {}
        self.rests: dict[str, ev.Rest] = {}
        self.version = 0
        self.shortage = ""
        """Reason why there is no plan, in the planner's words."""
        self.timings = TimingHistory()
        self._sign = sign
        self._told_outlook = ToldOutlook()
        self.wants_last_state = False
        """As of ``RoundScope``."""
        self._views = PipelineViews(run)
        self._is_plan_due = True
        self._may_rebalance = False
        """Whether peers may move for the sake of speed: once a round, and not while a stage is empty."""
        self._asked: PlacementRequest | None = None
        self._proposed: tuple[PlacementRequest, StagePlan] | None = None
        """An answer whose moves wait for the end of the round."""
        self._cut_from_s: float | None = None
        """Earliest moment of the first plan, so that peers that start together are all in it."""
        self._stall_detector = StallDetector(self.deadlines, 1 + run.outer.slots)
        self._resting: set[str] = set()
        self._next_stall_check_s = now_s
        self._accusers: dict[str, dict[str, int]] = {}
        """By accused replica, its accusers, each with the round. Not journaled: after a restart they accuse again."""
        self._drove_s: dict[str, float] = {}
        """Moment at which each driver last got or finished a micro-batch."""

    @property
    def run(self) -> RunFile:
        """The run file as it is in the open round."""
        return self.settings.at(self.round_number)

    @property
    def has_ended(self) -> bool:
        return self.phase == "ended"

    @property
    def phase(self) -> Phase:
        """Phase of the round in all stages; waiting while one of them waits."""
        phases = {scope.round.phase for scope in self.scopes}
        return "waiting" if "waiting" in phases or not phases else self.scopes[0].round.phase

    @property
    def round_number(self) -> int:
        return self.scopes[0].round.number if self.scopes else 0

    @property
    def anchor_version(self) -> int:
        return self.scopes[0].anchor_version if self.scopes else 0

    @property
    def urgent_state(self) -> tuple[int, str, int]:
        """State whose changes are sent to the members at once, without waiting for their heartbeats."""
        return self.round_number, self.phase, self.version

    def batch(self) -> Batch | None:
        """Return the samples of this round; None before every stage's model is known."""
        batches = [stage.batch() for stage in self.stages]
        return batches[0] if batches and None not in batches else None

    def missing(self, batch: Batch) -> Ranges:
        """Return the samples of the batch without a claim in some stage."""
        missing: Ranges = []
        for stage in self.stages:
            missing = union(missing, stage.unclaimed(batch))
        return missing

    def resting(self) -> set[str]:
        """Return the peers that should get no stage now, less those that had to get one nonetheless."""
        resting = {peer for peer, rest in self.rests.items() if rest.until_s > self.log.unix_s}
        return resting - self.spans.keys()

    def walls(self) -> Mapping[str, str]:
        """Return why peers have no stage although they could hold one, by peer: whom they would have to meet."""
        members = self.membership.members
        idle = self.capabilities.keys() - self.spans.keys()
        limited = [peer for peer in idle if is_limited(members[peer])]
        beside = sorted(self.spans or idle) if limited else []
        apart = {
            peer: [other for other in beside if other != peer and not can_meet(peer, other, members)]
            for peer in limited
        }
        return {
            peer: f"it cannot connect to {self._name(others)}, nor they to it, and has no stage beside: {WHAT_HELPS}"
            for peer, others in apart.items()
            if others
        }

    def say_apart(self) -> str:
        """Say which peers cannot meet the others, and what to do; empty when all can."""
        return say_apart(self.membership.trainers(), self.walls())

    def parameters_bytes(self, stage: int) -> int:
        """Return the size of a stage's parameters in float32."""
        first, stop = self.boundaries[stage : stage + 2]
        return sum(layer.parameters_bytes for layer in self.layers[first:stop])

    def holders(self, stage: int) -> list[str]:
        """Return the peers whose span has this stage."""
        return [peer for peer, (first, last) in self.spans.items() if first <= stage <= last]

    def holds(self, peer: str, stage: int) -> bool:
        span = self.spans.get(peer)
        return span is not None and span[0] <= stage <= span[1]

    # Events ---------------------------------------------------------------------------------------------

    def record(self, event: ev.JournalEvent) -> None:
        """Decide: the event changes the state, and goes to the journal. Whoever leaves the run leaves its stages,
        and is reached in its stages as in the run."""
        self.log.record(self, event)
        if isinstance(event, ev.MemberJoined | ev.MemberLost | ev.MemberMoved):
            self._is_plan_due = True
        if isinstance(event, ev.MemberLost):
            self._drove_s.pop(event.peer, None)
        if isinstance(event, ev.MemberLost | ev.MemberMoved):
            for scope in self.scopes:
                member = scope.membership.members.get(event.peer)
                if member is not None and member.alive:
                    scope.record(event)

    def apply(self, event: ev.JournalEvent) -> None:
        """Change the state as a new event says, or one from the journal."""
        match event:
            case ev.InScope():
                self.scopes[event.scope - 1].apply(event.event)
            case ev.CoordinatorStarted():
                for membership in (self.membership, *(scope.membership for scope in self.scopes)):
                    membership.roster_version = max(membership.roster_version, self.log.epoch)
                self.membership.skip_time(event.at_s)
            case ev.RunAmended():
                self.settings.add(event.amendments, event.round)
            case ev.LayersDescribed():
                self.layers = event.layers
            case ev.CapabilityShown():
                self.capabilities[event.peer] = event.capability
            case ev.StagesCut():
                self.boundaries = event.boundaries
                self._make_stages()
            case ev.SpanAssigned():
                if event.peer in self.spans:
                    self.moved_s[event.peer] = event.at_s
                self.spans[event.peer] = self.former[event.peer] = (event.first, event.last)
                self.version += 1
            case ev.SpanTaken():
                del self.spans[event.peer]
                self.version += 1
                if event.reason:
                    times = self.rests[event.peer].times if event.peer in self.rests else 0
                    self.rests[event.peer] = ev.Rest(until_s=event.until_s, reason=event.reason, times=times + 1)
            case ev.MemberJoined(entry=entry):
                earlier = self.membership.members.get(entry.peer)
                if earlier is not None and earlier.entry.certificate.curve_key != entry.certificate.curve_key:
                    self.rests.pop(entry.peer, None)  # a new process may do better
                self.membership.join(event, self.log.now_s, self.anchor_version)
                self.admission.access_list.apply(event)
            case ev.MemberMoved():
                self.membership.move(event)
            case ev.MemberLost():
                self.membership.lose(event)
                for peer in self.membership.forget_strangers(self._left_traces):
                    self.admission.sent_bytes.forget(peer)
                self.capabilities.pop(event.peer, None)
                if self.spans.pop(event.peer, None) is not None:
                    self.version += 1
            case _ if isinstance(event, ev.AccessEvent):
                self.admission.access_list.apply(event)
                if isinstance(event, ev.PeerBanned | ev.MemberExpelled):
                    for scope in self.scopes:
                        scope.membership.forfeit_credit(event)
            case ev.AccessRecorded():
                pass  # for people
            case ev.PipelineSnapshot():
                self._restore(event)
            case _:
                raise AssertionError(f"no rule for {type(event).__name__}")

    def standing(self, peer: str) -> Standing:
        """Return the reasons to keep a member: its work in any of the stages, and its place there."""
        standings = [scope.standing(peer) for scope in self.scopes]
        has_credit = any(one.has_credit for one in standings)
        rounds = max((one.rounds for one in standings), default=0)
        credit = max((one.credit for one in standings), default=0.0)
        return Standing(has_credit, rounds, credit, peer in self.spans)

    def _left_traces(self, peer: str) -> bool:
        return peer in self.former or any(peer in scope.membership.members for scope in self.scopes)

    def _make_stages(self) -> None:
        pinned = self.run.pins.layers if self.run.pins else None
        for number, (first, stop) in enumerate(pairwise(self.boundaries)):
            layers = pinned[first:stop] if pinned else ()
            scope = RoundScope(self.settings.run, self._sign, self.log, number, layers, self.settings)
            assert scope.stage is not None
            scope.admission.access_list = self.admission.access_list
            scope.together, scope.timings = self.scopes, self.timings
            scope.timed = None if self.scopes else self.membership  # all stages' rounds end together
            self.scopes.append(scope)
            self.stages.append(scope.stage)

    # Compaction -----------------------------------------------------------------------------------------

    def snapshot(self) -> ev.PipelineSnapshot | None:
        """Return the state as one event; None while a round is about to end, and while events are not yet written."""
        if not self.log.is_written or self.phase in ("closing", "averaging"):
            return None
        ledger = self.stages[0].micro_batches if self.stages else MicroBatchLedger()
        members, replaced = self.membership.kept()
        return ev.PipelineSnapshot(
            epoch=self.log.epoch,
            members=members,
            replaced=replaced,
            layers=self.layers,
            capabilities=tuple(ev.CapabilityShown(peer=one, capability=of) for one, of in self.capabilities.items()),
            boundaries=self.boundaries,
            spans=_spans(self.spans),
            former=_spans(self.former),
            moved_s=dict(self.moved_s),
            rests=dict(self.rests),
            version=self.version,
            driven=to_wire(ledger.driven),
            in_flight={peer: to_wire(ranges) for peer, ranges in ledger.in_flight.items()},
            finished=dict(ledger.finished),
            stages=tuple(scope.as_snapshot() for scope in self.scopes),
            access=self.admission.access_list.kept(),
            amendments=self.settings.made,
        )

    def _restore(self, event: ev.PipelineSnapshot) -> None:
        self.layers, self.boundaries, self.version = event.layers, event.boundaries, event.version
        self.membership.restore(event.members, event.replaced, self.log.epoch, self.log.now_s)
        self.capabilities = {one.peer: one.capability for one in event.capabilities}
        self.spans = {one.peer: (one.first, one.last) for one in event.spans}
        self.former = {one.peer: (one.first, one.last) for one in event.former}
        self.moved_s, self.rests = dict(event.moved_s), dict(event.rests)
        self.admission.access_list.restore(event.access)
        self.settings.made = event.amendments
        if self.boundaries:
            self._make_stages()
            for scope, kept in zip(self.scopes, event.stages, strict=True):
                scope.apply(kept)
            in_flight = {peer: from_wire(ranges) for peer, ranges in event.in_flight.items()}
            self.stages[0].micro_batches = MicroBatchLedger(from_wire(event.driven), in_flight, dict(event.finished))

    # What others see ------------------------------------------------------------------------------------

    def view(
        self,
        peer: str,
        now_s: float,
        roster_version: int = -1,
        verdict_chain: bytes | None = None,
        plan_digest: bytes | None = None,
    ) -> RunView:
        """Return what a member has to know of the run; the rounds of its stages are in the stages' own views."""
        first = self.scopes[0] if self.scopes else None
        closes_in_s = max(0.0, first.round.closes_s - now_s) if first and self.phase == "closing" else None
        roster, delta = self.membership.roster_news(roster_version)
        return RunView(
            epoch=self.log.epoch,
            sequence=self.log.announcements,
            round=self.round_number,
            anchor_version=self.anchor_version,
            phase=self.phase,
            closes_in_s=closes_in_s,
            plan=None,
            verdict=None,
            verdict_chain=None,
            state_digest=None,
            tokens_committed=first.tokens_committed if first else 0,
            tokens_in_round=self.tokens_in_round(),
            members=len(self.membership.trainers()),
            must_resync=False,
            roster_version=self.membership.roster_version,
            roster=roster,
            roster_delta=delta,
            pipeline=self.pipeline_view() if not self._knows_spans(peer) else None,
            wall=self.walls().get(peer, ""),
            amendments=self.settings.made,
            stays=self.has_ended and self.wants_last_state,
            waits_for=self._told_outlook.take(now_s, self.say_outlook, 2 * self.deadlines.heartbeat_s),
        )

    def _knows_spans(self, peer: str) -> bool:
        """Whether a peer's heartbeat named the newest spans: they are long where very many hold stages."""
        member = self.membership.members.get(peer)
        return member is not None and self.version > 0 and member.headway.plan_version == self.version

    def tokens_in_round(self) -> int:
        """Return what all stages have done of the round."""
        return min((scope.tokens_in_round() for scope in self.scopes), default=0)

    def pipeline_view(self) -> PipelineView | None:
        """Return the stages' boundaries and who holds which; None before the model is cut."""
        if not self.boundaries:
            return None
        plan = StagePlan(self.boundaries, self.spans)
        return self._views.of(plan, self.version, self.layers, self.capabilities)

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        """Return the run at a glance, for people. What all stages have in common is as in the first one.

        The model as a whole has no digest: its stages have theirs."""
        first = self.scopes[0] if self.scopes else RoundScope(self.settings.run, self._sign, self.log)
        members = _members_of(self, now_s + self.log.unix_offset_s)
        update = {
            "phase": self.phase,
            "tokens_in_round": self.tokens_in_round(),
            "state_digest": None,
            "outlook": self.say_outlook(),
            "members": members,
            "costs": run_costs(self.run.cost, members, first.tokens_committed),
            "stages": _stages_of(self),
            "amendments": self.settings.made,
        }
        if self.phase != "closing":
            update["closes_in_s"] = None
        return first.status(now_s).model_copy(update=update)

    # Members --------------------------------------------------------------------------------------------

    def join_stage(self, stage: int, entry: RosterEntry, device: DeviceInfo, now_s: float) -> None:
        """Admit a member of the run to a stage that it holds; an observer to any. Raises ``NotAdmitted``."""
        if self.membership.holder(entry.certificate.curve_key) != entry.peer:
            raise NotAdmitted("not a member of this run (any more): join it before its stages")
        if entry.role != "observer" and not self.holds(entry.peer, stage):
            raise NotAdmitted(f"stage {stage} is not this peer's: the view says which stages are")
        self.scopes[stage].admission.join(entry, device, now_s, self.membership.members[entry.peer].network)

    def describe_stage(self, stage: int, peer: str, model: PeerToCoordinatorDescribeModel) -> None:
        """Take down the model of a stage; samples are alike in all stages. Raises as ``RoundScope.describe_model``."""
        for scope in self.scopes:
            if scope.model is not None:
                check_same_tokens(scope.model, model)
        self.scopes[stage].describe_model(peer, model)

    def heartbeat(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, now_s: float) -> None:
        """Note that a member is alive; how far it is, it reports in its stages."""
        self.log.now_s = now_s
        unmet_before = self.membership.members[peer].unmet
        self.membership.hear(peer, heartbeat, self.round_number, now_s)
        if heartbeat.unmet != unmet_before:
            self._is_plan_due = True

    # Driving --------------------------------------------------------------------------------------------

    def drive(self, peer: str, ask: PeerToCoordinatorDrive, now_s: float) -> Ranges:
        """All micro-batches that this peer is to drive, one range each: those that it has not said to be done, and new
        ones until there are ``samples`` of them, or its part of the batch. Asking again changes nothing, so a lost
        answer costs nothing. What it said to be done and stands there nonetheless is to be driven once more.

        Raises ``WireError`` for samples that overlap."""
        self.log.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        batch, done = self.batch(), from_wire(ask.done)
        if batch is None or ask.round != self.round_number:
            return []
        ledger = self.stages[0].micro_batches
        if not is_tidy(done):
            raise WireError("the sample ranges of what was driven must not be empty or overlap")
        done = overlap(ledger.in_flight.get(peer, []), merge(done))
        if done:
            self._give_to_drive(peer, [], done)
        fair = ledger.fair_samples(peer, batch)
        most = ask.samples if fair is None else min(ask.samples, fair)
        missing = most - count(ledger.in_flight.get(peer, []))
        if missing > 0 and self._may_drive(peer):
            stalled = [one for one in ledger.in_flight if one != peer and self._has_stalled(one, now_s)]
            fresh = ledger.choose(batch, self.missing(batch), stalled, missing)
            if fresh:
                self._give_to_drive(peer, fresh, [])
        return batch.cells(ledger.in_flight.get(peer, []))

    def _give_to_drive(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        self._drove_s[peer] = self.log.now_s
        self.scopes[0].record(ev.SamplesDriven(peer=peer, ranges=to_wire(ranges), done=to_wire(done)))

    def is_assembled(self) -> bool:
        """Whether every stage has somebody who works for the round, so that there is anything to drive."""
        return all(scope.round.phase == "training" and scope.working() for scope in self.scopes)

    def _may_drive(self, peer: str) -> bool:
        return self.is_assembled() and self.holds(peer, 0) and peer in self.scopes[0].working()

    def _has_stalled(self, peer: str, now_s: float) -> bool:
        """A driver that has finished nothing for as long as a micro-batch could wait for others."""
        return now_s > self._drove_s.setdefault(peer, now_s) + self.deadlines.result_s

    # Spans ----------------------------------------------------------------------------------------------
    # ``plan_request`` is asked when somebody comes or goes, and after each round; ``take_plan`` hears the answer.

    def show_capability(self, peer: str, shown: PeerToCoordinatorShowCapability, now_s: float) -> None:
        """Raises ``ModelMismatch`` when the layers are not the run's."""
        self.log.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        if not member.is_trainer:
            raise NotAdmitted("only peers that train hold stages")
        self._check_layers(peer, shown.layers)
        if self.capabilities.get(peer) == shown.capability:
            return
        self.record(ev.CapabilityShown(peer=peer, capability=shown.capability))
        span = self.former.get(peer)
        if span is not None and peer not in self.spans and self._is_state_missing(span):
            self._assign({peer: span})
        self._is_plan_due = True

    def _check_layers(self, peer: str, layers: tuple[LayerSize, ...]) -> None:
        """Check a member's layers: against those that the run file pins, else those that the first member has shown,
        which count until the model is cut only while somebody is here who shows the same. Raises ``ModelMismatch``."""
        pinned = self.run.pins.layers if self.run.pins else None
        if pinned and [4 * layer.elements for layer in pinned] != [layer.parameters_bytes for layer in layers]:
            raise ModelMismatch(
                "this model's layers are not those that the run file pins: is the same release of shoal and of the "
                "recipe installed here as where the run was prepared?"
            )
        difference = _difference(self.layers, layers)
        others = sorted(self.capabilities.keys() - {peer})
        if not self.layers or (difference and not self.boundaries and not others):
            self.record(ev.LayersDescribed(layers=layers))
        elif difference:
            they = self._name(others) if others else "those who came first"
            undo = "host the run anew under another name" if self.boundaries else "stop them, and join again"
            raise ModelMismatch(
                f"this model is not the run's: {difference}, as {they} said. All need the same release of shoal and of "
                f"the recipe; if it is they who have another one, {undo}"
            )

    def _is_state_missing(self, span: tuple[int, int]) -> bool:
        """Whether nobody holds the newest state of one of its stages: who held it last may have it on its disk."""
        return any(not scope.working() for scope in self.scopes[span[0] : span[1] + 1])

    # The planner ----------------------------------------------------------------------------------------

    def plan_request(self, now_s: float) -> PlacementRequest | None:
        """Return the next request to the planner, one at a time; None while there is nothing to ask.

        Newcomers get a place at once, and so do empty stages a peer that moves. Else peers move between two rounds
        only, one at a time."""
        self.log.now_s = now_s
        if self._asked is not None or self.has_ended or not self._is_plan_due or not self.capabilities:
            return None
        assert self.run.pipeline is not None
        if not self.boundaries and self.run.pipeline.stages == "auto":
            if self._cut_from_s is None:
                self._cut_from_s = now_s + self.deadlines.patience_s
            if now_s < self._cut_from_s:
                return None
        empty = self._empty()
        is_new = self.capabilities.keys() - self.spans.keys()
        if self.boundaries and not (empty or is_new or self._may_rebalance):
            return None
        rebalances = self._may_rebalance and not empty
        self._is_plan_due = self._may_rebalance = False
        self._asked = self._request(Rebalancing(self.log.unix_s, dict(self.moved_s)) if rebalances else None)
        return self._asked

    def take_plan(self, asked: PlacementRequest, plan: StagePlan | Infeasible, now_s: float) -> None:
        """The planner's answer: as much of it as still holds, and what does not is asked anew."""
        self.log.now_s, self._asked = now_s, None
        if self.has_ended:
            return
        unchanged = asked.unchanged(self._request(None))
        is_whole = len(unchanged) == len(asked.peers) + len(asked.resting)
        if not is_whole:
            self._is_plan_due = True
        if isinstance(plan, Infeasible):
            self.shortage = plan.reason if is_whole else self.shortage
            return
        if not self.boundaries:
            if not is_whole:
                return
            self.record(ev.StagesCut(boundaries=plan.boundaries))
        assert self.boundaries == tuple(plan.boundaries), "boundaries never move"
        self.shortage = ""
        is_refill = bool(self._empty())
        places = {peer: span for peer, span in plan.spans.items() if peer in unchanged and peer not in self.spans}
        self._assign(places)
        if is_refill and is_whole:
            self._assign(self._moves(asked, plan))
        elif asked.rebalancing is not None:
            self._proposed = asked, plan
            if not (self.stages and self.stages[0].micro_batches.driven):  # nothing of the round is begun yet
                self._move_one()

    def _request(self, rebalancing: Rebalancing | None) -> PlacementRequest:
        resting, peers = self.resting(), self._peers()
        return PlacementRequest(
            previous=StagePlan(self.boundaries, dict(self.spans)) if self.boundaries else None,
            layers=tuple(cost_of(one) for one in self.layers),
            peers=tuple(one for one in peers if one.peer not in resting),
            resting=tuple(one for one in peers if one.peer in resting),
            rebalancing=rebalancing,
        )

    def _between_rounds(self) -> None:
        """A round has ended: somebody may move for the sake of the next ones."""
        self._move_one()
        self._is_plan_due = self._may_rebalance = True

    def _move_one(self) -> None:
        """As was proposed, if everybody is as it was then."""
        proposed, self._proposed = self._proposed, None
        if proposed is None or self._empty():
            return
        asked, plan = proposed
        moves = self._moves(asked, plan)
        if asked.unchanged(self._request(None)) >= (asked.previous.spans.keys() if asked.previous else set()):
            self._assign(dict(list(moves.items())[:1]))

    def _moves(self, asked: PlacementRequest, plan: StagePlan) -> dict[str, tuple[int, int] | None]:
        """Of those that held something then, who would hold something else, or nothing."""
        held = asked.previous.spans if asked.previous else {}
        return {peer: plan.spans.get(peer) for peer in held if plan.spans.get(peer) != self.spans.get(peer)}

    def _empty(self) -> list[int]:
        return [stage for stage in range(len(self.stages)) if not self.holders(stage)]

    def _peers(self) -> list[PeerCapability]:
        members = self.membership.members
        return [
            replace(
                one,
                network=members[one.peer].network,
                is_dialed=can_be_dialed(members[one.peer]),
                unmet=frozenset(members[one.peer].unmet),
            )
            for one in believed(self.capabilities)
        ]

    def _part_strangers(self) -> None:
        """Take the stages of peers that cannot meet those beside them, so that others get them. Of two peers the one
        that says so, or else the one that came last: neither is to blame."""
        members = self.membership.members
        if not any(is_limited(members[peer]) for peer in self.spans):
            return
        for pair in strangers(self.spans, self._peers()):
            if all(peer in self.spans for peer in pair):
                one, other = sorted(pair, key=lambda peer: (-members[peer].joined_s, peer))
                peer = other if one in members[other].unmet and other not in members[one].unmet else one
                stays = other if peer == one else one
                reason = f"cannot connect to {self._name([stays])}, which is beside it"
                self.record(ev.SpanTaken(peer=peer, at_s=self.log.unix_s, reason="", until_s=0.0))
                self._leave_stages(peer, reason)
                self._is_plan_due = True

    def _assign(self, spans: Mapping[str, tuple[int, int] | None]) -> None:
        """Assign stages to peers, None for none; a peer leaves the stages that it held, and its claims go to others."""
        for peer, span in sorted(spans.items()):
            if span is None:
                self.record(ev.SpanTaken(peer=peer, at_s=self.log.unix_s))
            else:
                self.record(ev.SpanAssigned(peer=peer, first=span[0], last=span[1], at_s=self.log.unix_s))
            self._leave_stages(peer, "moved to another stage")

    def take_span(self, peer: str, reason: str) -> None:
        """It kept the others waiting; ``reason``: for people, after its name."""
        times = self.rests[peer].times if peer in self.rests else 0
        until_s = self.log.unix_s + self.deadlines.rest_s(times)
        self.record(ev.SpanTaken(peer=peer, at_s=self.log.unix_s, reason=reason, until_s=until_s))
        self._leave_stages(peer, reason)
        self._is_plan_due = True

    def accuse(self, peer: str, accusation: PeerToCoordinatorAccuseReplica, now_s: float) -> None:
        """Take a member's word that a replica's work is wrong. It loses its stages for a while once two or more of its
        neighbours say so that have more than half of the credit of all of them and the accused."""
        self.log.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        accused = accusation.accused
        if peer == accused or not self.holds(accused, accusation.stage) or peer not in self.spans:
            return
        since = self.round_number - DETOUR_ROUNDS
        self._accusers = {
            one: {peer: made for peer, made in by.items() if made > since and peer in self.spans}
            for one, by in self._accusers.items()
            if one in self.spans
        }
        if sum(peer in by for one, by in self._accusers.items() if one != accused) >= ACCUSED_AT_ONCE:
            return
        by = self._accusers.setdefault(accused, {})
        by[peer] = self.round_number
        first, last = self.spans[accused]
        # Spans overlap: who holds some of the accused's stages, too, may send it activations for the others.
        senders = {one for one, span in self.spans.items() if first <= span[1] + 1 <= last}
        present = {*senders, *self.holders(last + 1)} - {accused}
        accusers = present & by.keys()
        if len(accusers) > 1 and outvotes(accusers, accused, [*present], self._credit({*present, accused})):
            del self._accusers[accused]
            self.take_span(accused, "sent wrong values, as its neighbours say")

    def _credit(self, peers: Iterable[str]) -> dict[str, int]:
        """Return the credit, of all stages, of those that have any."""
        credit: dict[str, int] = {}
        for scope in self.scopes:
            for peer, its in credit_of(scope.membership.members, peers).items():
                credit[peer] = credit.get(peer, 0) + its
        return credit

    def _leave_stages(self, peer: str, reason: str) -> None:
        """Those that are not its own any more."""
        for number, scope in enumerate(self.scopes):
            member = scope.membership.members.get(peer)
            if member is not None and member.alive and not self.holds(peer, number):
                scope.record(ev.MemberLost(peer=peer, reason=reason))

    def say_outlook(self) -> str:
        """Say for which stage or state the run waits; empty when it goes on."""
        if self.has_ended:
            return ""
        if not self.boundaries:
            apart = self.say_apart()
            return f"waiting for peers that can hold the model together{self._why()}{'; ' if apart else ''}{apart}"
        for stage, (first, stop) in enumerate(pairwise(self.boundaries)):
            if outlook := self.say_stage_outlook(stage):
                size = f"{self.parameters_bytes(stage) / 1e6:,.1f} MB of parameters"
                return f"stage {stage} (layers {first} to {stop - 1}, {size}) {outlook}"
        return self.say_apart()

    def say_stage_outlook(self, stage: int) -> str:
        """Say for which state a stage waits; empty when somebody holds its newest."""
        if self.scopes[stage].working() or self.has_ended:
            return ""
        if outlook := self.scopes[stage].say_outlook():
            return f"waits for its state: {outlook}"
        if holders := self.holders(stage):
            return f"waits for {self._name(holders)} to get its state{self._say_resting()}"
        return f"waits for a peer that can hold it{self._why()}{self._say_resting()}"

    def say_unchecked(self) -> str:
        """Say which stages have one replica, whose work nobody can compute again; empty if there are none."""
        alone = [str(stage) for stage in range(len(self.stages)) if len(self.holders(stage)) == 1]
        if len(alone) < 2:
            return f"stage {alone[0]} has one replica: nobody checks it" if alone else ""
        return f"stages {', '.join(alone)} have one replica each: nobody checks them"

    def _why(self) -> str:
        return f": {self.shortage}" if self.shortage else ""

    def _name(self, peers: list[str]) -> str:
        names = [self.membership.members[peer].entry.name for peer in sorted(peers)]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _say_resting(self) -> str:
        """Say which peers get no stage now, and why."""
        said = ""
        for peer in sorted(self.resting() & self.capabilities.keys())[:3]:
            rest = self.rests[peer]
            left_s = rest.until_s - self.log.unix_s
            said += f"; {self._name([peer])} {rest.reason}, and may come again in {left_s:.0f} s"
        return said

    # Time -----------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Do whatever time decides: silence, spans, and how rounds go on."""
        if stood_s := self.log.tick(now_s, self.deadlines.heartbeat_s):
            self._stall_detector.postpone(stood_s)
            self._drove_s = {peer: since_s + stood_s for peer, since_s in self._drove_s.items()}
            self.membership.excuse(stood_s, now_s)
            for scope in self.scopes:
                scope.excuse(stood_s)
        self.admission.lose_silent(now_s)
        self.admission.lose_idle(now_s)
        for scope in self.scopes:
            scope.admission.lose_silent(now_s)
        if self.scopes and self.barrier.tick(now_s):
            self._drove_s.clear()
            if not self.has_ended:
                for peer in self.barrier.evict_persistent_stragglers():
                    if peer in self.spans:
                        self.take_span(peer, "brought nothing that could be averaged")
                self._between_rounds()
        if not self.has_ended:
            self._look_for_stalls(now_s)

    def _look_for_stalls(self, now_s: float) -> None:
        """Now and then: who keeps the others waiting has to go, and whoever has rested may come again."""
        if now_s < self._next_stall_check_s:
            return
        self._next_stall_check_s = now_s + self.deadlines.heartbeat_s / 2
        resting = self.resting()
        if resting != self._resting:
            self._resting, self._is_plan_due = resting, True
        self._part_strangers()
        for stalled in self._stall_detector.find_stalled(self, now_s):
            self.take_span(stalled.peer, stalled.reason)


def _difference(run: tuple[LayerSize, ...], here: tuple[LayerSize, ...]) -> str:
    """In words; empty where there is none that matters."""
    if len(run) != len(here):
        return f"it has {len(here)} layers here, {len(run)} in the run"
    for number, (theirs, ours) in enumerate(zip(run, here, strict=True)):
        if theirs.parameters_bytes != ours.parameters_bytes:
            return (
                f"layer {number} has {ours.parameters_bytes} bytes of parameters here, "
                f"{theirs.parameters_bytes} in the run"
            )
    return ""


# Status -----------------------------------------------------------------------------------------------------


def _members_of(run: PipelineRun, unix_s: float) -> tuple[MemberStatus, ...]:
    """Each as fast as it is in its fastest stage, with what it has committed in all of them. What it does is told as
    in the first stage that it is in: its rounds are those of its stages."""
    committed = {
        peer: sum(
            scope.membership.members[peer].tokens_committed for scope in run.scopes if peer in scope.membership.members
        )
        for peer in run.membership.members
    }
    total, apart = sum(committed.values()), run.walls()
    told = []
    for one in run.membership.status(0, None, run.run.cost.prices, unix_s):
        mine = [scope for stage, scope in enumerate(run.scopes) if run.holds(one.peer, stage)]
        working = [scope.working()[one.peer] for scope in mine if one.peer in scope.working()]
        known = [scope.membership.members[one.peer] for scope in mine if one.peer in scope.membership.members]
        inside = [member.activity for member in known if member.alive]
        update = {
            "activity": inside[0] if inside else one.activity,
            "stages": run.spans.get(one.peer),
            "synced": bool(mine) and len(working) == len(mine),
            "tokens_per_s": 0.0 if run.phase == "waiting" else max((one.tokens_per_s for one in working), default=0.0),
            "tokens_committed": committed[one.peer],
            "share": committed[one.peer] / total if total else 0.0,
            "credit": run.standing(one.peer).credit,
            "wall": apart.get(one.peer, "")[:300],
            "times": next((member.times.training for member in known if member.times is not None), None),
        }
        told.append(one.model_copy(update=update))
    return tuple(told)


def _stages_of(run: PipelineRun) -> tuple[StageStatus, ...]:
    capacities = [sum(_capacity(run, scope, peer) for peer in scope.working()) for scope in run.scopes]
    least = min(capacities, default=0.0)
    return tuple(
        StageStatus(
            first_layer=run.boundaries[number],
            stop_layer=run.boundaries[number + 1],
            parameters_bytes=run.parameters_bytes(number),
            replicas=tuple(scope.working()),
            coming=tuple(peer for peer in run.holders(number) if peer not in scope.working()),
            tokens_per_s=_rate(run, scope),
            capacity_tokens_per_s=min(capacity, MAX_RATE),
            tokens_in_round=scope.tokens_in_round(),
            queue=run.stages[number].queue(),
            state_digest=scope.agreed_digest,
            outlook=run.say_stage_outlook(number)[:2000],
            is_bottleneck=capacity == least < max(capacities),
        )
        for number, (scope, capacity) in enumerate(zip(run.scopes, capacities, strict=True))
    )


def _rate(run: PipelineRun, scope: RoundScope) -> float:
    """Return the tokens a second of a stage; 0 while it waits for other stages, whatever replicas reported last."""
    return 0.0 if run.phase == "waiting" else min(sum(one.tokens_per_s for one in scope.working().values()), MAX_RATE)


def _capacity(run: PipelineRun, scope: RoundScope, peer: str) -> float:
    """Return the tokens a second that a peer could do in a stage if kept busy: the speed of its whole span."""
    shown, span = run.capabilities.get(peer), run.spans.get(peer)
    if shown is None or span is None or scope.model is None:
        return 0.0
    assert run.run.pipeline is not None
    seconds = sum(shown.layer_s[run.boundaries[span[0]] : run.boundaries[span[1] + 1]])
    return run.run.pipeline.micro_batch * scope.model.tokens_per_sample / max(seconds, 1e-9)


def _spans(spans: dict[str, tuple[int, int]]) -> tuple[ev.SpanAssigned, ...]:
    return tuple(ev.SpanAssigned(peer=peer, first=first, last=last) for peer, (first, last) in spans.items())
