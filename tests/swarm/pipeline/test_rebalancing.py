"""Tests of planner.replan: few moves when peers come and go."""

import random
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.swarm.pipeline.plan_cases import LIMITS, Layers, assignments, member, rate, small_swarms, span_rate, swarm_of

from shoal.swarm.pipeline.planner.model import Infeasible, LayerCost, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing, plan_stages, replan

MB = 1_000_000


def peer(name: str, memory_mb: float, *layer_s: float) -> PeerCapability:
    return PeerCapability(name, int(memory_mb * MB), layer_s, 1e9)


def moved_between(before: StagePlan, after: StagePlan) -> frozenset[str]:
    """Peers whose span differs between the plans: they have to download another stage."""
    both = before.spans.keys() & after.spans.keys()
    return frozenset(peer for peer in both if before.spans[peer] != after.spans[peer])


def replanned(answer: StagePlan | Infeasible) -> StagePlan:
    assert isinstance(answer, StagePlan), answer
    return answer


def still_held(previous: StagePlan, layers: Layers, peers: list[PeerCapability]) -> dict[str, tuple[int, int]]:
    by_id = {one.peer: one for one in peers}
    return {
        one: span
        for one, span in previous.spans.items()
        if one in by_id and span_rate(layers, by_id[one], previous.boundaries, span, peers) > 0
    }


def fewest_moves(previous: StagePlan, layers: Layers, peers: list[PeerCapability]) -> int | None:
    """By trying everything: None if no stage can be left empty."""
    held = still_held(previous, layers, peers)
    for count in range(len(held) + 1):
        for movers in combinations(held, count):
            keep = {one: span for one, span in held.items() if one not in movers}
            if any(one > 0 for _, one in assignments(layers, peers, previous.boundaries, keep)):
                return count
    return None


@settings(max_examples=120, deadline=None)
@given(small_swarms(most_layers=4, most_peers=5), st.data())
def test_after_joins_and_leaves_as_few_as_possible_move(
    swarm: tuple[Layers, list[PeerCapability]], data: st.DataObject
) -> None:
    layers, everybody = swarm
    before = [one for one in everybody if data.draw(st.booleans())]
    after = [one for one in everybody if data.draw(st.booleans())]
    stages = data.draw(st.integers(1, len(layers)))
    previous = plan_stages(layers, before, stages=stages, **LIMITS)
    if isinstance(previous, Infeasible) or not after:
        return
    plan = replan(previous, layers, after, **LIMITS)
    fewest = fewest_moves(previous, layers, after)
    if fewest is None:
        assert isinstance(plan, Infeasible)
        return
    plan = replanned(plan)
    assert plan.boundaries == previous.boundaries
    assert rate(layers, after, plan) > 0
    assert len(moved_between(previous, plan)) == fewest
    # Who can hold anything has a place.
    able = {
        one.peer
        for one in after
        for stage in range(stages)
        if span_rate(layers, one, plan.boundaries, (stage,) * 2, after)
    }
    assert plan.spans.keys() == able


@settings(max_examples=120, deadline=None)
@given(small_swarms(most_layers=4, most_peers=5), st.data())
def test_one_move_at_most_and_the_one_that_helps_most(
    swarm: tuple[Layers, list[PeerCapability]], data: st.DataObject
) -> None:
    layers, peers = swarm
    stages = data.draw(st.integers(1, len(layers)))
    begun = plan_stages(layers, peers, stages=stages, **LIMITS)
    if isinstance(begun, Infeasible):
        return
    # A plan that is not the best: some hold other spans than they should.
    spans = data.draw(st.sampled_from([held for held, _ in assignments(layers, peers, begun.boundaries)]))
    previous = replace(begun, spans=spans)
    if (now := rate(layers, peers, previous)) == 0:
        return
    plan = replanned(replan(previous, layers, peers, **LIMITS, rebalancing=Rebalancing(0.0, gain=0.1)))
    best = now
    for one in peers:
        keep = {other: span for other, span in spans.items() if other != one.peer}
        best = max(best, *(got for _, got in assignments(layers, peers, begun.boundaries, keep)))
    if best > now * 1.1001:
        assert len(moved_between(previous, plan)) == 1
        assert rate(layers, peers, plan) == pytest.approx(best)
    elif best < now * 1.0999:
        assert plan.spans == spans


def test_the_last_holder_gone_and_a_replica_takes_over() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    peers = [peer("a", 9, 1, 1), peer("b", 9, 1, 1), peer("c", 9, 1, 1)]
    previous = StagePlan((0, 1, 2), {"a": (0, 0), "b": (1, 1), "c": (1, 1)})
    plan = replanned(replan(previous, layers, peers[1:], **LIMITS))
    assert moved_between(previous, plan) in ({"b"}, {"c"})
    assert rate(layers, peers, plan) > 0


def test_who_has_just_moved_is_not_moved_again_if_another_can() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    peers = [peer("a", 9, 1, 1), peer("b", 9, 1, 1), peer("c", 9, 1, 1)]
    previous = StagePlan((0, 1, 2), {"a": (0, 0), "b": (1, 1), "c": (1, 1)})
    for mover, other in (("b", "c"), ("c", "b")):
        rested = Rebalancing(now_s=100.0, moved_s={mover: 90.0}, pause_s=60.0)
        plan = replanned(replan(previous, layers, peers[1:], **LIMITS, rebalancing=rested))
        assert moved_between(previous, plan) == {other}


def test_a_slow_newcomer_rather_than_a_move() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    peers = [peer("b", 9, 1, 1), peer("c", 9, 1, 1), peer("slow", 9, 100, 100)]
    previous = StagePlan((0, 1, 2), {"a": (0, 0), "b": (1, 1), "c": (1, 1)})
    plan = replanned(replan(previous, layers, peers, **LIMITS))
    assert plan.spans == {"b": (1, 1), "c": (1, 1), "slow": (0, 0)}


def test_two_moves_where_one_does_not_do() -> None:
    # Only the big one can hold stage 0, and the small one has to take over from it.
    layers = [LayerCost(3 * MB, 1, 1), LayerCost(MB, 1, 1), LayerCost(MB, 1, 1)]
    peers = [peer("big", 25, 1, 1, 1), peer("small", 9, 1, 1, 1), peer("other", 9, 1, 1, 1), peer("spare", 9, 1, 1, 1)]
    previous = StagePlan((0, 1, 2, 3), {"big": (1, 1), "small": (2, 2), "other": (2, 2)})
    plan = replanned(replan(previous, layers, peers[:3], **LIMITS))
    assert len(moved_between(previous, plan)) == 2
    # A newcomer's place is no move.
    plan = replanned(replan(previous, layers, peers, **LIMITS))
    assert moved_between(previous, plan) == {"big"}


def test_what_nobody_can_hold_any_more_is_waited_for() -> None:
    layers = [LayerCost(MB, 1, 1), LayerCost(10 * MB, 1, 1)]
    peers = [peer("small", 9, 1, 1), peer("big", 90, 1, 1)]
    previous = StagePlan((0, 1, 2), {"small": (0, 0), "big": (1, 1)})
    answer = replan(previous, layers, peers[:1], **LIMITS)
    assert isinstance(answer, Infeasible)
    assert "nobody can hold stage 1 (layer 1)" in answer.reason
    assert "82.0 MB" in answer.reason
    assert isinstance(replan(previous, layers, [], **LIMITS), Infeasible)
    assert replanned(replan(previous, layers, peers, **LIMITS)).spans == previous.spans


def test_who_has_lost_its_memory_loses_its_span() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    peers = [peer("a", 18, 1, 1), peer("b", 18, 1, 1), peer("c", 18, 1, 1)]
    previous = StagePlan((0, 1, 2), {"a": (0, 1), "b": (0, 0), "c": (1, 1)})
    plan = replanned(replan(previous, layers, [replace(peers[0], host_bytes=9 * MB), *peers[1:]], **LIMITS))
    assert plan.spans["a"] in ((0, 0), (1, 1))
    assert {one: plan.spans[one] for one in "bc"} == {one: previous.spans[one] for one in "bc"}


# --- a trace of joins and leaves ----------------------------------------------------------------------------


@dataclass
class Trace:
    """A run of 20 peers and what 200 joins and leaves, 20 s apart, make of it."""

    seed: int
    gain: float = 0.1
    pause_s: float = 120.0
    forced: int = 0
    wanted: int = 0
    waited: int = 0
    moves: list[tuple[float, str, tuple[int, int], tuple[int, int], bool]] = field(default_factory=list)
    """When, who, from where, where to, and whether nobody had to."""
    rates: list[tuple[float, float]] = field(default_factory=list)
    """Before and after each move that nobody had to make."""

    def run(self) -> "Trace":
        layers, peers = swarm_of(self.seed, 20, 12)
        chance = random.Random(self.seed)
        whole = 8.2 * sum(one.parameters_bytes for one in layers)
        plan = replanned(plan_stages(layers, peers, stages=4, **LIMITS))
        moved_s: dict[str, float] = {}
        for number in range(200):
            now_s = 20.0 * number
            if len(peers) <= 5 or (len(peers) < 40 and chance.random() < 0.5):
                peers.append(member(f"peer-{1000 + number}", chance, 12, whole))
            else:
                peers.pop(chance.randrange(len(peers)))
            rebalancing = Rebalancing(now_s, moved_s, self.gain, self.pause_s)
            stays = replan(plan, layers, peers, **LIMITS)
            answer = replan(plan, layers, peers, **LIMITS, rebalancing=rebalancing)
            if isinstance(answer, Infeasible):
                self.waited += 1
                continue
            assert rate(layers, peers, answer) > 0
            moved = moved_between(plan, answer)
            had_to = moved_between(plan, stays) if isinstance(stays, StagePlan) else frozenset()
            for one in sorted(moved):
                self.moves.append((now_s, one, plan.spans[one], answer.spans[one], not had_to))
                moved_s[one] = now_s
            self.forced += len(moved) if had_to else 0
            self.wanted += 0 if had_to else len(moved)
            if moved and not had_to:
                assert len(moved) == 1
                self.rates.append((rate(layers, peers, replanned(stays)), rate(layers, peers, answer)))
            plan = answer
        return self


@pytest.mark.parametrize("seed", range(3))
def test_no_flapping_on_a_trace_of_churn(seed: int) -> None:
    trace = Trace(seed).run()
    # Far fewer moves than joins and leaves, and each that nobody had to make was worth it.
    assert trace.wanted + trace.forced <= 40
    assert trace.wanted > 0
    assert all(after >= before * 1.1 for before, after in trace.rates)
    voluntary = [now_s for now_s, _, _, _, wanted in trace.moves if wanted]
    assert all(later - sooner >= 120 for sooner, later in pairwise(voluntary))
    # Nobody is sent back where it came from within the pause.
    for at, (now_s, who, came_from, _, _) in enumerate(trace.moves):
        later = [move for move in trace.moves[at + 1 :] if move[1] == who and move[0] - now_s < 120]
        assert all(went_to != came_from for _, _, _, went_to, _ in later)


def test_without_hysteresis_the_same_trace_moves_far_more() -> None:
    eager = Trace(0, gain=0.001, pause_s=0.0).run()
    steady = Trace(0).run()
    assert eager.wanted > 2 * steady.wanted


def test_nothing_moves_before_the_pause_is_over() -> None:
    layers = [LayerCost(MB, 1, 1)] * 2
    peers = [peer(name, 9, 1, 1) for name in "abcd"]
    previous = StagePlan((0, 1, 2), {"a": (0, 0), "b": (0, 0), "c": (0, 0), "d": (1, 1)})

    def at(now_s: float, gain: float = 0.1) -> frozenset[str]:
        rebalancing = Rebalancing(now_s, {"d": 10.0}, gain=gain, pause_s=60.0)
        return moved_between(previous, replanned(replan(previous, layers, peers, **LIMITS, rebalancing=rebalancing)))

    assert at(69.9) == frozenset()
    assert at(70.0) == {"a"}
    # The run becomes twice as fast by it.
    assert at(70.0, gain=0.99) == {"a"}
    assert at(70.0, gain=1.01) == frozenset()
