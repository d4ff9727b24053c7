"""Layers to stages and stages to peers: the fastest plan under everybody's memory (pure).

The rate of a plan is that of its slowest stage, in micro-batches a second; a stage's rate is the sum of its replicas'.
Small swarms get the best plan there is, large ones one near it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.pipeline.planner.answers import as_choice, as_plan, missing
from shoal.swarm.pipeline.planner.replanning import Rebalancing, moved_between, replan
from shoal.swarm.pipeline.planner.searching import EFFORT, Search
from shoal.swarm.pipeline.planner.span_rates import Swarm
from shoal.swarm.pipeline.planner.stage_plan import Infeasible, LayerCost, PeerCapability, StagePlan

__all__ = [
    "Infeasible",
    "LayerCost",
    "PeerCapability",
    "Rebalancing",
    "StagePlan",
    "moved_between",
    "plan_rate",
    "plan_stages",
    "replan",
]

CLEARLY = 1 + 1e-6
"""More stages have to be faster by this: each costs rounds, messages and hops of its own."""


def plan_stages(
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    stages: int | None,
    max_in_flight: int,
    optimizer_values: int,
) -> StagePlan | Infeasible:
    """Cut into so many ``stages`` (None: the number with the highest rate, the fewest of equally good ones).

    ``optimizer_values``: float32 values that the optimizer keeps for each parameter. Raises ``ValueError`` for
    inputs that fit no plan at all, as more stages than layers.
    """
    if stages is not None and not 1 <= stages <= len(layers):
        raise ValueError(f"{stages} stages cannot be cut from {len(layers)} layers")
    swarm = Swarm(layers, peers, max_in_flight, optimizer_values)
    search = Search(swarm)
    numbers = [stages] if stages is not None else search.numbers()
    begun = {count: search.seed(count) for count in numbers}
    rates = {count: found[0].rate(found[1]) if found else 0.0 for count, found in begun.items()}
    numbers = search.promising(rates)
    plans = [search.refined(count, begun[count], EFFORT // len(numbers)) for count in numbers]
    good = [found for found in plans if found is not None and found[0].rate(found[1]) > 0]
    if not good:
        return _why_not(search, stages)
    fastest = max(table.rate(choice) for table, choice in good)
    return as_plan(swarm, *next(one for one in good if one[0].rate(one[1]) * CLEARLY >= fastest))


def plan_rate(
    plan: StagePlan,
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    max_in_flight: int,
    optimizer_values: int,
) -> float:
    """Micro-batches a second of the slowest stage. Peers that are not there, or cannot hold their span, give none."""
    swarm = Swarm(layers, peers, max_in_flight, optimizer_values)
    table = swarm.table(plan.boundaries)
    return table.rate(as_choice(swarm, table, plan))


def _why_not(search: Search, stages: int | None) -> Infeasible:
    if not search.swarm.peers:
        return Infeasible("no peer is there that could hold a stage")
    count = search.swarm.layers if stages is None else stages
    cut = search.ranges.cuts(search.ranges.least_bytes, count, add=False)[1][-1]
    assert cut is not None
    return missing(search.swarm, cut, range(count))
