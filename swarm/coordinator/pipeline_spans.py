"""Who is given which stages, as a planner proposes it and the moment allows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator.ending import Sign
from shoal.swarm.coordinator.pipeline_question import Question
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.coordinator.pipeline_state import PipelineState
from shoal.swarm.coordinator.pipeline_view import believed, cost_of
from shoal.swarm.errors import ModelMismatch, NotAdmitted
from shoal.swarm.pipeline.planner.replanning import Rebalancing
from shoal.swarm.pipeline.planner.stage_plan import Infeasible, PeerCapability, StagePlan
from shoal.swarm.protocol.messages import LayerSize, PeerToCoordinatorShowCapability
from shoal.swarm.protocol.run_file import RunFile


class Spans(PipelineState):
    """``plan_question`` is asked when somebody comes or goes, and after each round; ``take_plan`` hears the answer."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, sign, now_s, epoch)
        self.shortage = ""
        """Why there is no plan, in the planner's words."""
        self._is_plan_due = True
        self._may_rebalance = False
        """Once a round, and not while a stage is empty."""
        self._asked: Question | None = None
        self._proposed: tuple[Question, StagePlan] | None = None
        """An answer whose moves wait for the end of the round."""
        self._cut_from_s: float | None = None
        """From when on the first plan may choose the number of stages: those that start together shall be in it."""

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
        self.record(f.CapabilityShown(peer=peer, capability=shown.capability))
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
            self.record(f.LayersDescribed(layers=layers))
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

    def plan_question(self, now_s: float) -> Question | None:
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
        self._asked = self._question(Rebalancing(self.unix_s, dict(self.moved_s)) if rebalances else None)
        return self._asked

    def take_plan(self, asked: Question, plan: StagePlan | Infeasible, now_s: float) -> None:
        """The planner's answer: as much of it as still holds, and what does not is asked anew."""
        self.now_s, self._asked = now_s, None
        if self.has_ended:
            return
        unchanged = asked.unchanged(self._question(None))
        is_whole = len(unchanged) == len(asked.peers) + len(asked.resting)
        if not is_whole:
            self._is_plan_due = True
        if isinstance(plan, Infeasible):
            self.shortage = plan.reason if is_whole else self.shortage
            return
        if not self.boundaries:
            if not is_whole:
                return
            self.record(f.StagesCut(boundaries=plan.boundaries))
        assert self.boundaries == tuple(plan.boundaries), "boundaries never move"
        self.shortage = ""
        is_refill = bool(self._empty())
        places = {peer: span for peer, span in plan.spans.items() if peer in unchanged and peer not in self.spans}
        self._assign(places)
        if is_refill and is_whole:
            self._assign(self._moves(asked, plan))
        elif asked.rebalancing is not None:
            self._proposed = asked, plan
            if not self.drives.driven:  # nothing of the round is begun yet
                self._move_one()

    def _question(self, rebalancing: Rebalancing | None) -> Question:
        resting, peers = self.resting(), self._peers()
        return Question(
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
        if asked.unchanged(self._question(None)) >= (asked.previous.spans.keys() if asked.previous else set()):
            self._assign(dict(list(moves.items())[:1]))

    def _moves(self, asked: Question, plan: StagePlan) -> dict[str, tuple[int, int] | None]:
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
                self.record(f.SpanTaken(peer=peer, at_s=self.unix_s))
            else:
                self.record(f.SpanAssigned(peer=peer, first=span[0], last=span[1], at_s=self.unix_s))
            self._leave_stages(peer, "moved to another stage")

    def take_span(self, peer: str, reason: str) -> None:
        """It kept the others waiting; ``reason``: for people, after its name."""
        times = self.rests[peer].times if peer in self.rests else 0
        until_s = self.unix_s + self.deadlines.rest_s(times)
        self.record(f.SpanTaken(peer=peer, at_s=self.unix_s, reason=reason, until_s=until_s))
        self._leave_stages(peer, reason)
        self._is_plan_due = True

    def _leave_stages(self, peer: str, reason: str) -> None:
        """Those that are not its own any more."""
        for stage in self.stages:
            member = stage.membership.members.get(peer)
            if member is not None and member.alive and not self.holds(peer, stage.stage):
                stage.record(f.MemberLost(peer=peer, reason=reason))

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

    def say_stage_outlook(self, stage: StageMachine) -> str:
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
