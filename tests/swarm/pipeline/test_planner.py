"""Tests of planner and solver: first plans."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.swarm.pipeline.plan_cases import (
    DEMAND,
    LIMITS,
    Layers,
    best_rate,
    cuts,
    rate,
    small_swarms,
    span_rate,
    swarm_of,
)

from shoal.swarm.pipeline.planner.model import Infeasible, LayerCost, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.model import PlanningProblem as SpanRates
from shoal.swarm.pipeline.planner.planner import explain_no_place, plan_rate, plan_stages
from shoal.swarm.pipeline.planner.solver import Budget, branch_and_bound

PlanningProblem = tuple[Layers, list[PeerCapability]]

MB = 1_000_000


def peer(name: str, memory_mb: float, *layer_s: float, bandwidth_bps: float = 1e9) -> PeerCapability:
    return PeerCapability(name, int(memory_mb * MB), layer_s, bandwidth_bps)


def planned(answer: StagePlan | Infeasible) -> StagePlan:
    assert isinstance(answer, StagePlan), answer
    return answer


def check(layers: Layers, peers: list[PeerCapability], plan: StagePlan) -> None:
    """What holds of every plan."""
    assert plan.boundaries[0] == 0
    assert plan.boundaries[-1] == len(layers)
    assert list(plan.boundaries) == sorted(set(plan.boundaries))
    by_id = {one.peer: one for one in peers}
    assert plan.spans.keys() <= by_id.keys()
    assert all(span_rate(layers, by_id[one], plan.boundaries, span, peers) > 0 for one, span in plan.spans.items())
    assert plan.recomputes <= plan.spans.keys()
    assert rate(layers, peers, plan) > 0
    assert plan_rate(plan, layers, peers, **LIMITS) == pytest.approx(rate(layers, peers, plan))


@settings(max_examples=100, deadline=None)
@given(small_swarms())
def test_small_swarms_get_the_fastest_plan(swarm: PlanningProblem) -> None:
    layers, peers = swarm
    for stages in {min(2, len(layers)), min(3, len(layers))}:
        best = best_rate(layers, peers, stages)
        plan = plan_stages(layers, peers, stages=stages, **LIMITS)
        if best == 0:
            assert isinstance(plan, Infeasible)
        else:
            check(layers, peers, planned(plan))
            assert planned(plan).stages == stages
            assert rate(layers, peers, planned(plan)) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(small_swarms())
def test_the_exact_search_alone_finds_the_fastest_plan(swarm: PlanningProblem) -> None:
    layers, peers = swarm
    stages = min(3, len(layers))
    arrays = SpanRates(layers, peers, **LIMITS)
    budget = Budget(4_000)
    found = branch_and_bound([arrays.table(cut) for cut in cuts(len(layers), stages)], None, budget)
    assert budget.nodes > 0
    assert (found[0].rate(found[1]) if found else 0.0) == pytest.approx(best_rate(layers, peers, stages))


@settings(max_examples=60, deadline=None)
@given(small_swarms(most_layers=4, most_peers=3))
def test_auto_takes_the_fewest_stages_that_are_as_fast_as_any(swarm: PlanningProblem) -> None:
    layers, peers = swarm
    best = {stages: best_rate(layers, peers, stages) for stages in range(1, len(layers) + 1)}
    plan = plan_stages(layers, peers, stages=None, **LIMITS)
    if not max(best.values()):
        assert isinstance(plan, Infeasible)
        return
    check(layers, peers, planned(plan))
    stages = planned(plan).stages
    assert rate(layers, peers, planned(plan)) == pytest.approx(best[stages])
    assert best[stages] == pytest.approx(max(best.values()), rel=2e-6)
    assert all(best[fewer] * (1 + 5e-7) < max(best.values()) for fewer in range(1, stages))


@pytest.mark.parametrize(("peers", "layers", "stages"), [(10, 12, None), (40, 24, 6), (40, 24, None), (200, 48, None)])
def test_large_swarms_get_a_plan_near_the_sum_of_their_speeds(peers: int, layers: int, stages: int | None) -> None:
    costs, members = swarm_of(1, peers, layers)
    plan = planned(plan_stages(costs, members, stages=stages, **LIMITS))
    check(costs, members, plan)
    # No stage is faster than all peers together could be if each held all layers at no cost.
    assert rate(costs, members, plan) > 0.8 * sum(1 / sum(one.layer_s) for one in members)


def test_a_peer_that_holds_more_stages_shares_its_time() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    big, small = peer("big", 100, 0.1, 0.1), peer("small", 9, 0.1, 0.1)
    plan = planned(plan_stages(layers, [big], stages=2, **LIMITS))
    assert plan == StagePlan((0, 1, 2), {"big": (0, 1)})
    assert plan_rate(plan, layers, [big], **LIMITS) == pytest.approx(5.0)
    plan = planned(plan_stages(layers, [small, big], stages=2, **LIMITS))
    assert plan_rate(plan, layers, [small, big], **LIMITS) == pytest.approx(10.0)


def test_a_slow_link_costs_more_than_a_slow_processor() -> None:
    # The link takes 16 s for the 1 MB each way that cross the boundary, so one of the two does it all.
    layers = [LayerCost(MB, MB, 1)] * 2
    far = replace(peer("far", 100, 0.1, 0.1), bandwidth_bps=1e6)
    near = peer("near", 100, 1.0, 1.0)
    plan = planned(plan_stages(layers, [far, near], stages=2, **LIMITS))
    assert plan.spans["far"] == (0, 1)


def test_who_lacks_memory_for_activations_recomputes_them() -> None:
    # 2 x 20 MB are kept without recomputation and 20 MB with it, beside 8.2 MB of state.
    layers = [LayerCost(MB, 1, 20 * MB)]
    alone = planned(plan_stages(layers, [peer("tight", 30, 0.3)], stages=1, **LIMITS))
    assert alone.recomputes == {"tight"}
    assert plan_rate(alone, layers, [peer("tight", 30, 0.3)], **LIMITS) == pytest.approx(2.5)
    roomy = planned(plan_stages(layers, [peer("roomy", 49, 0.3)], stages=1, **LIMITS))
    assert roomy.recomputes == frozenset()
    assert plan_rate(roomy, layers, [peer("roomy", 49, 0.3)], **LIMITS) == pytest.approx(1 / 0.3)


def test_a_gpu_and_the_machine_beside_it_both_need_room() -> None:
    # 5.0 MB on a GPU and 4.5 MB beside it, or 8.2 MB in the memory of a machine that computes there.
    layers = [LayerCost(MB, 1, 1)]
    limits = LIMITS | {"max_in_flight": 1}
    for host_mb, device_mb, scarce in ((8.2, None, "memory"), (4.5, 9.0, "host memory"), (9.0, 5.0, "GPU memory")):
        rooms = []
        for more_mb in (0.01, -0.01):
            host = host_mb + (more_mb if scarce != "GPU memory" else 0)
            device = device_mb and int((device_mb + (more_mb if scarce == "GPU memory" else 0)) * MB)
            rooms.append(replace(peer("one", host, 1.0), device_bytes=device))
        enough, less = rooms
        assert planned(plan_stages(layers, [enough], stages=1, **limits)).spans == {"one": (0, 0)}
        answer = plan_stages(layers, [less], stages=1, **limits)
        assert isinstance(answer, Infeasible)
        needed = {"memory": 8.2, "host memory": 4.5, "GPU memory": 5.0}[scarce]
        assert f"takes {needed} MB of {scarce} and the most that a peer has is {needed - 0.01:.1f} MB" in answer.reason


def test_activations_are_where_the_device_computes() -> None:
    # 20 MB of them beside 5.0 MB on the GPU; the machine beside it needs 4.5 MB.
    layers = [LayerCost(MB, 1, 20 * MB)]
    limits = LIMITS | {"max_in_flight": 1}
    beside = replace(peer("one", 4.6, 1.0), device_bytes=int(25.1 * MB))
    assert planned(plan_stages(layers, [beside], stages=1, **limits)).spans == {"one": (0, 0)}
    answer = plan_stages(layers, [replace(beside, device_bytes=24 * MB)], stages=1, **limits)
    assert isinstance(answer, Infeasible)
    assert "takes 25.0 MB of GPU memory and the most that a peer has is 24.0 MB" in answer.reason


def test_what_is_missing_is_said_for_whom_it_misses_least() -> None:
    machine = peer("machine", 60, 1.0)
    beside = replace(peer("beside", 50, 1.0), device_bytes=45 * MB)
    answer = plan_stages([LayerCost(10 * MB, 1, 1)], [machine, beside], stages=1, **LIMITS)
    assert isinstance(answer, Infeasible)
    assert "takes 50.0 MB of GPU memory and the most that a peer has is 45.0 MB" in answer.reason


def test_the_owner_is_told_which_limit_to_raise() -> None:
    for host, device, option in ((3, 60, "--max-memory"), (60, 3, "--max-device-memory")):
        one = replace(peer("one", host, 1.0), device_bytes=device * MB)
        problem = SpanRates([LayerCost(MB, 1, 1)], [one], 1, DEMAND)
        assert f"join again with a larger {option}, or" in explain_no_place(problem, (0, 1))


def test_what_nobody_can_hold_is_named_with_what_it_takes() -> None:
    layers = [LayerCost(MB, 1, 1), LayerCost(10 * MB, 1, 1), LayerCost(MB, 1, 1)]
    answer = plan_stages(layers, [peer("one", 50, 1, 1, 1), peer("two", 60, 1, 1, 1)], stages=3, **LIMITS)
    assert isinstance(answer, Infeasible)
    assert "nobody can hold stage 1 (layer 1)" in answer.reason
    assert "82.0 MB" in answer.reason
    assert "60.0 MB" in answer.reason


def test_too_few_peers_for_all_stages_is_said() -> None:
    layers = [LayerCost(MB, 1, 1)] * 3
    answer = plan_stages(layers, [peer("one", 9, 1, 1, 1), peer("two", 9, 1, 1, 1)], stages=None, **LIMITS)
    assert isinstance(answer, Infeasible)
    assert "the 2 peers cannot hold all 3 stages" in answer.reason
    assert "8.2 MB" in answer.reason
    assert isinstance(plan_stages(layers, [], stages=None, **LIMITS), Infeasible)


def test_memory_that_just_suffices_in_one_order_only() -> None:
    # Nine layers over peers that hold 5, 3 and 1 of them: none to spare.
    layers = [LayerCost(MB, 1, 1)] * 9
    peers = [peer(f"holds {count}", 8.3 * count, *[0.1] * 9) for count in (3, 5, 1)]
    plan = planned(plan_stages(layers, peers, stages=3, **LIMITS))
    check(layers, peers, plan)
    check(layers, peers, planned(plan_stages(layers, peers, stages=None, **LIMITS)))


def test_the_order_of_the_peers_changes_nothing() -> None:
    layers, peers = swarm_of(2, 12, 10)
    plan = plan_stages(layers, peers, stages=None, **LIMITS)
    random.Random(3).shuffle(peers)
    assert plan_stages(layers, peers, stages=None, **LIMITS) == plan


def test_inputs_that_fit_no_plan() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    one = peer("one", 50, 1.0, 1.0)
    for stages in (0, 3):
        with pytest.raises(ValueError, match="cannot be cut"):
            plan_stages(layers, [one], stages=stages, **LIMITS)
    with pytest.raises(ValueError, match="seconds of 2 layers"):
        plan_stages(layers, [peer("one", 50, 1.0)], stages=1, **LIMITS)
    with pytest.raises(ValueError, match="twice"):
        plan_stages(layers, [one, one], stages=1, **LIMITS)
