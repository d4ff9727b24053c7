"""Three hosts of one run on a real etcd cluster, two members, and faults of all but the members at named steps."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.engines import EtcdCluster
from tests.integration.harness import KILLED, ROUNDS_S, START_S, Member, Swarm, eventually, run_toml
from tests.integration.shared_hosts import LEASE_S, SharedHost, check, leave, shared_hosts

from shoal.swarm.errors import LeaseLost

SHORT_S, LONG_S = 0.3 * LEASE_S, 1.6 * LEASE_S
"""Pauses that end before the lease does, and long after."""

MOMENTS = (
    "before a plan is written",
    "a plan is written and nobody was told",
    "while members average",
    "before a verdict is written",
    "a verdict is written and nobody was told",
    "before a renewal",
)
_FAULTY = (sys.executable, str(Path(__file__).parent / "faulty_host.py"))


@dataclass(frozen=True)
class HostFault:
    """``victim``: leader, standby or engine; ``seconds``: until a stopped one goes on, 0 for SIGKILL."""

    victim: str
    moment: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.victim}, {f'stopped for {self.seconds:g} s' if self.seconds else 'killed'}, {self.moment}"

    @property
    def signal(self) -> signal.Signals:
        return signal.SIGSTOP if self.seconds else signal.SIGKILL


@dataclass
class HostStage:
    """``play`` one fault after the other, then ``finish``."""

    swarm: Swarm
    etcd: EtcdCluster
    hosts: list[SharedHost]
    members: list[Member]
    orders: Path
    _turn: int = 0

    @classmethod
    def open(cls, swarm: Swarm, etcd: EtcdCluster, hosts: int = 3) -> HostStage:
        orders = swarm.folder / "orders"
        orders.mkdir()
        labels = ["one", "two", "three"][:hosts]
        toml = run_toml(max_s=0.5, patience_s=2.0)
        started = shared_hosts(swarm, toml, etcd.url(), labels, launcher=(*_FAULTY, str(orders)))
        members = swarm.members(started[0].invite(addresses=hosts), "a", "b")
        for member in members:
            member.committed(within_s=START_S + ROUNDS_S)
        return cls(swarm, etcd, started, members, orders)

    @property
    def leader(self) -> SharedHost:
        """The host that took the lease last."""
        epochs = {
            one.label: [event["epoch"] for event in one.all_events() if event["event"] == "leading"]
            for one in self.hosts
        }
        return max(self.hosts, key=lambda one: max(epochs[one.label], default=0))

    def play(self, fault: HostFault) -> None:
        """Carry out a fault, heal it, and wait until all train on together."""
        leader = self.leader
        standby = next(one for one in self.hosts if one is not leader)
        self._turn += 1
        at = self._turn % len(self.etcd.processes)
        pid = {"leader": leader.pid, "standby": standby.pid, "engine": self.etcd.processes[at].pid}[fault.victim]
        self._place(fault.moment, pid, fault.signal)
        eventually(f"somebody does: {fault}", (self.orders / "done").exists, ROUNDS_S, self.swarm.tails)
        newest = max(member.last_round() for member in self.members)
        time.sleep(fault.seconds)
        if fault.victim == "engine":
            if fault.seconds:
                self.etcd.signal(at, signal.SIGCONT)
            else:
                self.etcd.processes[at].wait()
                self.etcd.restart(at)
        else:
            host = leader if fault.victim == "leader" else standby
            if fault.seconds:
                host.send(signal.SIGCONT)
            else:
                assert host.exit_code(ROUNDS_S) == KILLED
                host.start()
        self.train_on(newest)

    def _place(self, moment: str, pid: int, number: signal.Signals) -> None:
        (self.orders / "done").unlink(missing_ok=True)
        fresh = self.orders / "fresh"
        fresh.write_text(json.dumps({"moment": moment, "pid": pid, "signal": number.name}))
        fresh.rename(self.orders / "order")

    def kill_who_takes_over(self, *standbys: SharedHost) -> None:
        """Have whoever of them takes the lease kill itself, and start it again. The leader is dead already."""
        self._place("a lease is taken", 0, signal.SIGKILL)

        def died() -> SharedHost | None:
            return next((one for one in standbys if not one.running), None)

        dead = eventually("who takes over dies", died, START_S + ROUNDS_S, self.swarm.tails)
        assert dead.exit_code(0.0) == KILLED
        for one in self.hosts:
            if not one.running:
                one.start()

    def train_on(self, after: int) -> None:
        """Wait for two rounds with everybody's work, and for all hosts; those that were followed are started
        again, as a supervisor does."""

        def together() -> bool:
            for host in self.hosts:
                if not host.running:
                    assert host.exit_code(0.0) == LeaseLost.exit_code, host.tail()
                    host.start()
            rounds = [{one["round"] for one in member.events("committed", included=True)} for member in self.members]
            return len([one for one in set.intersection(*rounds) if one > after]) >= 2

        def ready() -> bool:
            return all(host.events("leading") or host.events("standing_by") for host in self.hosts)

        eventually("all train on together", together, START_S + ROUNDS_S, self.swarm.tails)
        eventually("all hosts are back", lambda: together() and ready(), START_S + ROUNDS_S, self.swarm.tails)

    def finish(self) -> int:
        """Let all leave, and check everything. Returns the number of committed rounds."""
        leave([self.leader], self.members)
        verdicts = check(self.swarm, self.leader, self.members)
        told = {one["round"] for member in self.members for one in member.all_events() if one["event"] == "committed"}
        given = {event.verdict.round for event in verdicts if event.verdict.committed}
        assert told <= given, "what members were told is in the journal"
        epochs = [event.verdict.epoch for event in verdicts]
        assert epochs == sorted(epochs)
        return len(given)
