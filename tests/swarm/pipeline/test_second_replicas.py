"""Tests of plans in which two members hold each stage, as open runs ask for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.swarm.pipeline.plan_cases import DEMAND, swarm_of

from shoal.swarm.coordinator.placement import planner_of
from shoal.swarm.pipeline.planner.model import Infeasible, LayerCost, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing, plan_stages, replan
from shoal.swarm.protocol.run_file import RunFile

MB = 1_000_000
LAYERS = (LayerCost(parameters_bytes=MB, activation_bytes=1000, kept_bytes=1000),) * 4
LIMITS: dict[str, Any] = {"max_in_flight": 16, "demand": DEMAND}
ONE, TWO = 12, 20
"""Megabytes of memory that suffice for one layer, and for two."""


def peers(*memory_mb: float, networks: Sequence[str] = ()) -> list[PeerCapability]:
    made = [
        PeerCapability(f"peer {number}", int(size * MB), (0.1,) * len(LAYERS), 1e9)
        for number, size in enumerate(memory_mb)
    ]
    return [replace(one, network=network) for one, network in zip(made, networks or [""] * len(made), strict=True)]


def first(there: list[PeerCapability], stages: int | None, *, twice: bool) -> StagePlan:
    plan = plan_stages(LAYERS, there, stages=stages, twice=twice, **LIMITS)
    assert isinstance(plan, StagePlan), plan
    return plan


def replanned(previous: StagePlan, there: list[PeerCapability], *, twice: bool, calm: bool = False) -> StagePlan:
    rebalancing = Rebalancing(now_s=1000.0) if calm else None
    plan = replan(previous, LAYERS, there, rebalancing=rebalancing, twice=twice, **LIMITS)
    assert isinstance(plan, StagePlan), plan
    return plan


def least_replicas(plan: StagePlan) -> int:
    return min(len(plan.holders(stage)) for stage in range(plan.stages))


def test_two_replicas_come_before_speed() -> None:
    there = [replace(one, layer_s=(0.3, 0.1, 0.1, 0.1)) for one in peers(*[TWO] * 4)]
    assert least_replicas(first(there, 4, twice=False)) == 1, "one for the last three layers is fastest"
    assert least_replicas(first(there, 4, twice=True)) == 2


@pytest.mark.parametrize("count", [2, 5])
def test_every_stage_is_held_twice_as_soon_as_there_is_room(count: int) -> None:
    there = peers(*[100.0] * count)
    for stages in (1, 3, None):
        assert least_replicas(first(there, stages, twice=True)) >= 2


def test_without_room_the_plan_has_as_many_as_it_can() -> None:
    plan = first(peers(ONE, ONE, ONE, ONE, ONE), 4, twice=True)
    assert sorted(len(plan.holders(stage)) for stage in range(4)) == [1, 1, 1, 2]


def test_replicas_are_of_two_networks_where_there_are_two() -> None:
    networks = ["a", "a", "b", "b", "b", "a", "a", "a"]
    there = peers(*[ONE] * 8, networks=networks)
    of = {one.peer: one.network for one in there}
    plan = first(there, 4, twice=True)
    mixed = [len({of[peer] for peer in plan.holders(stage)}) for stage in range(4)]
    assert sorted(mixed) == [1, 2, 2, 2], "three peers are of network b"
    assert least_replicas(plan) == 2


def test_a_newcomer_becomes_the_second_replica() -> None:
    there = [replace(one, layer_s=(0.9, 0.9, 0.9, 0.1)) for one in peers(100.0, 100.0, 100.0, ONE)]
    previous = StagePlan((0, 1, 2, 3, 4), {"peer 0": (0, 2), "peer 1": (0, 2), "peer 2": (3, 3)})
    assert replanned(previous, there, twice=False).spans["peer 3"] != (3, 3), "it helps elsewhere"
    assert replanned(previous, there, twice=True).spans["peer 3"] == (3, 3)


def test_a_peer_with_room_takes_the_lonely_stage_too() -> None:
    there = peers(100.0, 100.0)
    previous = StagePlan((0, 2, 4), {"peer 0": (0, 0), "peer 1": (0, 1)})
    assert replanned(previous, there, twice=True, calm=True).spans == {"peer 0": (0, 1), "peer 1": (0, 1)}


def test_no_move_for_speed_takes_a_second_replica_away() -> None:
    # Both stages are held twice; the second one is much slower.
    there = [replace(one, layer_s=(0.1, 0.1, 1.0, 1.0)) for one in peers(TWO, TWO, TWO, TWO)]
    previous = StagePlan((0, 2, 4), {"peer 0": (0, 0), "peer 1": (0, 0), "peer 2": (1, 1), "peer 3": (1, 1)})
    assert replanned(previous, there, twice=False, calm=True).spans != previous.spans, "for speed somebody moves"
    assert replanned(previous, there, twice=True, calm=True).spans == previous.spans


def test_the_planner_of_an_open_run_asks_for_two() -> None:
    content = {
        "run": {"name": "test"},
        "recipe": {"name": "own"},
        "algorithm": "virtual_batch",
        "pipeline": {"stages": 4, "micro_batch": 1},
        "round": {"tokens": 10},
    }
    there = peers(*[TWO] * 4)
    for admission, least in (("token", 1), ("open", 2)):
        run = RunFile.model_validate({**content, "access": {"admission": admission}})
        plan = planner_of(run)(None, LAYERS, there, None)
        assert isinstance(plan, StagePlan)
        assert (least_replicas(plan) >= 2) == (least == 2)


def test_a_large_swarm_is_planned_in_time() -> None:
    layers, there = swarm_of(1, 300, 32)
    plan = plan_stages(layers, there, stages=8, twice=True, **LIMITS)
    assert not isinstance(plan, Infeasible)
    assert least_replicas(plan) >= 2
