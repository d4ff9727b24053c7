"""Layers to stages and stages to peers: the fastest plan under everybody's memory (pure).

The rate of a plan is that of its slowest stage, in micro-batches a second; a stage's rate is the sum of its replicas'.
Small swarms get the best plan there is, large ones one near it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shoal.swarm.pipeline.searching import EFFORT, Search
from shoal.swarm.pipeline.span_rates import Indices, SpanTable, Swarm
from shoal.swarm.pipeline.stage_plan import Infeasible, LayerCost, PeerCapability, StagePlan

__all__ = ["Infeasible", "LayerCost", "PeerCapability", "StagePlan", "plan_rate", "plan_stages"]

WORTH_MORE_STAGES = 0.01
"""With "auto", more stages have to be so much faster: each costs rounds, messages and hops of its own."""
NUMBERS_TRIED = 8
"""Of stages, with "auto"."""
NUMBERS_REFINED = 3
"""Of those: the ones that began best."""


def plan_stages(
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    stages: int | None,
    max_in_flight: int,
    optimizer_values: int,
) -> StagePlan | Infeasible:
    """Cut into so many ``stages`` (None: the number with the highest rate, few ones rather than many).

    ``optimizer_values``: float32 values that the optimizer keeps for each parameter. Raises ``ValueError`` for
    inputs that fit no plan at all, as more stages than layers.
    """
    if stages is not None and not 1 <= stages <= len(layers):
        raise ValueError(f"{stages} stages cannot be cut from {len(layers)} layers")
    swarm = Swarm(layers, peers, max_in_flight, optimizer_values)
    search = Search(swarm)
    numbers = [stages] if stages is not None else search.numbers(NUMBERS_TRIED, WORTH_MORE_STAGES)
    begun = {count: search.seed(count) for count in numbers}
    rates = {count: found[0].rate(found[1]) if found else 0.0 for count, found in begun.items()}
    if not search.is_small:
        numbers = sorted(numbers, key=lambda count: (-rates[count], count))[:NUMBERS_REFINED]
    plans = [search.refined(count, begun[count], EFFORT // len(numbers)) for count in sorted(numbers)]
    good = [found for found in plans if found is not None and found[0].rate(found[1]) > 0]
    if not good:
        return _why_not(search, stages)
    fastest = max(table.rate(choice) for table, choice in good)
    return as_plan(swarm, *next(one for one in good if one[0].rate(one[1]) * (1 + WORTH_MORE_STAGES) >= fastest))


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


def as_plan(swarm: Swarm, table: SpanTable, choice: Indices) -> StagePlan:
    spans, recomputes = {}, set()
    for row, one in enumerate(swarm.peers):
        if (at := int(choice[row])) >= 0:
            spans[one.peer] = (int(table.first[at]), int(table.last[at]))
            if table.recomputes[row, at]:
                recomputes.add(one.peer)
    return StagePlan(table.boundaries, spans, frozenset(recomputes))


def as_choice(swarm: Swarm, table: SpanTable, plan: StagePlan) -> Indices:
    """The other way round: of the peers that are there, what they hold and still can."""
    choice = np.full(len(swarm.peers), -1, dtype=np.int64)
    for row, one in enumerate(swarm.peers):
        span = plan.spans.get(one.peer)
        if span is not None and table.rates[row, at := table.index_of(span)] > 0:
            choice[row] = at
    return choice


def _why_not(search: Search, stages: int | None) -> Infeasible:
    if not search.swarm.peers:
        return Infeasible("no peer is there that could hold a stage")
    count = search.swarm.layers if stages is None else stages
    cut = search.ranges.cuts(search.ranges.least_bytes, count, add=False)[1][-1]
    assert cut is not None
    return missing(search.swarm, cut, range(count))


def missing(swarm: Swarm, cut: Sequence[int], stages: Iterable[int]) -> Infeasible:
    """That of these stages nobody can hold the largest one, or that those who can are too few."""
    needs = swarm.least_bytes(np.array(cut[:-1], dtype=np.int64), np.array(cut[1:], dtype=np.int64))
    stage = max(stages, key=lambda one: (needs[one], -one))
    where = f"stage {stage} ({_layers(cut[stage], cut[stage + 1])})"
    needed, most = f"{needs[stage] / 1e6:,.1f} MB", f"{swarm.most_memory() / 1e6:,.1f} MB"
    if needs[stage] > swarm.most_memory():
        return Infeasible(
            f"nobody can hold {where}: it takes {needed} of memory and the most that a peer has is {most}"
        )
    return Infeasible(
        f"the {len(swarm.peers)} peers cannot hold all {len(cut) - 1} stages together: {where} alone takes {needed} "
        f"of memory, all of them {needs.sum() / 1e6:,.1f} MB; a peer more with {needed} or more is needed"
    )


def _layers(start: int, stop: int) -> str:
    return f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"
