"""Coordinator of a run in stages: spans as a planner proposes them and the moment allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.barrier import Barrier
from shoal.swarm.coordinator.lease_ledger import coverage_of
from shoal.swarm.coordinator.pipeline_state import PipelineState
from shoal.swarm.coordinator.placement import PlacementRequest, believed, cost_of
from shoal.swarm.coordinator.round_scope import Sign
from shoal.swarm.coordinator.stage_scope import StageScope
from shoal.swarm.coordinator.stall_detector import StallDetector
from shoal.swarm.errors import ModelMismatch, NotAdmitted, WireError
from shoal.swarm.pipeline.planner.model import Infeasible, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorShowCapability,
)
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import DeviceInfo, LayerSize, MemberStatus, RosterEntry, StageStatus
from shoal.swarm.sample_ranges import Ranges, count, from_wire, is_tidy, merge, overlap, to_wire


class PipelineRun(PipelineState):
    """Methods named for events may raise a typed error for whoever caused it. What a stage's members say goes to
    ``stage(scope)``, but for what other scopes have a say in."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, sign, now_s, epoch)
        self.shortage = ""
        """Why there is no plan, in the planner's words."""
        self._is_plan_due = True
        self._may_rebalance = False
        """Once a round, and not while a stage is empty."""
        self._asked: PlacementRequest | None = None
        self._proposed: tuple[PlacementRequest, StagePlan] | None = None
        """An answer whose moves wait for the end of the round."""
        self._cut_from_s: float | None = None
        """From when on the first plan may choose the number of stages: those that start together shall be in it."""
        self._barrier = Barrier()
        self._stall_detector = StallDetector(self.deadlines, 1 + run.outer.slots)
        self._resting: set[str] = set()
        self._next_stall_check_s = now_s
        self._drove_s: dict[str, float] = {}
        """When each driver was given something, or had done something, the last time."""

    def stage(self, scope: int) -> StageScope:
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

    def record(self, event: ev.JournalEvent) -> None:
        """Whoever leaves the run leaves its stages."""
        super().record(event)
        if isinstance(event, ev.MemberLost):
            self._is_plan_due = True
            self._drove_s.pop(event.peer, None)
            for stage in self.stages:
                member = stage.membership.members.get(event.peer)
                if member is not None and member.alive:
                    stage.record(event)

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
        done = overlap(self.micro_batches.in_flight.get(peer, []), merge(done))
        if done:
            self._give_to_drive(peer, [], done)
        fair = self.micro_batches.fair_samples(peer, batch)
        most = ask.samples if fair is None else min(ask.samples, fair)
        missing = most - count(self.micro_batches.in_flight.get(peer, []))
        if missing > 0 and self._may_drive(peer):
            stalled = [one for one in self.micro_batches.in_flight if one != peer and self._has_stalled(one, now_s)]
            fresh = self.micro_batches.choose(batch, self.missing(batch), stalled, missing)
            if fresh:
                self._give_to_drive(peer, fresh, [])
        return batch.cells(self.micro_batches.in_flight.get(peer, []))

    def _give_to_drive(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        self._drove_s[peer] = self.now_s
        self.record(ev.SamplesDriven(peer=peer, ranges=to_wire(ranges), done=to_wire(done)))

    def is_assembled(self) -> bool:
        """Whether every stage has somebody who works for the round, so that there is anything to drive."""
        return all(stage.round.phase == "training" and stage.working() for stage in self.stages)

    def _may_drive(self, peer: str) -> bool:
        return self.is_assembled() and self.holds(peer, 0) and peer in self.stages[0].working()

    def _has_stalled(self, peer: str, now_s: float) -> bool:
        """A driver that has finished nothing for as long as a micro-batch could wait for others."""
        return now_s > self._drove_s.setdefault(peer, now_s) + self.deadlines.result_s

    # Spans ----------------------------------------------------------------------------------------------
    # ``plan_request`` is asked when somebody comes or goes, and after each round; ``take_plan`` hears the answer.

    def show_capability(self, peer: str, shown: PeerToCoordinatorShowCapability, now_s: float) -> None:
        """Raises ``ModelMismatch`` when the layers are not the run's."""
        self.now_s = now_s
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
        """Whoever came first has said what the layers are; while nothing is cut, only as long as somebody is here who
        says so."""
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
        return any(not stage.working() for stage in self.stages[span[0] : span[1] + 1])

    # The planner ----------------------------------------------------------------------------------------

    def plan_request(self, now_s: float) -> PlacementRequest | None:
        """What the planner is to be asked now, if anything; one at a time. Newcomers get a place at once, empty stages
        somebody who moves; else peers move between two rounds only, and one at a time."""
        self.now_s = now_s
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
        self._asked = self._request(Rebalancing(self.unix_s, dict(self.moved_s)) if rebalances else None)
        return self._asked

    def take_plan(self, asked: PlacementRequest, plan: StagePlan | Infeasible, now_s: float) -> None:
        """The planner's answer: as much of it as still holds, and what does not is asked anew."""
        self.now_s, self._asked = now_s, None
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
            if not self.micro_batches.driven:  # nothing of the round is begun yet
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
        return believed(self.capabilities)

    def _assign(self, spans: Mapping[str, tuple[int, int] | None]) -> None:
        """Whoever holds other stages leaves them: what it had claimed there is for others."""
        for peer, span in sorted(spans.items()):
            if span is None:
                self.record(ev.SpanTaken(peer=peer, at_s=self.unix_s))
            else:
                self.record(ev.SpanAssigned(peer=peer, first=span[0], last=span[1], at_s=self.unix_s))
            self._leave_stages(peer, "moved to another stage")

    def take_span(self, peer: str, reason: str) -> None:
        """It kept the others waiting; ``reason``: for people, after its name."""
        times = self.rests[peer].times if peer in self.rests else 0
        until_s = self.unix_s + self.deadlines.rest_s(times)
        self.record(ev.SpanTaken(peer=peer, at_s=self.unix_s, reason=reason, until_s=until_s))
        self._leave_stages(peer, reason)
        self._is_plan_due = True

    def _leave_stages(self, peer: str, reason: str) -> None:
        """Those that are not its own any more."""
        for stage in self.stages:
            member = stage.membership.members.get(peer)
            if member is not None and member.alive and not self.holds(peer, stage.stage):
                stage.record(ev.MemberLost(peer=peer, reason=reason))

    def say_outlook(self) -> str:
        """What the run waits for: a stage that nobody holds, or a state; empty when it goes on."""
        if self.has_ended:
            return ""
        if not self.boundaries:
            return f"waiting for peers that can hold the model together{self._why()}"
        for stage in self.stages:
            if outlook := self.say_stage_outlook(stage):
                first, stop = self.boundaries[stage.stage : stage.stage + 2]
                size = f"{self.parameters_bytes(stage.stage) / 1e6:,.1f} MB of parameters"
                return f"stage {stage.stage} (layers {first} to {stop - 1}, {size}) {outlook}"
        return ""

    def say_stage_outlook(self, stage: StageScope) -> str:
        """What one stage waits for; empty when somebody holds its newest state."""
        if stage.working() or self.has_ended:
            return ""
        if outlook := stage.say_outlook():
            return f"waits for its state: {outlook}"
        if holders := self.holders(stage.stage):
            return f"waits for {self._name(holders)} to get its state{self._say_resting()}"
        return f"waits for a peer that can hold it{self._why()}{self._say_resting()}"

    def _why(self) -> str:
        return f": {self.shortage}" if self.shortage else ""

    def _name(self, peers: list[str]) -> str:
        names = [self.membership.members[peer].entry.name for peer in sorted(peers)]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _say_resting(self) -> str:
        """Who gets no stage now, and why."""
        said = ""
        for peer in sorted(self.resting() & self.capabilities.keys())[:3]:
            rest = self.rests[peer]
            left_s = rest.until_s - self.unix_s
            said += f"; {self._name([peer])} {rest.reason}, and may come again in {left_s:.0f} s"
        return said

    # Time -----------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Whatever time decides: silence, spans, and how rounds go on."""
        self.now_s = now_s
        stood_s = self.excuse_own_silence(now_s)
        self._stall_detector.postpone(stood_s)
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
                for peer in self._barrier.evict_persistent_stragglers():
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
        for stalled in self._stall_detector.find_stalled(self, now_s):
            self.take_span(stalled.peer, stalled.reason)

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        return status_of(self, now_s)


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

_MOST = 1e18
"""What a rate in a message is at most."""


def status_of(run: PipelineRun, now_s: float) -> CoordinatorToPeerStatus:
    """As of ``now_s`` on the coordinator's clock. What all stages have in common is told as the first one has it. The
    model as a whole has no digest: its stages have theirs."""
    first = run.stages[0] if run.stages else None

    def common(read: Callable[[StageScope], int]) -> int:
        return read(first) if first else 0

    samples = first.model.samples if first and first.model else None
    return CoordinatorToPeerStatus(
        run=run.run.run.name,
        run_hash=run.run.hash,
        round=run.round_number,
        phase=run.phase,
        closes_in_s=max(0.0, first.round.closes_s - now_s) if first and run.phase == "closing" else None,
        anchor_version=run.anchor_version,
        rounds_committed=common(lambda stage: stage.rounds_committed),
        rounds_aborted=common(lambda stage: stage.rounds_aborted),
        rounds_undone=common(lambda stage: stage.rounds_undone),
        tokens_committed=common(lambda stage: stage.tokens_committed),
        tokens_in_round=min((stage.tokens_in_round() for stage in run.stages), default=0),
        loss=first.loss if first else None,
        chain=first.chain if first else bytes(32),
        state_digest=None,
        elapsed_s=first.elapsed_s(now_s) if first else 0.0,
        outlook=run.say_outlook(),
        coverage=coverage_of(first.leases, samples) if first and samples else (),
        members=_members_of(run),
        stages=stages_of(run),
    )


def _members_of(run: PipelineRun) -> tuple[MemberStatus, ...]:
    """Each as fast as it is in its fastest stage, with what it has committed in all of them. What it does is told as
    in the first stage that it is in: its rounds are those of its stages."""
    committed = {
        peer: sum(
            stage.membership.members[peer].tokens_committed for stage in run.stages if peer in stage.membership.members
        )
        for peer in run.membership.members
    }
    total = sum(committed.values())
    told = []
    for one in run.membership.status(0, None):
        mine = [stage for stage in run.stages if run.holds(one.peer, stage.stage)]
        working = [stage.working()[one.peer] for stage in mine if one.peer in stage.working()]
        known = [stage.membership.members[one.peer] for stage in mine if one.peer in stage.membership.members]
        inside = [member.activity for member in known if member.alive]
        update = {
            "activity": inside[0] if inside else one.activity,
            "stages": run.spans.get(one.peer),
            "synced": bool(mine) and len(working) == len(mine),
            "tokens_per_s": 0.0 if run.phase == "waiting" else max((one.tokens_per_s for one in working), default=0.0),
            "tokens_committed": committed[one.peer],
            "share": committed[one.peer] / total if total else 0.0,
        }
        told.append(one.model_copy(update=update))
    return tuple(told)


def stages_of(run: PipelineRun) -> tuple[StageStatus, ...]:
    """In their order."""
    capacities = [sum(_capacity(run, stage, peer) for peer in stage.working()) for stage in run.stages]
    least = min(capacities, default=0.0)
    return tuple(
        StageStatus(
            first_layer=run.boundaries[stage.stage],
            stop_layer=run.boundaries[stage.stage + 1],
            parameters_bytes=run.parameters_bytes(stage.stage),
            replicas=tuple(stage.working()),
            coming=tuple(peer for peer in run.holders(stage.stage) if peer not in stage.working()),
            tokens_per_s=_rate(run, stage),
            capacity_tokens_per_s=min(capacity, _MOST),
            tokens_in_round=stage.tokens_in_round(),
            queue=stage.queue(),
            state_digest=stage.state_digest(),
            outlook=run.say_stage_outlook(stage)[:2000],
            is_bottleneck=capacity == least < max(capacities),
        )
        for stage, capacity in zip(run.stages, capacities, strict=True)
    )


def _rate(run: PipelineRun, stage: StageScope) -> float:
    """What the replicas have told last is of no moment in which one waits for other stages."""
    return 0.0 if run.phase == "waiting" else min(sum(one.tokens_per_s for one in stage.working().values()), _MOST)


def _capacity(run: PipelineRun, stage: StageScope, peer: str) -> float:
    """Tokens a second that the peer could do in a stage if others kept it busy: as fast as its whole span."""
    shown, span = run.capabilities.get(peer), run.spans.get(peer)
    if shown is None or span is None or stage.model is None:
        return 0.0
    assert run.run.pipeline is not None
    seconds = sum(shown.layer_s[run.boundaries[span[0]] : run.boundaries[span[1] + 1]])
    return run.run.pipeline.micro_batch * stage.model.tokens_per_sample / max(seconds, 1e-9)
