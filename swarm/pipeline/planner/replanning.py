"""What changes in a plan when peers come and go: as little as possible, and one move at a time (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.swarm.pipeline.planner.answers import as_choice, as_plan, missing
from shoal.swarm.pipeline.planner.assigning import assign, smooth_least
from shoal.swarm.pipeline.planner.covering import cover
from shoal.swarm.pipeline.planner.span_rates import Flags, Floats, Indices, SpanTable, Swarm
from shoal.swarm.pipeline.planner.stage_plan import Infeasible, LayerCost, PeerCapability, StagePlan


@dataclass(frozen=True)
class Rebalancing:
    """When a peer may be moved although no stage is empty."""

    now_s: float
    moved_s: Mapping[str, float] = field(default_factory=dict)
    """By peer: when it was last given another span than it had, for whatever reason."""
    gain: float = 0.1
    """A move has to make the run faster by this fraction."""
    pause_s: float = 120.0
    """No sooner than this after any move; a peer that moved rests as long before others are as good a choice."""


def replan(
    previous: StagePlan,
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    max_in_flight: int,
    optimizer_values: int,
    rebalancing: Rebalancing | None = None,
) -> StagePlan | Infeasible:
    """The plan for the peers that are there now: boundaries stay, and peers keep their spans where they can.

    In this order: who left, or has not the memory for its span any more, loses it. A stage that this leaves empty is
    refilled by newcomers and by as few moves as possible. Everybody else without a span gets the one where it helps
    most. If nothing had to be moved, ``rebalancing`` allows one move to where it helps most. A refill whose search
    would take too long gives way to a new assignment for everybody.

    Infeasible: some stage cannot be held by anybody; ask again when somebody comes, with the same ``previous``.
    """
    swarm = Swarm(layers, peers, max_in_flight, optimizer_values)
    if not swarm.peers:
        return Infeasible("no peer is there that could hold a stage")
    table = swarm.table(previous.boundaries)
    before = as_choice(swarm, table, previous)
    homeless = before < 0
    choice: Indices | None = before
    if table.rate(before) <= 0:
        choice = _refilled(swarm, table, before, rebalancing)
        if choice is None:
            # Of those that are empty now, what nobody can hold; else that they are too few for all.
            empty = [int(stage) for stage in np.flatnonzero(table.load(before) <= 0)]
            return missing(swarm, previous.boundaries, empty)
    choice = assign(table, choice, homeless)
    if rebalancing is not None and _rested(rebalancing) and (choice[~homeless] == before[~homeless]).all():
        choice = _rebalanced(table, choice, ~homeless, rebalancing.gain)
    return as_plan(swarm, table, choice)


def moved_between(before: StagePlan, after: StagePlan) -> frozenset[str]:
    """Peers with a span in both plans, but not the same: those that have to fetch another stage."""
    both = before.spans.keys() & after.spans.keys()
    return frozenset(peer for peer in both if before.spans[peer] != after.spans[peer])


def _rested(rebalancing: Rebalancing) -> bool:
    last = max(rebalancing.moved_s.values(), default=-np.inf)
    return bool(rebalancing.now_s - last >= rebalancing.pause_s)


def _refilled(swarm: Swarm, table: SpanTable, before: Indices, rebalancing: Rebalancing | None) -> Indices | None:
    """With every stage held by somebody; None if that cannot be."""
    tired = np.array([_is_tired(one.peer, rebalancing) for one in swarm.peers], dtype=np.bool_)
    covering = cover(table, before, tired)
    if covering is None:
        # Too many ways to try them all, or none.
        covering = assign(table)
        return covering if table.rate(covering) > 0 else None
    # Whoever moves anyway goes where it helps most, with the others.
    return assign(table, covering, covering != before)


def _is_tired(peer: str, rebalancing: Rebalancing | None) -> bool:
    if rebalancing is None or peer not in rebalancing.moved_s:
        return False
    return rebalancing.now_s - rebalancing.moved_s[peer] < rebalancing.pause_s


def _rebalanced(table: SpanTable, choice: Indices, movable: Flags, gain: float) -> Indices:
    """With the one move that makes the run fastest, if that is worth it."""
    load = table.load(choice)
    rate = float(load.min())
    slowest = int(load.argmin())
    stages = np.arange(table.stages)
    helps = np.flatnonzero((table.first <= slowest) & (slowest <= table.last))
    covers = ((table.first[helps, None] <= stages) & (stages <= table.last[helps, None])).astype(np.float64)
    best, best_after = choice, (rate * (1 + gain), -np.inf)
    for peer in np.flatnonzero(movable & (choice >= 0)):
        # From the sum without it, and not by taking its rate away: what it alone held has to be zero.
        without = choice.copy()
        without[peer] = -1
        loads: Floats = table.load(without) + table.rates[peer, helps, None] * covers
        after = loads.min(axis=1)
        at = int(after.argmax())
        if after[at] < best_after[0] or helps[at] == choice[peer]:
            continue
        score = (float(after[at]), float(smooth_least(loads[at], 8 / after[at])))
        if score > best_after:
            best, best_after = choice.copy(), score
            best[peer] = helps[at]
    return best
