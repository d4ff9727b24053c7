"""Hosts that share a journal, and the etcd cluster that it is on, are killed and stopped at named steps of a round: one
verdict a round, chains equal everywhere, nothing that was committed lost, nothing twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.real.host_stage import LONG_S, MOMENTS, SHORT_S, HostFault, HostStage
from tests.fakes.engines import EtcdCluster, etcd_cluster
from tests.integration.harness import SHOAL, START_S, Swarm

pytestmark = pytest.mark.integration

PAUSES = (0.0, 0.0, SHORT_S, LONG_S)
FAULTS_A_SEED = 20


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        yield cluster


def some_fault(chance: random.Random) -> HostFault:
    victim = chance.choice(("leader", "leader", "standby", "engine"))
    return HostFault(victim, chance.choice(MOMENTS), chance.choice(PAUSES))


@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["leader", "standby", "engine"])
def test_each_step_of_a_round(swarm: Swarm, etcd: EtcdCluster, victim: str) -> None:
    stage = HostStage.open(swarm, etcd)
    for moment in MOMENTS:
        for seconds in (0.0, LONG_S):
            stage.play(HostFault(victim, moment, seconds))
    assert stage.finish() >= 2 * len(MOMENTS)


@pytest.mark.matrix
def test_who_takes_over_is_killed_as_it_does(swarm: Swarm, etcd: EtcdCluster) -> None:
    stage = HostStage.open(swarm, etcd)
    stage.train_on(-1)
    first = stage.leader
    second, third = (one for one in stage.hosts if one is not first)
    newest = max(member.last_round() for member in stage.members)
    asked = swarm.command(
        "members", "env", f"SHOAL_HOME={second.home}", *SHOAL, "members", str(second.state / second.run_name)
    )
    asked.says("this host stands by", START_S)
    first.kill()
    stage.kill_who_takes_over(second, third)
    stage.train_on(newest)
    stage.finish()


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(10))
def test_a_random_schedule(swarm: Swarm, etcd: EtcdCluster, seed: int) -> None:
    """Two hundred faults in all."""
    chance = random.Random(seed)
    stage = HostStage.open(swarm, etcd)
    for _ in range(FAULTS_A_SEED):
        stage.play(some_fault(chance))
    assert stage.finish() >= FAULTS_A_SEED


def test_a_short_random_schedule(swarm: Swarm, etcd: EtcdCluster) -> None:
    stage = HostStage.open(swarm, etcd, hosts=2)
    stage.play(HostFault("leader", "a verdict is written and nobody was told"))
    stage.play(HostFault("engine", "while members average"))
    assert stage.finish() >= 4
