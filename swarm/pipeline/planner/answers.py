"""Between the planner's arrays and what others read: plans, and sentences on why there is none (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.swarm.pipeline.planner.span_rates import Indices, SpanTable, Swarm
from shoal.swarm.pipeline.planner.stage_plan import Infeasible, StagePlan


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


@dataclass(frozen=True)
class Prediction:
    """``rate``: micro-batches a second; 0 for one whose memory is too small by now, which keeps as little as it can."""

    rate: float
    recomputes: bool


def predictions(swarm: Swarm, plan: StagePlan) -> dict[str, Prediction]:
    """What is expected of the peers that are there, each in its span."""
    table = swarm.table(plan.boundaries)
    found = {}
    for row, one in enumerate(swarm.peers):
        if (span := plan.spans.get(one.peer)) is not None:
            at = table.index_of(span)
            rate = float(table.rates[row, at])
            found[one.peer] = Prediction(rate, rate == 0.0 or bool(table.recomputes[row, at]))
    return found


def no_place(swarm: Swarm, cut: Sequence[int]) -> str:
    """Why the first peer of the swarm, alone in it, holds none of these stages, and what its owner may do."""
    needs = swarm.least_bytes(np.array(cut[:-1], dtype=np.int64), np.array(cut[1:], dtype=np.int64))
    stage = int(np.argmin(needs))
    if needs[stage] <= swarm.most_memory():
        return "the plan has no place for this machine now: it waits, and steps in where somebody is missing"
    return (
        f"this machine can hold no stage: the smallest, stage {stage} ({_layers(cut[stage], cut[stage + 1])}), takes "
        f"{needs[stage] / 1e6:,.1f} MB of memory, and it has {swarm.most_memory() / 1e6:,.1f} MB to give: join again "
        f"with a larger --max-memory, or when other programs have ended"
    )


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
