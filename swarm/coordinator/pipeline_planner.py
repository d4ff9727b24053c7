"""The planner of a run file's pipeline: what ``swarm/pipeline`` proposes, at this run's settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.coordinator.pipeline_question import Planner
from shoal.swarm.coordinator.pipeline_view import optimizer_values
from shoal.swarm.pipeline.planner.plan import plan_stages
from shoal.swarm.pipeline.planner.replanning import Rebalancing, replan
from shoal.swarm.pipeline.planner.stage_plan import Infeasible, LayerCost, PeerCapability, StagePlan
from shoal.swarm.protocol.run_file import RunFile


def planner_of(run: RunFile) -> Planner:
    """Of a run that has a pipeline."""
    assert run.pipeline is not None
    stages = None if run.pipeline.stages == "auto" else run.pipeline.stages
    max_in_flight, values = run.pipeline.in_flight, optimizer_values(run.outer)

    def plan(
        previous: StagePlan | None,
        layers: Sequence[LayerCost],
        peers: Sequence[PeerCapability],
        rebalancing: Rebalancing | None,
    ) -> StagePlan | Infeasible:
        if previous is not None:
            return replan(
                previous, layers, peers, max_in_flight=max_in_flight, optimizer_values=values, rebalancing=rebalancing
            )
        if stages is not None and stages > len(layers):
            return Infeasible(f"the run file asks for {stages} stages, and the model has {len(layers)} layers")
        return plan_stages(layers, peers, stages=stages, max_in_flight=max_in_flight, optimizer_values=values)

    return plan
