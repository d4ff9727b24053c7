"""Every process is killed at once, at each moment of a round, and started again: one history, and it goes on."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from tests.chaos.attack import ATTACKED
from tests.chaos.ledger import Ledger
from tests.chaos.lives import Life
from tests.fakes.memory_network import Step
from tests.fakes.processes import run_processes
from tests.fakes.swarm import Swarm, run_toml, swarm
from tests.fakes.virtual_clock import until
from tests.integration.audit import Audit
from torch import Tensor

from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.coordinator import events as ev
from shoal.swarm.protocol.types import KeptState
from shoal.swarm.protocol.verdict_chain import check_verdict

MEMBERS = 3
ELEMENTS = 3 * 4096 + 17
FURTHER_ROUNDS = 3
KILLED_ROUND = ATTACKED + 2

Disk = dict[int, dict[bytes, Tensor]]
"""By version and digest, the anchor."""


class Keeper(Life):
    """A member with a disk, where the states are that ``saves`` lets through."""

    disk: Disk
    saves: Callable[[int], bool]
    on_applied: Callable[["Keeper"], None]

    def start_with(self, disk: Disk, saves: Callable[[int], bool], on_applied: Callable[["Keeper"], None]) -> None:
        self.disk, self.saves, self.on_applied = disk, saves, on_applied
        self.disk.setdefault(0, {})[Life.digest.fget(self)] = self.anchor  # type: ignore[attr-defined]

    def _take(self, outcome: Committed, is_ours: bool) -> None:
        super()._take(outcome, is_ours)
        self.on_applied(self)
        if self.saves(self.version) and not self.is_dead:
            self.disk.setdefault(self.version, {})[self.digest] = self.anchor

    async def sync(self) -> None:
        """As ``acquire_state`` does it."""
        while True:
            view, self.holds = self.view, False
            mine = self.disk.get(view.anchor_version, {})
            for digest, anchor in mine.items():
                if view.state_digest in (None, digest):
                    self.anchor, self.version, self.holds = anchor.clone(), view.anchor_version, True
            donor = None if self.holds else self._donor(view)
            if donor is not None:
                self.anchor, self.version, self.holds = donor.anchor.clone(), donor.version, True
            self.kept = tuple(
                KeptState(anchor_version=version, digest=digest)
                for version in sorted(self.disk, reverse=True)
                for digest in self.disk[version]
            )
            self.round = view.round
            await self.beat()
            view = self.view
            if self.holds and (view.anchor_version, view.state_digest) == (self.version, self.digest):
                self.round = view.round
                return
            await asyncio.sleep(0.2)


class Again(Keeper):
    processes_before = 1

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        super().__init__(swarm, number, latency_s)
        self.process = f"{self.peer} again"
        self.holds = False


Keeper.born_again = Again

MOMENTS = [
    *[(kind, step) for kind in ("RoundClosing", "RoundPlanned", "VerdictGiven") for step in ("decided", "journaled")],
    ("contribution", "sent"),
    ("result", "sent"),
    ("ready", "all but one"),
    ("report", "all but one"),
    *[("applied", str(number)) for number in (1, 2, 3)],
]


class Loss:
    """Kills everybody once, at that moment of the round."""

    def __init__(self, run: Swarm, moment: tuple[str, str]) -> None:
        self.run, (self.kind, self.step) = run, moment
        self.happened = False
        self.applied = 0
        run.coordinator.watch = self._on_events
        run.network.faults.append(self._on_step)

    def _on_events(self, step: str, events: list[ev.JournalEvent]) -> None:
        now = self.run.coordinator.machine.scope.round
        names = {type(one).__name__ for one in events}
        ended = any(isinstance(one, ev.VerdictGiven) and one.verdict.round == KILLED_ROUND for one in events)
        if self.kind == "VerdictGiven":
            due = ended and step == self.step
        elif now.number != KILLED_ROUND or ended:
            due = False
        else:
            due = (self.kind in names and step == self.step) or self._nearly_all()
        if due:
            self.strike()

    def _nearly_all(self) -> bool:
        now = self.run.coordinator.machine.scope.round
        said = {"ready": now.ready, "report": now.reports}.get(self.kind, {})
        return len(said) == MEMBERS - 1

    async def _on_step(self, step: Step, payload: bytes) -> bytes:
        if step.blob.number == KILLED_ROUND and step.blob.kind == self.kind and step.chunk == 1:
            self.strike()
        return payload

    def on_applied(self, member: Keeper) -> None:
        if member.version == KILLED_ROUND + 1:
            self.applied += 1
            if (self.kind, self.step) == ("applied", str(self.applied)):
                self.strike()

    def strike(self) -> None:
        if not self.happened:
            self.happened = True
            self.run.coordinator.away = True
            for life in self.run.members:
                life.die()


async def play(moment: tuple[str, str], saves: Callable[[int], bool], missing: int) -> list[ev.VerdictGiven]:
    """``saves``: which versions get to the disks; ``missing``: how many members do not come back."""
    ledger, disks = Ledger(), {number: Disk() for number in range(1, MEMBERS + 1)}
    async with swarm(MEMBERS, run_toml(10 * MEMBERS), ELEMENTS, make=Keeper) as run, asyncio.TaskGroup() as tasks:
        loss = Loss(run, moment)

        def begin(life: Keeper) -> None:
            life.ledger, life.has_residual = ledger, True
            life.start_with(disks[life.number], saves, loss.on_applied)

        for life in run.members:
            assert isinstance(life, Keeper)
            begin(life)
            life.start(tasks)
        await until(lambda: loss.happened, 0.01)
        await asyncio.sleep(1.0)
        run.coordinator.watch = lambda step, events: None
        run.network.faults.clear()
        run.coordinator.restart()
        again: list[Keeper] = []
        for number in range(1, MEMBERS + 1 - missing):
            life = Again(run, number, 0.01)
            begin(life)
            run.members.append(life)
            again.append(life)
            await life.join(tasks)
            life.start(tasks)
        machine = run.coordinator.machine
        await until(lambda: len(machine.scope.synced()) == len(again), 0.05)
        last = machine.scope.round.number + FURTHER_ROUNDS
        for life in again:
            life.until = last
        await until(lambda: all(life.living is not None and life.living.done() for life in again), 0.05)
        for life in again:
            assert life.task is not None
            life.task.cancel()
        _check(run, again)
        return [one for one in run.coordinator.events if isinstance(one, ev.VerdictGiven)]


def _check(run: Swarm, lives: list[Keeper]) -> None:
    """One verdict a round in one chain, every sample in one place, and parity by the means of what was not undone."""
    audit = Audit(run.coordinator.run)
    audit.take(run.coordinator.events)
    for one in audit.verdicts:
        check_verdict(one.verdict, run.coordinator.identity.public_key)
    kept: list[int] = []
    for one in audit.verdicts:
        kept = kept[: one.verdict.anchor_version - one.verdict.committed]
        kept += [one.verdict.round] if one.verdict.committed else []
    machine, rounds = run.coordinator.machine, lives[0].ledger.rounds
    assert machine.scope.anchor_version == len(kept)
    anchor = torch.zeros(run.elements)
    for number in kept:
        if number in rounds:
            anchor = anchor - rounds[number].mean
    for life in lives:
        assert (life.version, life.digest) == (machine.scope.anchor_version, lives[0].digest)
        assert torch.equal(life.anchor, anchor)
        assert number in rounds, "everybody's last round is one that it applied"


NOTHING, LATE, ALL = 0, KILLED_ROUND, 99


@pytest.mark.parametrize("saved", [NOTHING, LATE - 1, LATE, ALL], ids=["none", "two before", "one before", "all"])
@pytest.mark.parametrize("moment", MOMENTS, ids=" ".join)
def test_everybody_is_killed(moment: tuple[str, str], saved: int) -> None:
    """States up to version ``saved`` are on everybody's disk; the killed round is planned on version ``LATE``."""
    verdicts = run_processes(play(moment, lambda version: version <= saved, 0))
    returns = [one for one in verdicts if one.went_back is not None]
    is_ended = moment[0] == "applied" or moment == ("VerdictGiven", "journaled")
    newest = LATE + is_ended
    somebody_saved_it = moment[0] == "applied" and int(moment[1]) > 1  # the last one to apply is killed before it saves
    has = newest if saved == ALL and (somebody_saved_it or not is_ended) else min(saved, LATE)
    assert len(returns) == (has < newest)
    if returns:
        assert returns[0].verdict.anchor_version == has
        assert returns[0].went_back is not None
        assert returns[0].went_back.from_version == newest


@pytest.mark.parametrize("moment", [("VerdictGiven", "journaled"), ("applied", "3"), ("RoundPlanned", "journaled")])
def test_one_of_them_does_not_come_back(moment: tuple[str, str]) -> None:
    verdicts = run_processes(play(moment, lambda version: version < LATE, 1))
    (back,) = [one for one in verdicts if one.went_back is not None]
    assert back.verdict.anchor_version == LATE - 1
