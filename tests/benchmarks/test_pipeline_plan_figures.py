from itertools import product

import numpy as np
import pytest


def test_ratios_are_the_worst_of_all_rows() -> None:
    from pipeline_plan import ratios_of

    rows = [
        {"vs optimal": 1.0, "vs greedy": None, "vs bound": None},
        {"vs optimal": 0.96, "vs greedy": 1.2, "vs bound": None},
        {"vs optimal": None, "vs greedy": 1.1, "vs bound": 0.9},
    ]
    assert ratios_of(rows) == {"plan_vs_optimal": 0.96, "plan_vs_greedy": 1.1, "plan_vs_bound": 0.9}
    assert set(ratios_of([]).values()) == {None}


def test_a_small_case_is_compared_with_everything() -> None:
    from pipeline_plan import KINDS, SMALL, measured

    peers, layers, stages = SMALL[0]
    row = measured(KINDS[0], peers, layers, stages, seed=0)
    assert row["vs optimal"] == pytest.approx(1.0)
    assert row["plan"] >= row["greedy"] > 0
    assert row["bound"] is None


def test_a_large_case_is_compared_with_a_bound() -> None:
    from pipeline_plan import KINDS, measured

    row = measured(KINDS[0], 12, 8, 4, seed=0)
    assert row["optimal"] is None
    assert row["greedy"] <= row["plan"] <= row["bound"]


def test_of_a_small_swarm_everything_is_tried() -> None:
    from pipeline_plan import KINDS, LIMITS, best_of_cut, simulated

    from shoal.swarm.pipeline.planner.model import PlanningProblem

    table = PlanningProblem(*simulated(KINDS[0], 3, 6, 1), **LIMITS).table((0, 2, 4, 6))
    choices = product(range(-1, len(table.first)), repeat=3)
    assert best_of_cut(table) == pytest.approx(max(table.rate(np.array(choice)) for choice in choices))


def test_a_server_goes_where_the_throughput_is_least() -> None:
    from greedy_blocks import greedy, where_least

    from shoal.swarm.memory_account import MemoryDemand
    from shoal.swarm.pipeline.planner.model import LayerCost, PeerCapability, PlanningProblem

    layers = [LayerCost(1_000_000, 1, 1)] * 4
    # 8.2 MB a layer: two layers each.
    peers = [PeerCapability(name, 17_000_000, (1.0,) * 4, 1e9) for name in "abc"]
    table = PlanningProblem(layers, peers, max_in_flight=1, demand=MemoryDemand(4.0, 4.2, 8.2)).table(range(5))
    least = where_least(table, np.array([3.0, 1.0, 2.0, 5.0]), 0, None)
    assert (table.first[least], table.last[least]) == (1, 2)
    # Equal: the first one. And no more blocks than asked for.
    assert where_least(table, np.zeros(4), 0, 1) == table.index_of((0, 0))
    spans = [(int(table.first[one]), int(table.last[one])) for one in greedy(table, [0, 1, 2])]
    assert spans == [(0, 1), (2, 3), (0, 1)]
