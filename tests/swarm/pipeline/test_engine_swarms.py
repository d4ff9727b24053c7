"""Whole pipelines without faults: nothing is done twice, in the order 1F1B, without bubbles beyond the ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.swarm.pipeline.simulator import Network, SimulatedPeer, Simulation, Speed, World

from shoal.swarm.pipeline.engine.effects import ComputeForward

EQUAL = Speed(1.0, 2.0)


def chain(stages: int, **settings: object) -> World:
    return World(stages, {f"peer {stage}": (stage, stage) for stage in range(stages)}, **settings)  # type: ignore[arg-type]


def order(peer: SimulatedPeer) -> str:
    return "".join("F" if isinstance(one, ComputeForward) else "B" for one in peer.order)


def micro_batches(world: World) -> int:
    return world.batch // world.micro_batch


def bottleneck_s(world: World) -> float:
    """No pipeline is faster than its slowest stage, with all its replicas busy."""
    slowest = 0.0
    for stage in range(world.stages):
        speeds = [world.speed_of(name) for name, span in world.spans.items() if span[0] == stage]
        rate = sum(1 / (speed.forward_s + speed.backward_s) for speed in speeds)
        slowest = max(slowest, micro_batches(world) / rate)
    return slowest


def computed_once(simulation: Simulation) -> bool:
    """Every micro-batch, in every stage, forward and backward."""
    world = simulation.world
    wanted = 2 * world.stages * micro_batches(world) * world.rounds
    return len(simulation.computed) == wanted and set(simulation.computed.values()) == {1}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_equal_peers_have_no_bubble_but_at_the_ends(stages: int) -> None:
    world = chain(stages, batch=48)
    simulation = Simulation(world).run()
    ends_s = (stages - 1) * (EQUAL.forward_s + EQUAL.backward_s)
    assert simulation.finished_s <= bottleneck_s(world) + ends_s
    assert computed_once(simulation)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_peer_goes_one_forward_one_backward(stages: int) -> None:
    world = chain(stages, batch=48, max_in_flight=stages)
    simulation = Simulation(world).run()
    for peer in simulation.peers.values():
        steady = order(peer)[2 * stages : -2 * stages]
        assert "FF" not in steady
        assert "BB" not in steady
        for kind in (True, False):
            done = [one.micro_batch for one in peer.order if isinstance(one, ComputeForward) is kind]
            assert done == sorted(done)


@pytest.mark.parametrize(
    "speeds", [(2.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, 2.0), (4.0, 1.0, 1.0), (1.0, 4.0, 1.0), (1.0, 1.0, 4.0)]
)
def test_a_slow_stage_is_always_busy(speeds: tuple[float, ...]) -> None:
    world = chain(3, batch=240, speeds={f"peer {i}": Speed(slow, 2 * slow) for i, slow in enumerate(speeds)})
    simulation = Simulation(world).run()
    assert computed_once(simulation)
    assert simulation.finished_s <= 1.05 * bottleneck_s(world)


@pytest.mark.parametrize("copies", [(2, 1, 2), (1, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_replicas_share_their_stage(copies: tuple[int, ...]) -> None:
    """As fast as a stage's replicas are in all: each is as much slower as there are more of them."""
    names = {f"{stage}/{i}": (stage, stage) for stage, many in enumerate(copies) for i in range(many)}
    speeds = {name: Speed(copies[span[0]], 2 * copies[span[0]]) for name, span in names.items()}
    world = World(3, names, batch=480, max_in_flight=12, speeds=speeds, patience_s=1000.0)
    simulation = Simulation(world).run()
    assert computed_once(simulation)
    assert simulation.finished_s <= 1.15 * bottleneck_s(world)


@pytest.mark.parametrize("predictions", [{}, {"slow": 0.0, "fast": 0.0}, {"slow": 16.0}])
def test_unequal_replicas_get_their_shares_whatever_was_predicted(predictions: dict[str, float]) -> None:
    names = {"driver": (0, 0), "slow": (1, 1), "fast": (1, 1)}
    speeds = {"driver": Speed(0.5, 1.0), "slow": Speed(4.0, 8.0), "fast": Speed(1.0, 2.0)}
    world = World(2, names, batch=480, max_in_flight=8, speeds=speeds, predictions=predictions, patience_s=1000.0)
    simulation = Simulation(world).run()
    assert computed_once(simulation)
    assert simulation.finished_s <= 1.02 * bottleneck_s(world)
    assert len(simulation.peers["slow"].order) == pytest.approx(0.2 * 480, rel=0.1)


def test_a_short_round_is_shared_as_predicted() -> None:
    """Twenty micro-batches: who would first have to find out who is slow, has given it too many."""
    names = {"driver": (0, 0), "slow": (1, 1), "fast": (1, 1)}
    speeds = {"driver": Speed(0.1, 0.1), "slow": Speed(4.0, 8.0), "fast": Speed(1.0, 2.0)}
    took_s = {}
    for name, predictions in {"right": {}, "none": dict.fromkeys(names, 0.0), "wrong": {"slow": 16.0}}.items():
        world = World(2, names, batch=40, max_in_flight=20, speeds=speeds, predictions=predictions, patience_s=1e4)
        simulation = Simulation(world).run()
        took_s[name] = simulation.finished_s
        if name == "right":
            assert len(simulation.peers["slow"].order) == 2 * 4
            assert simulation.finished_s <= 1.05 * bottleneck_s(world)
    assert took_s["right"] < took_s["none"] < took_s["wrong"]


def test_the_network_s_delays_are_hidden_by_what_is_in_flight() -> None:
    world = chain(4, batch=240, max_in_flight=8, network=Network((0.05, 0.05), (0.2, 0.2)))
    simulation = Simulation(world).run()
    assert computed_once(simulation)
    assert simulation.finished_s <= 1.05 * bottleneck_s(world)


def test_drivers_share_the_stages_behind_and_nobody_starves() -> None:
    names = {"a": (0, 0), "b": (0, 0), "c": (0, 0), "middle": (1, 1), "last": (2, 2)}
    world = World(3, names, batch=240, speeds=dict.fromkeys("abc", Speed(3.0, 6.0)))
    simulation = Simulation(world).run()
    assert computed_once(simulation)
    assert simulation.finished_s <= 1.05 * bottleneck_s(world)
    shares = [len(simulation.peers[name].order) for name in "abc"]
    assert min(shares) >= 0.9 * max(shares)


def test_slow_drivers_do_not_keep_the_others_waiting_in_the_end() -> None:
    names = {"fast": (0, 0), "slow": (0, 0), "behind": (1, 1)}
    speeds = {"slow": Speed(4.0, 8.0), "behind": Speed(0.5, 1.0)}
    world = World(2, names, batch=192, max_in_flight=8, rounds=3, speeds=speeds, averaging_s=20.0)
    simulation = Simulation(world).run()
    assert computed_once(simulation)
    began_s, ended_s = simulation.commits[-2:]
    usual_s = micro_batches(world) / (1 / 3 + 1 / 12)
    slow_s = 12.0  # one micro-batch there
    assert ended_s - began_s - world.averaging_s <= 1.05 * usual_s + slow_s


def test_a_full_replica_beside_a_chain_adds_its_speed() -> None:
    names = {"a": (0, 0), "b": (1, 1), "c": (2, 2), "full": (0, 2)}
    world = World(3, names, batch=480, patience_s=100.0)
    simulation = Simulation(world).run()
    rate = 1 / 3 + 1 / 9
    assert simulation.finished_s <= 1.1 * micro_batches(world) / rate
    assert computed_once(simulation)


def test_a_full_replica_is_there_for_a_driver_who_has_nobody_else() -> None:
    world = World(3, {"driver": (0, 0), "full": (0, 2)}, batch=240)
    simulation = Simulation(world).run()
    rate = 1 / 6  # the driver does a third of everything, and waits for the rest
    assert simulation.finished_s <= 1.05 * micro_batches(world) / rate


@given(
    copies=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    in_flight=st.integers(1, 5),
    micro_batch=st.integers(1, 5),
    slow=st.sampled_from([0.3, 1.0, 3.0]),
    delay_s=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_without_faults_nothing_is_computed_twice(
    copies: list[int], in_flight: int, micro_batch: int, slow: float, delay_s: float, seed: int
) -> None:
    """Whatever the swarm, the order of messages and the rounds' number; and every sample counts once (``ledger``)."""
    names = {f"{stage}/{i}": (stage, stage) for stage, many in enumerate(copies) for i in range(many)}
    world = World(
        len(copies),
        names,
        batch=24 * micro_batch,
        micro_batch=micro_batch,
        max_in_flight=in_flight,
        rounds=2,
        speeds=dict.fromkeys(itertools.islice(names, 0, None, 2), Speed(slow, 2 * slow)),
        network=Network((0.0, delay_s), (0.0, 5 * delay_s)),
        patience_s=1000.0,
    )
    simulation = Simulation(world, seed).run()
    assert computed_once(simulation)
    assert sum(simulation.done.values()) == 48
