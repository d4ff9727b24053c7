"""Planner: a first plan, stages for newcomers, few moves when peers go, and why a plan is impossible.

Small swarms get the best plan there is, large ones one near it. A plan changes as little as possible and, for speed
alone, by one peer at a time: whoever moves has to download another stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.swarm.memory_account import MemoryDemand
from shoal.swarm.pipeline.planner.model import (
    Flags,
    Floats,
    Indices,
    Infeasible,
    LayerCost,
    PeerCapability,
    PlanningProblem,
    SpanTable,
    StagePlan,
)
from shoal.swarm.pipeline.planner.second_replicas import SecondReplicas
from shoal.swarm.pipeline.planner.solver import EFFORT, PlanSearch, assign, cover_empty_stages, smooth_minimum


def as_plan(problem: PlanningProblem, table: SpanTable, choice: Indices) -> StagePlan:
    """Plan of an assignment ``(peers,)`` of span indices, -1 for none."""
    spans, recomputes = {}, set()
    for row, one in enumerate(problem.peers):
        if (at := int(choice[row])) >= 0:
            spans[one.peer] = (int(table.first[at]), int(table.last[at]))
            if table.recomputes[row, at]:
                recomputes.add(one.peer)
    return StagePlan(table.boundaries, spans, frozenset(recomputes))


def as_choice(problem: PlanningProblem, table: SpanTable, plan: StagePlan) -> Indices:
    """Spans of the present peers in ``plan``, ``(peers,)``, -1 for those that hold none or can no longer."""
    choice = np.full(len(problem.peers), -1, dtype=np.int64)
    for row, one in enumerate(problem.peers):
        span = plan.spans.get(one.peer)
        if span is not None and table.rates[row, at := table.index_of(span)] > 0:
            choice[row] = at
    return choice


@dataclass(frozen=True)
class PredictedRate:
    """Predicted rate of a peer, in micro-batches a second.

    0 for a peer whose memory has become too small; it recomputes to keep as little as it can.
    """

    rate: float
    recomputes: bool


def predict_rates(problem: PlanningProblem, plan: StagePlan) -> dict[str, PredictedRate]:
    """Predict the rate of every present peer in its span."""
    table = problem.table(plan.boundaries)
    found = {}
    for row, one in enumerate(problem.peers):
        if (span := plan.spans.get(one.peer)) is not None:
            at = table.index_of(span)
            rate = float(table.rates[row, at])
            found[one.peer] = PredictedRate(rate, rate == 0.0 or bool(table.recomputes[row, at]))
    return found


def explain_no_place(problem: PlanningProblem, cut: Sequence[int]) -> str:
    """Explain to its owner why the problem's only peer holds no stage, and what helps."""
    memory = problem.least_memory(np.array(cut[:-1], dtype=np.int64), np.array(cut[1:], dtype=np.int64))
    stage = int(np.argmin(memory.scarcest()))
    name, needed, limit = memory.of(stage)
    if needed <= limit:
        return "the plan has no place for this machine now: it waits, and steps in where somebody is missing"
    option = "--max-device-memory" if name == "GPU memory" else "--max-memory"
    return (
        f"this machine can hold no stage: the smallest, stage {stage} ({_layers(cut[stage], cut[stage + 1])}), takes "
        f"{needed / 1e6:,.1f} MB of {name}, and it has {limit / 1e6:,.1f} MB to give: join again with a larger "
        f"{option}, or when other programs have ended"
    )


def explain_infeasible(problem: PlanningProblem, cut: Sequence[int], stages: Iterable[int]) -> Infeasible:
    """Explain that nobody can hold the largest of these stages, or that the peers are too few."""
    memory = problem.least_memory(np.array(cut[:-1], dtype=np.int64), np.array(cut[1:], dtype=np.int64))
    scarcest = memory.scarcest()
    stage = max(stages, key=lambda one: (scarcest[one], -one))
    where = f"stage {stage} ({_layers(cut[stage], cut[stage + 1])})"
    name, bytes_needed, limit = memory.of(stage)
    needed = f"{bytes_needed / 1e6:,.1f} MB"
    if bytes_needed > limit:
        return Infeasible(
            f"nobody can hold {where}: it takes {needed} of {name} and the most that a peer has is "
            f"{limit / 1e6:,.1f} MB"
        )
    in_all = sum(memory.of(one)[1] for one in range(len(cut) - 1))
    return Infeasible(
        f"the {len(problem.peers)} peers cannot hold all {len(cut) - 1} stages together: {where} alone takes {needed} "
        f"of {name}, all of them {in_all / 1e6:,.1f} MB; a peer more with {needed} or more is needed"
    )


def _layers(start: int, stop: int) -> str:
    return f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"


@dataclass(frozen=True)
class Rebalancing:
    """Conditions for moving a peer although no stage is empty."""

    now_s: float
    moved_s: Mapping[str, float] = field(default_factory=dict)
    """By peer: when it was last given another span, for whatever reason."""
    gain: float = 0.1
    """Least gain in speed, as a fraction, that justifies a move."""
    pause_s: float = 120.0
    """Pause after any move; a peer that moved less than this ago moves again only where no other can."""


def replan(
    previous: StagePlan,
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    max_in_flight: int,
    demand: MemoryDemand,
    rebalancing: Rebalancing | None = None,
    twice: bool = False,
) -> StagePlan | Infeasible:
    """Plan anew for the peers that are there now: boundaries stay, and peers keep their spans where they can.

    In this order: a peer that left, or lacks the memory for its span by now, loses it. Stages left empty are refilled
    by newcomers and by as few moves as possible. Every other peer without a span gets the one where it helps most. If
    nothing had to be moved, ``rebalancing`` allows one move to where it helps most. If the search for a refill would
    take too long, all peers are assigned anew. ``twice``: a second replica for a stage that has one goes before speed.

    Infeasible: nobody can hold some stage; ask again when another peer comes, with the same ``previous``.
    """
    problem = PlanningProblem(layers, peers, max_in_flight, demand)
    if not problem.peers:
        return Infeasible("no peer is there that could hold a stage")
    table = problem.table(previous.boundaries)
    before = as_choice(problem, table, previous)
    homeless = before < 0
    choice: Indices | None = before
    if table.rate(before) <= 0:
        choice = _refilled(problem, table, before, rebalancing)
        if choice is None:
            # Name an empty stage that nobody can hold; else say that the peers are too few.
            empty = [int(stage) for stage in np.flatnonzero(table.load(before) <= 0)]
            return explain_infeasible(problem, previous.boundaries, empty)
    choice = assign(table, choice, homeless)
    seconds = SecondReplicas(table, problem.networks) if twice else None
    if seconds is not None:
        choice = seconds.improved(choice, homeless)
    if rebalancing is not None and _rested(rebalancing) and (choice[~homeless] == before[~homeless]).all():
        choice = _moved_one(table, choice, ~homeless, rebalancing.gain, seconds)
    return as_plan(problem, table, choice)


def _moved_one(
    table: SpanTable, choice: Indices, movable: Flags, gain: float, seconds: SecondReplicas | None
) -> Indices:
    """Make one move: for a second replica where one is wanted and missing, else for speed, if no stage loses one."""
    if seconds is None:
        return _rebalanced(table, choice, movable, gain)
    moved = seconds.improved(choice, movable, most=1)
    if (moved == choice).all():
        moved = _rebalanced(table, choice, movable, gain)
    return moved if seconds.cost(moved) <= seconds.cost(choice) else choice


def _rested(rebalancing: Rebalancing) -> bool:
    last = max(rebalancing.moved_s.values(), default=-np.inf)
    return bool(rebalancing.now_s - last >= rebalancing.pause_s)


def _refilled(
    problem: PlanningProblem, table: SpanTable, before: Indices, rebalancing: Rebalancing | None
) -> Indices | None:
    """Assign so that every stage is held; None if that is impossible."""
    moved_lately = np.array([_moved_recently(one.peer, rebalancing) for one in problem.peers], dtype=np.bool_)
    covering = cover_empty_stages(table, before, moved_lately)
    if covering is None:
        # There is no cover, or there are too many to try.
        covering = assign(table)
        return covering if table.rate(covering) > 0 else None
    # Peers that move anyway go where they help most, together.
    return assign(table, covering, covering != before)


def _moved_recently(peer: str, rebalancing: Rebalancing | None) -> bool:
    if rebalancing is None or peer not in rebalancing.moved_s:
        return False
    return rebalancing.now_s - rebalancing.moved_s[peer] < rebalancing.pause_s


def _rebalanced(table: SpanTable, choice: Indices, movable: Flags, gain: float) -> Indices:
    """Make the one move that makes the run fastest, if the gain is large enough."""
    load = table.load(choice)
    rate = float(load.min())
    slowest = int(load.argmin())
    stages = np.arange(table.stages)
    helps = np.flatnonzero((table.first <= slowest) & (slowest <= table.last))
    covers = ((table.first[helps, None] <= stages) & (stages <= table.last[helps, None])).astype(np.float64)
    best, best_after = choice, (rate * (1 + gain), -np.inf)
    for peer in np.flatnonzero(movable & (choice >= 0)):
        # Summed without it rather than subtracted: a stage that it alone held must come out as exactly zero.
        without = choice.copy()
        without[peer] = -1
        loads: Floats = table.load(without) + table.rates[peer, helps, None] * covers
        after = loads.min(axis=1)
        at = int(after.argmax())
        if after[at] < best_after[0] or helps[at] == choice[peer]:
            continue
        score = (float(after[at]), float(smooth_minimum(loads[at], 8 / after[at])))
        if score > best_after:
            best, best_after = choice.copy(), score
            best[peer] = helps[at]
    return best


CLEARLY = 1 + 1e-6
"""Least factor by which more stages have to be faster: each costs rounds, messages and hops of its own."""


def plan_stages(
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    stages: int | None,
    max_in_flight: int,
    demand: MemoryDemand,
    twice: bool = False,
) -> StagePlan | Infeasible:
    """Plan the fastest placement with ``stages`` stages (None: the fastest number, the fewest of equally good ones).

    ``demand``: memory that a stage takes for each parameter. ``twice``: the fastest of the placements tried in which
    the most stages have two replicas. Raises ``ValueError`` for inputs that fit no plan at all, such as more stages
    than layers.
    """
    if stages is not None and not 1 <= stages <= len(layers):
        raise ValueError(f"{stages} stages cannot be cut from {len(layers)} layers")
    problem = PlanningProblem(layers, peers, max_in_flight, demand)
    fastest = _fastest_plan(problem, stages)
    if not twice or isinstance(fastest, Infeasible):
        return fastest
    return _held_twice(problem, fastest, [fastest.boundaries, *_cuts_for_halves(problem, stages)])


def _held_twice(problem: PlanningProblem, fastest: StagePlan, cuts: Sequence[tuple[int, ...]]) -> StagePlan:
    """Plan with the most stages held twice, over these cuts; of equally good ones the fastest, then the first."""
    everybody = np.ones(len(problem.peers), dtype=np.bool_)
    found: list[tuple[int, float, SpanTable, Indices]] = []
    for cut in dict.fromkeys(cuts):
        table = problem.table(cut)
        seconds = SecondReplicas(table, problem.networks)
        begun = [seconds.spread(everybody)]
        if cut == fastest.boundaries:
            begun.insert(0, as_choice(problem, table, fastest))
        for choice in (seconds.improved(one, everybody) for one in begun):
            found.append((seconds.cost(choice), -table.rate(choice), table, choice))
    _, _, table, choice = min((one for one in found if one[1] < 0), key=lambda one: one[:2])
    return as_plan(problem, table, choice)


def _cuts_for_halves(problem: PlanningProblem, stages: int | None) -> list[tuple[int, ...]]:
    """Cuts that each half of the peers could hold by itself: every other one, the roomiest first."""
    ordered = sorted(problem.peers, key=lambda one: (-one.host_bytes, one.peer))
    plans = [_fastest_plan(problem.of_peers(half), stages) for half in (ordered[::2], ordered[1::2]) if half]
    return [plan.boundaries for plan in plans if isinstance(plan, StagePlan)]


def _fastest_plan(problem: PlanningProblem, stages: int | None) -> StagePlan | Infeasible:
    search = PlanSearch(problem)
    numbers = [stages] if stages is not None else search.numbers()
    begun = {count: search.seed(count) for count in numbers}
    rates = {count: found[0].rate(found[1]) if found else 0.0 for count, found in begun.items()}
    numbers = search.promising(rates)
    plans = [search.refined(count, begun[count], EFFORT // len(numbers)) for count in numbers]
    good = [found for found in plans if found is not None and found[0].rate(found[1]) > 0]
    if not good:
        return _why_not(search, stages)
    fastest = max(table.rate(choice) for table, choice in good)
    return as_plan(problem, *next(one for one in good if one[0].rate(one[1]) * CLEARLY >= fastest))


def plan_rate(
    plan: StagePlan,
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    *,
    max_in_flight: int,
    demand: MemoryDemand,
) -> float:
    """Rate of a plan, in micro-batches a second; absent peers, and peers that cannot hold their span, add none."""
    problem = PlanningProblem(layers, peers, max_in_flight, demand)
    table = problem.table(plan.boundaries)
    return table.rate(as_choice(problem, table, plan))


def _why_not(search: PlanSearch, stages: int | None) -> Infeasible:
    if not search.problem.peers:
        return Infeasible("no peer is there that could hold a stage")
    count = search.problem.layers if stages is None else stages
    cut = search.ranges.cuts(search.ranges.least_memory, count, add=False)[1][-1]
    assert cut is not None
    return explain_infeasible(search.problem, cut, range(count))
