"""A pipeline whose hosts share a journal trains as one process does, though the leader is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fakes.engines import etcd_cluster
from tests.integration.harness import ROUNDS_S, START_S, Swarm, eventually
from tests.integration.shared_hosts import LEASE_S, journal_events, shared_hosts
from tests.integration.test_pipeline import MEMORY, ROUNDS, TOML, check_samples, launcher, plain_vector, trained

pytestmark = [pytest.mark.integration, pytest.mark.matrix]


class Journaled:
    """The events of a shared journal, as of a host with one of its own."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self._events = journal_events(url, run, folder)

    def journal_events(self) -> list[object]:
        return list(self._events)


def test_the_leader_of_a_pipeline_is_killed(swarm: Swarm, tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "etcd") as cluster:
        one, two = shared_hosts(swarm, TOML, cluster.url(), ["one", "two"])
        invite = one.invite(addresses=2)
        extra = ("--max-memory", MEMORY)
        members = [swarm.member(invite, label, launcher(), extra=extra) for label in "abc"]
        eventually("a round ends", lambda: bool(one.events("verdict")), START_S + 2 * ROUNDS_S, swarm.tails)
        one.kill()
        two.leads(within_s=10 * LEASE_S)
        for member in members:
            assert member.exit_code(START_S + 3 * ROUNDS_S) == 0, member.tail()
        two.interrupt()
        assert two.exit_code(ROUNDS_S) == 0, two.tail()
        check_samples(Journaled(cluster.url(), two.run_name, swarm.folder), ROUNDS)  # type: ignore[arg-type]
        ours, plain = trained(members), plain_vector()
        assert torch.linalg.vector_norm(ours - plain) < 1e-5 * torch.linalg.vector_norm(plain)
