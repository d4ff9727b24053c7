"""Who is given which stages, as a planner proposes it and the moment allows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.swarm.coordinator import facts as f
from shoal.swarm.coordinator.ending import Sign
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.coordinator.pipeline_state import PipelineState
from shoal.swarm.errors import ModelMismatch, NotAdmitted
from shoal.swarm.messages import LayerSize, PeerToCoordinatorShowCapability
from shoal.swarm.pipeline.replanning import Rebalancing
from shoal.swarm.pipeline.stage_plan import Infeasible, LayerCost, PeerCapability, StagePlan
from shoal.swarm.run_file import RunFile


class Planner(Protocol):
    """The first plan for ``previous`` None; else one with the same boundaries, in which few peers move: without
    ``rebalancing`` only for the sake of a stage that is empty."""

    def __call__(
        self,
        previous: StagePlan | None,
        layers: Sequence[LayerCost],
        peers: Sequence[PeerCapability],
        rebalancing: Rebalancing | None,
    ) -> StagePlan | Infeasible: ...


class Spans(PipelineState):
    """``planner`` is asked when somebody comes or goes, and after each round."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int, planner: Planner) -> None:
        super().__init__(run, sign, now_s, epoch)
        self.planner = planner
        self.shortage = ""
        """Why there is no plan, in the planner's words."""
        self._is_plan_due = True
        self._cut_from_s: float | None = None
        """From when on the first plan may choose the number of stages: those that start together shall be in it."""
        self._moved_s: dict[str, float] = {}

    def show_capability(self, peer: str, shown: PeerToCoordinatorShowCapability, now_s: float) -> None:
        """Raises ``ModelMismatch`` when the layers are not the run's."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        if not member.is_trainer:
            raise NotAdmitted("only peers that train hold stages")
        self._check_layers(shown.layers)
        if self.capabilities.get(peer) == shown.capability:
            return
        self.record(f.CapabilityShown(peer=peer, capability=shown.capability))
        span = self.former.get(peer)
        if span is not None and peer not in self.spans and self._is_state_missing(span):
            self._assign({peer: span})
        self._is_plan_due = True
        self._plan_spans(now_s, between_rounds=False)

    def _check_layers(self, layers: tuple[LayerSize, ...]) -> None:
        if not self.layers:
            self.record(f.LayersDescribed(layers=layers))
        elif len(self.layers) != len(layers):
            raise ModelMismatch(f"this model has {len(layers)} layers here, {len(self.layers)} in the run")
        else:
            for number, (ours, theirs) in enumerate(zip(self.layers, layers, strict=True)):
                if ours.parameters_bytes != theirs.parameters_bytes:
                    raise ModelMismatch(
                        f"layer {number} has {theirs.parameters_bytes} bytes of parameters here, "
                        f"{ours.parameters_bytes} in the run"
                    )

    def _is_state_missing(self, span: tuple[int, int]) -> bool:
        """Whether nobody holds the newest state of one of its stages: who held it last may have it on its disk."""
        return any(not stage.working() for stage in self.stages[span[0] : span[1] + 1])

    def _plan_spans(self, now_s: float, *, between_rounds: bool) -> None:
        """Newcomers get a place at once. Who has one moves when a stage is empty; else only between two rounds, and one
        peer at a time."""
        if not self._is_plan_due or not self.capabilities:
            return
        assert self.run.pipeline is not None
        if not self.boundaries and self.run.pipeline.stages == "auto":
            if self._cut_from_s is None:
                self._cut_from_s = now_s + self.deadlines.patience_s
            if now_s < self._cut_from_s:
                return
        empty = [stage for stage in range(len(self.stages)) if not self.holders(stage)]
        is_new = self.capabilities.keys() - self.spans.keys()
        if self.boundaries and not (empty or is_new or between_rounds):
            return
        self._is_plan_due = False
        previous = StagePlan(self.boundaries, dict(self.spans)) if self.boundaries else None
        rebalancing = Rebalancing(now_s, self._moved_s) if between_rounds and not empty else None
        plan = self.planner(previous, [_cost(one) for one in self.layers], self._peers(), rebalancing)
        if isinstance(plan, Infeasible):
            self.shortage = plan.reason
            return
        self.shortage = ""
        if not self.boundaries:
            self.record(f.StagesCut(boundaries=plan.boundaries))
        assert self.boundaries == tuple(plan.boundaries), "boundaries never move"
        self._assign({peer: span for peer, span in plan.spans.items() if peer in is_new})
        moves = {peer: plan.spans.get(peer) for peer, span in self.spans.items() if plan.spans.get(peer) != span}
        if not empty:
            self._is_plan_due = bool(moves)
            moves = dict(list(moves.items())[:1]) if between_rounds else {}
        self._moved_s.update(dict.fromkeys(moves, now_s))
        self._assign(moves)

    def _peers(self) -> list[PeerCapability]:
        return [
            PeerCapability(peer, one.memory_bytes, one.layer_s, max(one.bandwidth_bps, 1.0), one.rtt_s)
            for peer, one in sorted(self.capabilities.items())
        ]

    def _assign(self, spans: Mapping[str, tuple[int, int] | None]) -> None:
        """Whoever holds other stages leaves them: what it had claimed there is for others."""
        for peer, span in sorted(spans.items()):
            if span is None:
                self.record(f.SpanTaken(peer=peer))
            else:
                self.record(f.SpanAssigned(peer=peer, first=span[0], last=span[1]))
            for stage in self.stages:
                member = stage.membership.members.get(peer)
                if member is not None and member.alive and not self.holds(peer, stage.stage):
                    stage.record(f.MemberLost(peer=peer, reason="moved to another stage"))

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
        if holders := len(self.holders(stage.stage)):
            return f"waits for {holders} peer{'' if holders == 1 else 's'} to get its state"
        return f"waits for a peer that can hold it{self._why()}"

    def _why(self) -> str:
        return f": {self.shortage}" if self.shortage else ""

    def parameters_bytes(self, stage: int) -> int:
        """Of a stage's parameters in float32."""
        first, stop = self.boundaries[stage : stage + 2]
        return sum(layer.parameters_bytes for layer in self.layers[first:stop])


def _cost(layer: LayerSize) -> LayerCost:
    return LayerCost(layer.parameters_bytes, layer.activation_bytes, layer.kept_bytes)
