"""Engines of shared journals that take no writes for a while: verdicts wait, members train on, the host says why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from tests.fakes.engines import etcd_cluster, postgres_server
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Member, Swarm, run_toml
from tests.integration.shared_hosts import SharedHost, check, leave, shared_hosts

from shoal.swarm.coordinator.stores.etcd import EtcdStore
from shoal.swarm.coordinator.stores.place import open_store
from shoal.swarm.errors import JournalUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.matrix]

LEASE = ("--lease", "30")
"""Longer than the trouble: the same host goes on."""

HELD_UP_S = 4.0


def train(swarm: Swarm, url: str) -> tuple[SharedHost, list[Member]]:
    (host,) = shared_hosts(swarm, run_toml(max_s=0.5, patience_s=2.0), url, ["one"], LEASE)
    members = swarm.members(host.invite(), "a", "b")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    return host, members


def hold_up(
    swarm: Swarm,
    host: SharedHost,
    members: list[Member],
    words: str,
    begin: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Have the engine take no writes for a while, and check everything."""
    begin()
    host.says("THE JOURNAL TAKES NO WRITES", ROUNDS_S)
    host.says(words)
    time.sleep(1.0)
    held_up = max(member.last_round() for member in members)
    cpu_s = [_cpu_s(member) for member in members]
    status = swarm.command("status", *SHOAL, "status", host.invite())
    status.says("the coordinator waits for its journal", START_S)
    time.sleep(HELD_UP_S)
    assert max(member.last_round() for member in members) == held_up, "no verdict that is not in the journal"
    assert all(_cpu_s(member) > before for member, before in zip(members, cpu_s, strict=True))
    end()
    host.says("takes writes again", START_S)
    for member in members:
        member.committed(after=held_up + 1)
    assert len(host.events("leading")) == 1
    leave([host], members)
    check(swarm, host, members)


def _cpu_s(member: Member) -> int:
    """Processor time, in ticks."""
    fields = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_postgres_stands_still(swarm: Swarm, tmp_path: Path) -> None:
    with postgres_server(tmp_path / "postgres") as server:
        host, members = train(swarm, server.url())
        hold_up(
            swarm,
            host,
            members,
            "Postgres does not answer",
            lambda: server.stand_still(True),
            lambda: server.stand_still(False),
        )


def test_postgres_is_read_only(swarm: Swarm, tmp_path: Path) -> None:
    with postgres_server(tmp_path / "postgres") as server:
        host, members = train(swarm, server.url())

        def set_to(value: str) -> None:
            with psycopg.connect(server.url(), autocommit=True) as connection:
                connection.execute("set default_transaction_read_only = off")
                connection.execute(f"alter system set default_transaction_read_only = {value}")
                connection.execute("select pg_reload_conf()")

        hold_up(swarm, host, members, "read-only", lambda: set_to("on"), lambda: set_to("off"))


def test_etcd_is_full(swarm: Swarm, tmp_path: Path) -> None:
    quota = ("--quota-backend-bytes", str(24 * 2**20))
    with etcd_cluster(tmp_path / "etcd", extra=quota) as cluster:
        host, members = train(swarm, cluster.url())
        stranger = open_store(cluster.url("stranger"), "theirs")
        assert isinstance(stranger, EtcdStore)

        def fill() -> None:
            for number in range(100):
                try:
                    stranger.put(f"about/{number}", bytes(2**20))
                except JournalUnavailable:
                    return

        def make_room() -> None:
            deleted = stranger._call("kv/deleterange", {"key": stranger._key("a"), "range_end": stranger._key("b")})
            stranger._call("kv/compaction", {"revision": deleted["header"]["revision"], "physical": True})
            for at in range(3):
                stranger._at = at
                stranger._call("maintenance/defragment", {})
            for alarm in stranger._call("maintenance/alarm", {"action": "GET"})["alarms"]:
                stranger._call("maintenance/alarm", {"action": "DEACTIVATE", **alarm})

        hold_up(swarm, host, members, "etcd is full", fill, make_room)
