"""Peers that come and go for minutes: one is killed (SIGKILL) or started every second, and the books are checked all
along.

    python -m tests.chaos.soak [--minutes 10] [--peers 12] [--seed 0]

After every verdict: one a round, an unbroken chain, weights that sum up, every sample committed once, or leased once,
or free; after every committed round the same anchor on all that live; nobody ends that was not killed. At the end all
are started, and must commit rounds together and leave; memory must have come to rest. Linux.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.chaos.real.inflict import rss_bytes
from tests.integration.audit import Audit, Parity
from tests.integration.harness import KILLED, SHOAL, START_S, Host, Member, Swarm, eventually, run_toml

from shoal.swarm.protocol.run_file import load_run_file

EVERY_S = 1.0
PATIENCE_S = 3.0
ROUND_S = 1.0
FEWEST = 3
"""So many run at any time."""

SETTLE_S = 300.0
LEAVE_S = 60.0
LAST_ROUNDS = 2
HOST_SLACK_BYTES = 48 * 2**20
PEER_SLACK_BYTES = 32 * 2**20
MIB = 2**20


@dataclass
class Memory:
    """Resident bytes of one process, from its first measurement on."""

    pid: int
    seen_bytes: list[int] = field(default_factory=list)

    def growth_bytes(self) -> int:
        """Growth from the second to the last third; the first third is the start."""
        third = len(self.seen_bytes) // 3
        if third < 5:
            return 0
        return int(median(self.seen_bytes[-third:]) - median(self.seen_bytes[third : 2 * third]))


@dataclass
class Soak:
    """A host, its members, and what was seen of them."""

    host: Host
    members: list[Member]
    audit: Audit
    parity: Parity = field(default_factory=Parity)
    kills: int = 0
    starts: int = 0
    memory: dict[int, Memory] = field(default_factory=dict)
    _journal_seen: int = 0
    _events_seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, swarm: Swarm, peers: int) -> Soak:
        corpus = swarm.folder / "data" / "corpus.txt"
        swarm.data = corpus.parent
        corpus.parent.mkdir()
        corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
        host = swarm.host(run_toml(max_s=ROUND_S, patience_s=PATIENCE_S, source="text:corpus.txt"), launcher=SHOAL)
        members = swarm.members(host.invite, "peer-0")
        members[0].event("synced", START_S)  # whoever has the state is the first to be asked for it
        members += swarm.members(host.invite, *[f"peer-{number}" for number in range(1, peers)])
        return cls(host, members, Audit(load_run_file(host.run_file)[1]))

    # Churn ------------------------------------------------------------------------------------------------------

    def disturb(self, draw: random.Random) -> None:
        """Kill one that runs, or start one that does not."""
        running = [one for one in self.members if one.running]
        victim = draw.choice(
            self.members if len(running) > FEWEST else [one for one in self.members if not one.running]
        )
        if victim.running:
            victim.kill()
            self.kills += 1
        else:
            victim.start()
            self.starts += 1

    # Books ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all new events. Raises ``AssertionError`` with what is wrong."""
        for member in self.members:
            events = member.all_events()
            self.parity.take_events(events[self._events_seen.get(member.label, 0) :])
            self._events_seen[member.label] = len(events)
        decided = self.host.journal_events()
        new = decided[self._journal_seen :]
        self._journal_seen = len(decided)
        self.audit.take(new)
        self.parity.take_journal_events(new)
        self.parity.check()
        assert self.host.running, self.host.tail()
        for member in self.members:
            assert member.running or member.exit_code(0) == KILLED, member.tail()

    def measure(self) -> None:
        for process in (self.host, *self.members):
            if process.running and (now := rss_bytes(process.pid)):
                self.memory.setdefault(process.pid, Memory(process.pid)).seen_bytes.append(now)

    def check_memory(self) -> None:
        for pid, memory in self.memory.items():
            slack = HOST_SLACK_BYTES if pid == self.host.pid else PEER_SLACK_BYTES
            assert memory.growth_bytes() < slack, (
                f"process {pid} grows: {[one // MIB for one in memory.seen_bytes]} MiB"
            )

    # End --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until all members are there and commit rounds together; then let them leave."""
        for member in self.members:
            if not member.running:
                member.start()
                self.starts += 1

        def together() -> bool:
            everybody = len(self.members)
            rounds = [
                {one["round"] for one in member.events("committed", included=True, members=everybody)}
                for member in self.members
            ]
            self.check()
            return len(set.intersection(*rounds)) >= LAST_ROUNDS

        eventually("all train together in the end", together, SETTLE_S, lambda: self.host.tail())
        self.measure()
        for member in self.members:
            member.interrupt()
        for member in self.members:
            assert member.exit_code(LEAVE_S) == 0, member.tail()
        self.host.stop()
        self.check_at_end()

    def check_at_end(self) -> None:
        """Check the files once all processes have ended."""
        decided = self.host.journal_events()
        self.audit.take(decided[self._journal_seen :])
        self.parity.take_journal_events(decided[self._journal_seen :])
        for member in self.members:
            self.parity.take_events(member.all_events())
        self.parity.check()
        self.check_memory()

    def rows(self) -> list[tuple[str, str]]:
        verdicts = [one.verdict for one in self.audit.verdicts]
        committed = [one for one in verdicts if one.committed]
        sizes = [len(one.plan.members) for one in committed if one.plan]
        void = sum(one.digests.count(None) for one in committed)
        lost = sum(len(one.lost) for one in self.audit.verdicts)
        resyncs = sum(one["event"] == "resync" for member in self.members for one in member.all_events())
        host = self.memory[self.host.pid].seen_bytes if self.host.pid in self.memory else [0]
        peers = [memory for pid, memory in self.memory.items() if pid != self.host.pid]
        oldest = max(peers, key=lambda one: len(one.seen_bytes))
        return [
            ("kills, starts", f"{self.kills}, {self.starts}"),
            ("rounds committed, aborted", f"{len(committed)}, {len(verdicts) - len(committed)}"),
            ("members a committed round, median and range", f"{median(sizes):g}, {min(sizes)} to {max(sizes)}"),
            ("void parts", str(void)),
            ("dead members' contributions left out", str(lost)),
            ("resyncs of the living", str(resyncs)),
            ("samples' tokens committed", f"{self.audit.tokens:,}"),
            ("coordinator's memory, first and last MiB", f"{host[0] // MIB}, {host[-1] // MIB}"),
            ("peers' memory, largest MiB", str(max(max(one.seen_bytes) for one in peers) // MIB)),
            (
                "longest-lived peer's growth, MiB",
                f"{oldest.growth_bytes() / MIB:.1f}",
            ),
        ]


def run(minutes: float, peers: int, seed: int, folder: Path) -> Soak:
    """Disturb the swarm for that long and check it. Raises ``AssertionError``."""
    draw = random.Random(seed)
    swarm = Swarm(folder)
    try:
        soak = Soak.open(swarm, peers)
        eventually("the first round is committed", lambda: soak.host.events("verdict", committed=True), SETTLE_S)
        end_s = time.monotonic() + 60 * minutes
        next_s, said_s = time.monotonic(), time.monotonic()
        while (now_s := time.monotonic()) < end_s:
            if now_s >= next_s:
                next_s += EVERY_S
                soak.disturb(draw)
                soak.measure()
            soak.check()
            if now_s >= said_s + 10:
                said_s = now_s
                alive = sum(one.running for one in soak.members)
                print(f"{end_s - now_s:4.0f} s to go, {alive} run, {len(soak.audit.verdicts)} rounds", flush=True)
            time.sleep(max(0.0, min(next_s - time.monotonic(), EVERY_S)))
        soak.settle()
        return soak
    finally:
        swarm.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and started; timing has none")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as folder:
        rows = run(options.minutes, options.peers, options.seed, Path(folder)).rows()
    width = max(len(what) for what, _ in rows)
    for what, found in rows:
        print(f"{what:<{width}}  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
