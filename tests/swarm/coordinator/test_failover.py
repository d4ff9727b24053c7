"""Several hosts of one run on a virtual clock, each with the real machine and a shared journal in memory.

Leaders die before and after every kind of commit, are paused and wake up, or are cut off from the engine: one verdict a
round, one chain, no sample lost and none twice (``World`` checks that at every event), and the run goes on.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.memory_store import MemoryEngine, MemoryStore
from tests.fakes.shared_journals import HostDied
from tests.swarm.coordinator.world import World, journaled, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.errors import LeaseLost

TTL_S = 5.0


class Host:
    """A host: its way to the engine, its journal, and a clock of its own that may stand still."""

    def __init__(self, world: "FailoverWorld", number: int) -> None:
        self.world = world
        self.store = MemoryStore(world.engine)
        self.stands_at_s: float | None = None
        folder = world.folder / str(number)
        folder.mkdir()
        self.journal = SharedJournal(self.store, f"host {number}", TTL_S, folder, self.clock_s, self.pause)
        self.journal.compact_at_bytes = 2**14
        self.journal.open()

    def clock_s(self) -> float:
        return self.world.now_s if self.stands_at_s is None else self.stands_at_s

    def pause(self, seconds: float) -> None:
        """A write waits for the engine: time passes."""
        self.world.now_s += seconds
        self.world.while_waiting()


class FailoverWorld(World):
    """The host that leads is ``leading``; others follow. ``index``: of the next transaction that nobody was told."""

    def __init__(self, folder: Path, members: int) -> None:
        self.folder = folder
        self.engine = MemoryEngine(lambda: self.now_s)
        self.while_waiting: Callable[[], None] = lambda: None
        self.index = 0
        self.decided_s = 0.0
        self.hosts = 0
        self.followers: list[Host] = []
        self.leading: Host | None = None
        self.about = SharedRun(run_file().hash, "toml", bytes(32))
        super().__init__(run_file(), members)

    def made(self) -> PlainRun:
        """The first host begins to lead, when the world begins."""
        if self.leading is None:
            self.leading = self.new_host()
            self.followers = [self.new_host(), self.new_host()]
            epoch = self.leading.journal.begin(self.about)
            assert epoch is not None
            self.epoch = epoch
        return super().made()

    def new_host(self) -> Host:
        self.hosts += 1
        return Host(self, self.hosts)

    def settle(self) -> None:
        assert self.leading is not None
        journal = self.leading.journal
        journal.check_lease()
        events, self.decided_s = self.machine.log.take(), self.now_s
        if events:
            journal.append(self.index, events)
            journal.check_lease()  # or nobody is told
            self.index += 1
            self.tell(events)
        self.check()
        if ev.verdicts_in(events) and journal.wants_snapshot and (snapshot := self.scope.snapshot()) is not None:
            journal.compact(snapshot)

    def tell(self, events: list[ev.JournalEvent]) -> None:
        self.events += events
        told_s, self.now_s = self.now_s, self.decided_s
        for event in events:
            self._follow(event)
        self.now_s = told_s

    def tick(self, seconds: float) -> None:
        assert self.leading is not None
        self.leading.journal.renew()
        super().tick(seconds)

    def take_over(self, number: int, *, at_once: bool = False) -> Host:
        """Another host takes over when the lease has ended. Returns the one before."""
        before = self.leading
        assert before is not None
        follower = self.followers.pop(number % len(self.followers))
        waited_s = 0.0
        while (epoch := follower.journal.begin(self.about)) is None:
            self.now_s += 0.25
            waited_s += 0.25
            follower.journal.follow()
        assert waited_s <= (0.25 if at_once else TTL_S + 0.25)
        untold = follower.journal.read(self.index) if follower.journal.next_index > self.index else []
        self.tell(untold)  # checked with the machine that decided them
        assert follower.journal.next_index in (self.index, self.index + 1)
        self.index = follower.journal.next_index
        self.leading, self.epoch = follower, epoch
        machine = self.made()
        machine.log.replay(machine.scope, follower.journal.read(0), self.now_s)
        self.machine = machine
        machine.log.start(machine.scope)
        self.settle()
        self.followers.append(self.new_host())  # the machine that was lost comes back, or another one
        return before

    def live(self, turns: int, seconds: float = 0.5) -> None:
        """Everybody behaves."""
        for _ in range(turns):
            for worker in self.workers[:3]:
                self.behave(worker)
            self.tick(seconds)

    def live_until_fault(self, turns: int = 80) -> bool:
        """Live until the leader dies or loses its lease."""
        try:
            self.live(turns)
        except (HostDied, LeaseLost):
            return True
        return False


def arm(world: FailoverWorld, commits: int, *, after: bool) -> None:
    """Have the leader die before its n-th commit from now on, or after it, before the answer."""
    assert world.leading is not None
    store, left = world.leading.store, [commits]
    real = store.commit

    def commit(*arguments: object) -> int:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise HostDied
        made = real(*arguments)  # type: ignore[arg-type]
        if left[0] == 0:
            raise HostDied
        return made

    store.commit = commit  # type: ignore[method-assign]


def wake(world: FailoverWorld, paused: Host, machine: PlainRun) -> None:
    """A paused leader wakes up: whatever it decides, it may tell nobody, and the engine takes nothing of it."""
    before = dict(world.engine.values)
    for _ in range(3):
        machine.tick(world.now_s)
        events = machine.log.take() or [ev.MemberLost(peer=world.workers[0].peer, reason="fell silent")]
        with pytest.raises(LeaseLost):
            paused.journal.append(paused.journal.next_index, events)
    assert world.engine.values == before


def check_end(world: FailoverWorld) -> None:
    """It goes on, and whoever reads the journal has the same run."""
    assert world.leading is not None
    committed = len(world.history)
    for _ in range(200):
        world.live(1)
        if len(world.history) >= committed + 2:
            break
    assert len(world.history) >= committed + 2
    reading = world.new_host().journal
    reading.follow()
    machine = world.made()
    machine.log.replay(machine.scope, reading.read(0), world.now_s)
    assert journaled(machine.scope) == journaled(world.scope)
    assert reading.verdicts(0) == world.verdicts


def die(world: FailoverWorld, chance: random.Random) -> None:
    arm(world, chance.randint(1, 40), after=chance.random() < 0.5)
    if world.live_until_fault():
        world.take_over(chance.randrange(2))


def pause(world: FailoverWorld, chance: random.Random) -> None:
    """SIGSTOP, or with the clock a virtual machine that is moved."""
    world.live(chance.randint(0, 12))
    assert world.leading is not None
    paused, machine = world.leading, world.machine
    if chance.random() < 0.5:
        paused.stands_at_s = world.now_s
    world.take_over(chance.randrange(2))
    world.live(chance.randint(0, 12))
    wake(world, paused, machine)


def cut_off(world: FailoverWorld, chance: random.Random) -> None:
    """From the engine, for some time: verdicts wait; for longer, and another host leads."""
    world.live(chance.randint(0, 12))
    assert world.leading is not None
    store = world.leading.store
    heal_s = world.now_s + chance.uniform(0.5, 8.0)
    store.trouble = "cut off"

    def heal() -> None:
        if world.now_s >= heal_s:
            store.trouble = ""

    world.while_waiting = heal
    lost = world.live_until_fault(16)
    store.trouble, world.while_waiting = "", lambda: None
    if lost:
        world.take_over(chance.randrange(2))


def stop(world: FailoverWorld, chance: random.Random) -> None:
    """Ctrl-C: the next one leads at once."""
    world.live(chance.randint(0, 12))
    assert world.leading is not None
    world.leading.journal.close()
    world.take_over(chance.randrange(2), at_once=True)


def lose_member(world: FailoverWorld, chance: random.Random) -> None:
    world.workers[chance.randrange(3)].running = False


FAULTS = (die, die, die, pause, cut_off, stop, lose_member)


matrix = pytest.mark.matrix


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=matrix) for seed in range(2, 60))])
def test_a_random_schedule_of_faults(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    world = FailoverWorld(tmp_path, 3)
    for _ in range(10):
        chance.choice(FAULTS)(world, chance)
    check_end(world)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [5, 14, 23, *(pytest.param(one, marks=matrix) for one in range(1, 40, 2))])
def test_a_leader_dies_at_each_commit_of_a_round(tmp_path: Path, number: int, after: bool) -> None:
    world = FailoverWorld(tmp_path, 2)
    arm(world, number, after=after)
    assert world.live_until_fault()
    world.take_over(0)
    check_end(world)
