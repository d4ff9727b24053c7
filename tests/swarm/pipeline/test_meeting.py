"""Nobody holds a stage beside somebody that it cannot meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from shoal.swarm.memory_account import MemoryDemand
from shoal.swarm.pipeline.planner.meeting import can_meet, plan_acquainted, rearrange, strangers
from shoal.swarm.pipeline.planner.model import Infeasible, LayerCost, PeerCapability, PlanningProblem, StagePlan
from shoal.swarm.pipeline.planner.planner import plan_stages

LAYERS = [LayerCost(1000, 100, 100)] * 3
ONE_LAYER = 3000.0
DEMAND = MemoryDemand(shared=2.0, host=2.0, device=2.0)


def peer(
    name: str, *, dialed: bool = False, unmet: Sequence[str] = (), room: float = ONE_LAYER, s: float = 0.1
) -> PeerCapability:
    return PeerCapability(name, int(room), (s,) * 3, 1e8, is_dialed=dialed, unmet=frozenset(unmet))


def planned(peers: Sequence[PeerCapability], stages: int | None = 3) -> StagePlan | Infeasible:
    def make(some: Sequence[PeerCapability]) -> StagePlan | Infeasible:
        plan = plan_stages(LAYERS, some, stages=stages, max_in_flight=1, demand=DEMAND)
        return plan if isinstance(plan, Infeasible) else rearrange(PlanningProblem(LAYERS, some, 1, DEMAND), plan)

    return plan_acquainted(make, peers, None)


def test_who_can_meet() -> None:
    walled, open_ = peer("a"), peer("b", dialed=True)
    assert can_meet(walled, open_)
    assert not can_meet(walled, peer("c"))
    assert not can_meet(peer("a", unmet="b"), open_), "nobody dials a"
    assert can_meet(peer("a", unmet="b", dialed=True), open_)


@pytest.mark.parametrize("names", list(itertools.permutations("abc")))
def test_the_one_that_can_be_dialed_stands_between_two_behind_walls(names: Sequence[str]) -> None:
    between, *walled = names
    plan = planned([peer(between, dialed=True), *map(peer, walled)])
    assert isinstance(plan, StagePlan)
    assert plan.spans[between] == (1, 1)
    assert {plan.spans[one] for one in walled} == {(0, 0), (2, 2)}


def test_without_anybody_between_them_there_is_no_plan_and_the_reason_is_said() -> None:
    plan = planned([peer("a"), peer("b"), peer("c")])
    assert isinstance(plan, Infeasible)
    assert "cannot reach" in plan.reason


def test_who_has_room_for_all_goes_on_alone() -> None:
    plan = planned([peer("a", room=10 * ONE_LAYER), peer("b", room=10 * ONE_LAYER)], stages=2)
    assert isinstance(plan, StagePlan)
    assert len(plan.spans) == 1


def test_replicas_need_one_that_can_be_dialed() -> None:
    everybody = [peer("a"), peer("b"), peer("c", dialed=True)]
    spans = {"a": (0, 0), "b": (0, 0), "c": (1, 2)}
    assert strangers(spans, everybody) == [("a", "b")]
    assert strangers({**spans, "c": (0, 2)}, everybody) == []
    assert strangers({"a": (0, 0), "c": (1, 1), "b": (2, 2)}, everybody) == []
    assert strangers({"a": (0, 1), "b": (2, 2)}, everybody) == [("a", "b")]


def test_holders_stay_and_a_newcomer_that_cannot_meet_them_waits() -> None:
    previous = StagePlan((0, 1, 2, 3), {"a": (0, 0), "b": (1, 1), "c": (2, 2)})

    def make(some: Sequence[PeerCapability]) -> StagePlan:
        names = {one.peer for one in some}
        return StagePlan(previous.boundaries, {**previous.spans, **({"d": (0, 0)} if "d" in names else {})})

    holders = [peer("a", dialed=True), peer("b"), peer("c", dialed=True)]
    assert plan_acquainted(make, [*holders, peer("d")], previous) == previous
    welcome = plan_acquainted(make, [*holders, peer("d", dialed=True)], previous)
    assert isinstance(welcome, StagePlan)
    assert "d" in welcome.spans
