"""Members that can do nothing with the run's newest state: the run goes back to what they keep, whatever the others do
at that moment, and goes on."""

import asyncio

import pytest
from tests.chaos.attack import ATTACKED
from tests.chaos.ledger import Ledger
from tests.chaos.test_whole_loss import ELEMENTS, FURTHER_ROUNDS, MEMBERS, Disk, Keeper, _check
from tests.fakes.processes import run_processes
from tests.fakes.swarm import run_toml, swarm
from tests.fakes.virtual_clock import until

from shoal.swarm.coordinator import events as ev
from shoal.swarm.protocol.types import DivergenceWord, KeptState

BAD_VERSION = ATTACKED + 2


class Doubter(Keeper):
    """``doubts``: it finds that version to be of no use, once, when it is to bring its work to a round. ``words``: the
    answers that it got."""

    doubts: int | None = None
    words: list[DivergenceWord]

    async def close_round(self) -> None:
        if self.doubts == self.version and not self.swarm.coordinator.machine.scope.rounds_undone:
            self.diverged = KeptState(anchor_version=self.version, digest=self.digest)
            self.doubts = None
            await self.start_afresh()
        else:
            await super().close_round()

    async def sync(self) -> None:
        """As ``LocalMember.ask_about_divergence`` does it, before anything else."""
        bad = self.diverged
        if bad is not None:
            self.holds = False
            self.kept = tuple(
                KeptState(anchor_version=version, digest=digest)
                for version in sorted(self.disk, reverse=True)
                for digest in self.disk[version]
                if version < bad.anchor_version
            )
            while not self.view.divergence:
                await self.beat()
                await self.client.wait_for(lambda view: view.divergence != "", self.client.deadlines.heartbeat_s)
            self.words.append(self.view.divergence)
            self.diverged = None
            self.averager.round_feedback.forget()
            self.carried = self.carried * 0
        await super().sync()


async def play(doubters: int, saved: int) -> tuple[list[Doubter], list[ev.VerdictGiven]]:
    """``saved``: up to which version states get to the disks."""
    ledger, disks = Ledger(), {number: Disk() for number in range(1, MEMBERS + 1)}
    async with swarm(MEMBERS, run_toml(10 * MEMBERS), ELEMENTS, make=Doubter) as run, asyncio.TaskGroup() as tasks:
        lives = [life for life in run.members if isinstance(life, Doubter)]
        for life in lives:
            life.ledger, life.has_residual, life.words = ledger, True, []
            life.doubts = BAD_VERSION if life.number <= doubters else None
            life.start_with(disks[life.number], lambda version: version <= saved, lambda member: None)
            life.start(tasks)
        machine = run.coordinator.machine
        await until(lambda: sum(len(life.words) for life in lives) >= min(doubters, 2), 0.05)
        await until(lambda: len(machine.scope.synced()) == MEMBERS, 0.05)
        last = machine.scope.round.number + FURTHER_ROUNDS
        for life in lives:
            life.until = last
        await until(lambda: all(life.living is not None and life.living.done() for life in lives), 0.05)
        for life in lives:
            assert life.task is not None
            life.task.cancel()
        _check(run, list(lives))
        return lives, [one for one in run.coordinator.events if isinstance(one, ev.VerdictGiven)]


@pytest.mark.parametrize(("doubters", "saved"), [(2, 99), (3, 99), (3, BAD_VERSION - 2), (2, 0)])
def test_the_run_goes_back_to_what_is_kept_and_goes_on(doubters: int, saved: int) -> None:
    lives, verdicts = run_processes(play(doubters, saved))
    (back,) = [one for one in verdicts if one.went_back is not None]
    assert back.went_back is not None
    assert back.went_back.diverged
    assert back.went_back.from_version in (BAD_VERSION, BAD_VERSION + 1), "a third may commit before the second says so"
    assert back.verdict.anchor_version == min(saved, BAD_VERSION - 1)
    words = [life.words for life in lives]
    assert words.count(["go on"]) in (2, doubters), "a third one may have heard of the return before it said so"
    assert words.count([]) == MEMBERS - words.count(["go on"])
    committed = [one.verdict for one in verdicts if one.verdict.committed and one.verdict.round > back.verdict.round]
    assert len(committed) >= FURTHER_ROUNDS - 1


def test_one_that_doubts_alone_is_at_fault() -> None:
    lives, verdicts = run_processes(play(1, 99))
    assert [one for one in verdicts if one.went_back is not None] == []
    assert lives[0].words == ["at fault"]
