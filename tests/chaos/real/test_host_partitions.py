"""Hosts on a shared journal in a network that falls in two: hosts, etcd's members and the run's each on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.chaos.real.namespaces import Wire
from tests.fakes.engines import ETCD, EtcdCluster
from tests.integration.harness import CALM, ROUNDS_S, SHOAL, START_S, Member, Swarm, eventually, run_toml
from tests.integration.namespaces import NoNamespaces
from tests.integration.shared_hosts import LEASE_S, SharedHost, check, leave, machine_key

from shoal.swarm.errors import LeaseLost

pytestmark = [pytest.mark.integration, pytest.mark.matrix]

ENGINES = ("e1", "e2", "e3")


class Scene:
    """``one`` leads, ``two`` stands by; the members a and b have committed a round together."""

    def __init__(self, swarm: Swarm, wire: Wire, etcd: EtcdCluster) -> None:
        self.swarm, self.wire = swarm, wire
        toml = run_toml(max_s=0.5, patience_s=2.0)
        key = machine_key(swarm._folder("two") / "home")

        def host(label: str, keys: Sequence[str]) -> SharedHost:
            bind = ["--bind", f"{wire.address(label)}:0"]
            return swarm._add(SharedHost(swarm, label, toml, etcd.url(), keys, bind, (*wire.inside(label), *SHOAL)))

        self.one = host("one", [key])
        self.one.leads()
        self.two = host("two", ())
        self.two.stands_by()
        invite = self.one.invite(addresses=2)
        self.members: list[Member] = []
        for name in "ab":
            bind = ["--bind", f"{wire.address(name)}:0"]
            self.members.append(swarm.member(invite, name, (*wire.inside(name), *CALM), extra=bind))
            self.members[0].event("synced", START_S)
        self.together(-1)

    def newest(self) -> int:
        return max(member.last_round() for member in self.members)

    def together(self, after: int) -> None:
        """Wait for two rounds with the work of both."""

        def look() -> bool:
            rounds = [
                {one["round"] for one in member.events("committed", included=True, members=2)}
                for member in self.members
            ]
            return len([one for one in set.intersection(*rounds) if one > after]) >= 2

        eventually("both train together", look, START_S + ROUNDS_S, self.swarm.tails)

    def finish(self) -> None:
        leave([self.one, self.two], self.members)
        self.wire.call("two", lambda: check(self.swarm, self.two, self.members))


@contextmanager
def apart(swarm: Swarm, folder: Path, here: Sequence[str], there: Sequence[str]) -> Iterator[Scene]:
    if ETCD is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    try:
        wire = Wire(here, there).__enter__()
    except NoNamespaces as error:
        pytest.skip(str(error))
    with wire:
        etcd = EtcdCluster(folder, apart=[(wire.address(one), wire.inside(one)) for one in ENGINES])
        try:
            yield Scene(swarm, wire, etcd)
        finally:
            etcd.close()


def test_the_leader_is_left_with_a_minority(swarm: Swarm, tmp_path: Path) -> None:
    with apart(swarm, tmp_path, ["one", "e1", "a"], ["two", "e2", "e3", "b"]) as scene:
        a, b = scene.members
        scene.wire.pull()
        scene.two.leads(within_s=10 * LEASE_S)
        assert scene.one.exit_code(START_S) == LeaseLost.exit_code
        stuck = a.last_round()
        for _ in range(2):
            b.committed(after=max(b.last_round(), stuck))
        assert a.last_round() == stuck, "who has only the minority hears no verdict"
        assert a.running
        after = scene.newest()
        scene.wire.plug_in()
        scene.one.start()
        scene.one.stands_by()
        scene.together(after)
        scene.finish()


def test_the_leader_keeps_the_majority(swarm: Swarm, tmp_path: Path) -> None:
    with apart(swarm, tmp_path, ["two", "e3"], ["one", "e1", "e2", "a", "b"]) as scene:
        scene.wire.pull()
        after = scene.newest()
        for _ in range(4):
            scene.together(after)
            after = scene.newest()
        assert scene.one.running
        assert not scene.two.events("leading")
        scene.wire.plug_in()
        scene.together(after)
        assert scene.two.running
        scene.finish()


def test_the_leader_is_left_with_the_members_only(swarm: Swarm, tmp_path: Path) -> None:
    with apart(swarm, tmp_path, ["one", "a", "b"], ["two", *ENGINES]) as scene:
        scene.wire.pull()
        scene.two.leads(within_s=10 * LEASE_S)
        assert scene.one.exit_code(START_S) == LeaseLost.exit_code
        stuck = [member.last_round() for member in scene.members]
        assert all(member.running for member in scene.members)
        assert stuck[0] == stuck[1], "nobody is told what is not in the journal"
        scene.wire.plug_in()
        scene.together(max(stuck))
        scene.one.start()
        scene.one.stands_by()
        scene.finish()
