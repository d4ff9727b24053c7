"""The pipeline's planner alone, on simulated peers: its time, and its plans beside the best and beside Petals' rule."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from common import comma, over, parser, publish
from greedy_blocks import greedy

from shoal.swarm.memory_account import MemoryDemand
from shoal.swarm.pipeline.planner.model import LayerCost, PeerCapability, PlanningProblem, SpanTable, StagePlan
from shoal.swarm.pipeline.planner.planner import plan_rate, plan_stages
from shoal.swarm.pipeline.planner.solver import dual_prices

IN_FLIGHT = 4
DEMAND = MemoryDemand(device=3.0, host=5.2, shared=8.2)
LIMITS: dict[str, Any] = {"max_in_flight": IN_FLIGHT, "demand": DEMAND}
SMALL = [(3, 6, 2), (3, 6, None), (4, 5, 3), (4, 6, 2), (5, 5, 3), (5, 4, None)]
"""Peers, layers and stages where everything can be tried. None: "auto"."""
LARGE = 10
"""So many peers are no longer tried out."""
BOUND_STEPS = 60


@dataclass(frozen=True)
class Kind:
    """Kind of swarm by its scarce resource, memory or bandwidth."""

    name: str
    memory: tuple[float, float]
    """Of a peer, as a share of what the whole model takes; three times as much in small swarms."""
    mbit: tuple[float, float]


KINDS = (
    Kind("mixed", (0.15, 1.1), (20, 1000)),
    Kind("little memory", (0.12, 0.3), (20, 1000)),
    Kind("slow links", (0.15, 1.1), (4, 40)),
)


def simulated(kind: Kind, peers: int, layers: int, seed: int) -> tuple[list[LayerCost], list[PeerCapability]]:
    """Speeds 1 : 4, memory and links as the kind says; layers unequal by a quarter."""
    chance = random.Random(f"{kind.name} {peers} {layers} {seed}")
    costs = [
        LayerCost(int(4e6 * chance.uniform(0.8, 1.2)), int(2e5 * chance.uniform(0.8, 1.2)), 2 * 10**6)
        for _ in range(layers)
    ]
    whole = sum(DEMAND.shared * one.parameters_bytes + IN_FLIGHT * one.kept_bytes for one in costs)
    whole *= 3 if peers < LARGE else 1
    members = []
    for number in range(peers):
        speed = chance.uniform(1, 4)
        members.append(
            PeerCapability(
                peer=f"peer-{number:04}",
                host_bytes=int(whole * chance.uniform(*kind.memory)),
                layer_s=tuple(0.02 / speed * chance.uniform(0.9, 1.1) for _ in range(layers)),
                bandwidth_bps=1e6 * chance.uniform(*kind.mbit),
                rtt_s=chance.uniform(0.005, 0.05),
            )
        )
    return costs, members


def optimal(swarm: PlanningProblem, stages: int | None) -> float:
    """By trying every cut with every assignment; of small swarms."""
    numbers = range(1, swarm.layers + 1) if stages is None else [stages]
    cuts = (cut for count in numbers for cut in combinations(range(1, swarm.layers), count - 1))
    return max(best_of_cut(swarm.table((0, *cut, swarm.layers))) for cut in cuts)


def best_of_cut(table: SpanTable) -> float:
    """By trying every assignment: all sums of one row a peer."""
    stages = np.arange(table.stages)
    covers = (table.first[:, None] <= stages) & (stages <= table.last[:, None])
    sums = np.zeros((1, table.stages))
    for rates in table.rates:
        useful = rates > 0
        if useful.any():
            sums = (sums[:, None] + (rates[:, None] * covers)[useful]).reshape(-1, table.stages)
    return float(sums.min(axis=1).max())


def best_greedy(swarm: PlanningProblem, cuts: Iterable[tuple[int, ...]], seed: int) -> float:
    """The best that Petals' rule makes with any of the cuts, of as many blocks as fit or one; 0 if none is complete."""
    order = list(range(len(swarm.peers)))
    random.Random(seed).shuffle(order)
    tables = [swarm.table(cut) for cut in dict.fromkeys(cuts)]
    return max(
        (table.rate(greedy(table, order, most)) for table in tables for most in (None, 1)),
        default=0.0,
    )


def measured(kind: Kind, peers: int, layers: int, stages: int | None, seed: int) -> dict[str, Any]:
    """One row. Rates in micro-batches a second; None where a rule made no plan or nothing can be said."""
    costs, members = simulated(kind, peers, layers, seed)
    started = time.perf_counter()
    plan = plan_stages(costs, members, stages=stages, **LIMITS)
    planner_s = time.perf_counter() - started
    row: dict[str, Any] = {"swarm": kind.name, "peers": peers, "layers": layers, "asked": stages or "auto"}
    row |= {"stages": None, "planner s": planner_s, "plan": None, "optimal": None, "greedy": None, "bound": None}
    swarm = PlanningProblem(costs, members, **LIMITS)
    if (peers, layers, stages) in SMALL:
        row["optimal"] = optimal(swarm, stages) or None
    # With "auto" Petals' rule may take single layers, as it does at home.
    cuts = [tuple(range(layers + 1))] if stages is None else []
    if isinstance(plan, StagePlan):
        cuts.append(plan.boundaries)
        row["stages"] = plan.stages
        row["plan"] = plan_rate(plan, costs, members, **LIMITS)
        if peers >= LARGE:
            row["bound"] = dual_prices(swarm.table(plan.boundaries), BOUND_STEPS)[1]
    row["greedy"] = best_greedy(swarm, cuts, seed) or None
    return row | {
        "vs optimal": over(row["plan"] or 0.0, row["optimal"]),
        "vs greedy": over(row["plan"] or 0.0, row["greedy"]),
        "vs bound": over(row["plan"], row["bound"]),
    }


def cases(sizes: Iterable[int], seeds: int) -> Iterable[tuple[Kind, int, int, int | None, int]]:
    """Small ones with every seed, then large ones with the first."""
    for kind in KINDS:
        for peers, layers, stages in SMALL:
            yield from ((kind, peers, layers, stages, seed) for seed in range(seeds))
    for peers in sizes:
        for kind in KINDS:
            yield kind, peers, 100 if peers >= 100 else 24, None, 0
            yield kind, peers, 32, 8, 0
    if sizes := [peers for peers in sizes if peers >= 100]:
        yield KINDS[0], max(sizes), 4, None, 0


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Figures for the goals: the worst of all rows that have one."""
    names = ("optimal", "greedy", "bound")
    figures = {name: [row[f"vs {name}"] for row in rows if row[f"vs {name}"] is not None] for name in names}
    return {f"plan_vs_{name}": min(of_all, default=None) for name, of_all in figures.items()}


def shown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For people: of small swarms of one kind and size the worst, all others as they are."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda one: 2.0 if one["vs optimal"] is None else one["vs optimal"]):
        made.setdefault(tuple(row[name] for name in ("swarm", "peers", "layers", "asked")), dict(row))
    return sorted(made.values(), key=lambda one: one["peers"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peers", type=comma(int), default=[10, 30, 100, 300, 1000], help="large swarms' sizes")
    options.add_argument("--seeds", type=int, default=5, help="so many small swarms of each kind and size")
    given = options.parse_args()
    rows = [measured(*case) for case in cases(given.peers, given.seeds)]
    publish("the planner on simulated peers, rates in micro-batches/s", shown(rows), ratios_of(rows), given.json)


if __name__ == "__main__":
    main()
