"""Whole pipelines whose peers die, stand still and come back, over networks that lose, double and reorder.

Every commit of a simulation checks that each sample is in each stage's gradient once (``ledger.check_exactly_once``);
every event, what a peer keeps; and a run ends in bounded time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.swarm.pipeline.ledger import check_exactly_once
from tests.swarm.pipeline.simulator import Fault, Network, Simulation, Speed, World

from shoal.swarm.pipeline.engine.effects import ComputeBackward, MicroBatch

STAGES = {"first": 0, "middle": 1, "last": 2}
LONGER_THAN_PATIENCE_S = 50.0


def two_each() -> dict[str, tuple[int, int]]:
    return {f"{stage}/{i}": (stage, stage) for stage in range(3) for i in range(2)}


def holding_forward(simulation: Simulation, name: str) -> bool:
    """It has computed some forwards, and no gradient of theirs is here."""
    peer = simulation.peers[name]
    going = [one for one in peer.order if not isinstance(one, ComputeBackward)]
    return len(going) >= 3 and peer.computing is None and peer.engine.kept_activations > 0


def holding_backward(simulation: Simulation, name: str) -> bool:
    """It is going back, with some gradients counted before."""
    peer = simulation.peers[name]
    return isinstance(peer.computing, ComputeBackward) and len(peer.order) >= 5


def in_the_round(simulation: Simulation, name: str) -> bool:
    """All is computed, and being averaged."""
    return simulation.coordinator.averaging_since_s is not None


POINTS = {"holding forward": holding_forward, "holding backward": holding_backward, "in the round": in_the_round}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_only", [False, True], ids=["one of two", "the only one"])
def test_one_fault(stage: str, kind: str, point: str, is_only: bool) -> None:
    """The only replica of a stage comes back, or nothing would go on."""
    spans = two_each()
    name = f"{STAGES[stage]}/0"
    if is_only:
        del spans[f"{STAGES[stage]}/1"]
    back_s = None if kind == "kill" and not is_only else LONGER_THAN_PATIENCE_S
    fault = Fault(kind, name, back_s, point=POINTS[point])
    world = World(3, spans, batch=48, rounds=2, averaging_s=6.0, network=Network((0.0, 0.2), (0.0, 0.5)))
    simulation = Simulation(world, seed=1, faults=[fault]).run(until_s=1000.0)
    assert fault.is_past
    # "In the round", all that it had counted is lost, and the round takes samples again.
    assert (simulation.coordinator.reopened > 0) == (point == "in the round")


@pytest.mark.parametrize("stage", STAGES)
def test_a_short_stand_still_loses_nothing(stage: str) -> None:
    def under_way(simulation: Simulation, name: str) -> bool:
        peer = simulation.peers[name]
        return len(peer.order) >= 3 and peer.engine.kept_activations > 0

    fault = Fault("freeze", f"{STAGES[stage]}/0", 4.0, point=under_way)
    simulation = Simulation(World(3, two_each(), batch=48), faults=[fault]).run()
    assert fault.is_past
    assert set(simulation.computed.values()) == {1}


@pytest.mark.parametrize("stage", ["middle", "last"])
def test_a_dead_replica_costs_what_it_had_and_nothing_more(stage: str) -> None:
    """Before anything counted there: its forwards are computed by the other one, and nothing else is done twice."""
    world = World(3, two_each(), batch=48)
    name = f"{STAGES[stage]}/0"

    def has_something(simulation: Simulation, name: str) -> bool:
        return simulation.peers[name].engine.kept_activations > 0

    fault = Fault("kill", name, None, point=has_something)
    simulation = Simulation(world, faults=[fault]).run()
    assert fault.is_past
    assert set(simulation.computed.values()) == {1}
    assert not simulation.peers[name].accumulated[STAGES[stage]]


def test_a_dead_driver_s_work_is_found_by_its_heir() -> None:
    """Stages behind have counted, or are computing, what the dead driver began: they do not do that again."""
    names = {"driver": (0, 0), "heir": (0, 0), "middle": (1, 1), "last": (2, 2)}
    fault = Fault("kill", "driver", None, point=holding_forward)
    simulation = Simulation(World(3, names, batch=48), faults=[fault]).run()
    assert fault.is_past
    begun = {one.micro_batch for one in simulation.peers["driver"].order}
    counted = {one.micro_batch for one in simulation.peers["driver"].order if isinstance(one, ComputeBackward)}
    again = begun - counted
    assert again
    assert all(simulation.computed["forward", one, stage] == 1 for one in again for stage in (1, 2))
    assert all(simulation.computed["forward", one, 0] == 2 for one in again)


@pytest.mark.parametrize("seed", range(5))
def test_the_only_replica_behind_a_lossy_link_is_not_shut_out(seed: int) -> None:
    """A tenth of all messages is lost, so each is banned now and then; it is also all that its stage has."""
    spans = {f"{stage}/{i}": (stage, stage) for stage, replicas in enumerate([1, 1, 1, 4]) for i in range(replicas)}
    network = Network(transfer_s=(0.0, 0.5), lost=0.1, broken_transfers=0.05)
    world = World(4, spans, micro_batch=1, max_in_flight=1, lease_samples=4, network=network)
    Simulation(world, seed).run(until_s=24 * 4 * world.patience_s)


# Anything ---------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Chains, replicas, full replicas, peers with several stages."""
    stages = draw(st.integers(1, 4))
    spans = {
        f"{stage}/{i}": (stage, stage) for stage in range(stages) for i in range(draw(st.sampled_from([1, 1, 2, 3])))
    }
    if draw(st.booleans()):
        spans["full"] = (0, stages - 1)
    if stages > 2 and draw(st.booleans()):
        first = draw(st.integers(0, stages - 1))
        spans["some"] = (first, draw(st.integers(first, stages - 1)))
    network = Network(
        delay_s=(0.0, draw(st.sampled_from([0.0, 0.1, 1.0]))),
        transfer_s=(0.0, draw(st.sampled_from([0.0, 0.5, 2.0]))),
        lost=draw(st.sampled_from([0.0, 0.02, 0.1])),
        doubled=draw(st.sampled_from([0.0, 0.2])),
        broken_transfers=draw(st.sampled_from([0.0, 0.05])),
    )
    slow = draw(st.sets(st.sampled_from(sorted(spans))))
    return World(
        stages,
        spans,
        batch=draw(st.sampled_from([8, 24, 40])),
        micro_batch=draw(st.integers(1, 4)),
        max_in_flight=draw(st.sampled_from([1, 2, 4, 6])),
        rounds=draw(st.integers(1, 3)),
        lease_samples=draw(st.sampled_from([4, 8, 10**9])),
        speeds=dict.fromkeys(sorted(slow), Speed(3.0, 2.0)),
        predictions={name: draw(st.sampled_from([0.0, 0.25, 1.0, 4.0])) for name in sorted(slow)},
        network=network,
    )


@st.composite
def troubles(draw: st.DrawFn) -> tuple[World, list[Fault]]:
    """Anybody may be killed or frozen, all at once, too, as long as they come back."""
    world = draw(worlds())
    back_s = st.sampled_from([0.5, 3.0, 10.0, 25.0, 33.0, 60.0, 90.0])
    fault = st.builds(
        Fault,
        kind=st.sampled_from(["kill", "freeze"]),
        peer=st.sampled_from(sorted(world.spans)),
        back_s=back_s,
        at_s=st.floats(0.0, 150.0),
    )
    return world, draw(st.lists(fault, max_size=8))


@given(troubles(), st.integers(0, 2**32))
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=100)
def test_whatever_happens_every_sample_counts_once_and_the_rounds_end(
    trouble: tuple[World, list[Fault]], seed: int
) -> None:
    world, faults = trouble
    Simulation(world, seed, faults).run(until_s=10_000.0)


# The check itself ----------------------------------------------------------------------------------------------------


def test_a_double_count_is_seen() -> None:
    """Planted: one peer adds a gradient that was not granted to it."""

    def plant(simulation: Simulation, name: str) -> bool:
        peer = simulation.peers[name]
        if len(peer.order) == 6:
            peer.accumulated[1].update([0])
        return False

    faults = [Fault("kill", "1/0", None, point=plant)]
    with pytest.raises(AssertionError):
        Simulation(World(3, two_each(), batch=24), faults=faults).run()


@pytest.mark.parametrize("counts", [{0: 1, 1: 2}, {0: 1}, {0: 1, 1: 1, 2: 1}], ids=["twice", "missing", "foreign"])
def test_wrong_counts_are_seen(counts: dict[int, int]) -> None:
    simulation = Simulation(World(1, {"only": (0, 0)}, batch=2))
    peer = simulation.peers["only"]
    peer.accumulated[0].update({0: 1, 1: 1})
    check_exactly_once([peer], range(2), 1)
    peer.accumulated[0].clear()
    peer.accumulated[0].update(counts)
    with pytest.raises(AssertionError):
        check_exactly_once([peer], range(2), 1)


def test_a_pipeline_without_a_stage_makes_no_progress_and_that_is_seen() -> None:
    faults = [Fault("kill", "1/0", None, at_s=3.0), Fault("kill", "1/1", None, at_s=3.0)]
    with pytest.raises(AssertionError, match="no verdict"):
        Simulation(World(3, two_each()), faults=faults).run(until_s=500.0)


def test_a_simulation_follows_from_its_seed() -> None:
    def play(seed: int) -> tuple[float, int]:
        network = Network((0.0, 1.0), (0.0, 1.0), lost=0.1, doubled=0.1)
        simulation = Simulation(World(3, two_each(), network=network), seed, [Fault("kill", "1/0", 9.0, 20.0)]).run()
        return simulation.finished_s, simulation.events

    assert play(3) == play(3) != play(4)
    assert MicroBatch(0, 0, 2).samples == 2
