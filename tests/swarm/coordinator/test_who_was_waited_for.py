"""Stragglers made on purpose, in whole rounds on the virtual clock: each is named, with the right reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual, until

from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.protocol.timing import CriticalPath, RoundTiming
from shoal.swarm.protocol.types import PathReport, WorkPhase

ELEMENTS, FEW_ELEMENTS = 2**19, 2**14
"""Of the former, 2 MiB, each link's rate is known."""
MEMBERS = 4
USUAL_BPS, SLOW_BPS = 40e6, 1e6


class Lines(MemoryNetwork):
    """``up_bps``, ``down_bps``: by peer, of each line from it and to it."""

    sends_on = True

    def __init__(self) -> None:
        super().__init__()
        self.up_bps: dict[str, float] = {}
        self.down_bps: dict[str, float] = {}

    def link(self, one: str, other: str) -> tuple[float, float]:
        return 0.01, min(self.up_bps.get(one, USUAL_BPS), self.down_bps.get(other, USUAL_BPS))


class Straggler(SimMember):
    """``late``: what it does after the closing, and for how long."""

    late: tuple[WorkPhase, float] | None = None

    async def until_due(self) -> None:
        clock = self.averager.clock
        clock.train("compute")
        await super().until_due()
        if self.late is not None:
            phase, seconds = self.late
            with clock.training(phase):
                await asyncio.sleep(seconds)
        clock.train(None)


async def rounds(run: Swarm, number: int = 1) -> RoundTiming:
    """Play whole rounds; return the timing of the last one."""
    for _ in range(number):
        plays = [member.play(torch.ones(run.elements), 10) for member in run.members]
        assert all(isinstance(one, Committed) for one in await together(*plays))
    timing = run.coordinator.machine.scope.timings.newest
    assert timing is not None
    return timing


def named(
    make: Callable[[Swarm, SimMember], None],
    number: int = 1,
    members: int = MEMBERS,
    elements: int = ELEMENTS,
    **settings: Any,
) -> tuple[CriticalPath | None, RoundTiming]:
    """Whom the last round names where ``make`` has done something to a member. It is checked that it is that one."""

    async def main() -> tuple[CriticalPath | None, RoundTiming]:
        toml = run_toml(10 * members, **settings)
        async with swarm(members, toml, elements, Lines(), make=Straggler) as run:
            victim = run[1]
            make(run, victim)
            timing = await rounds(run, number)
            assert timing.path is None or timing.path.peer == victim.peer, timing.path
            return timing.path, timing

    return run_virtual(main())


def nothing(run: Swarm, victim: SimMember) -> None:
    pass


def slow_upload(run: Swarm, victim: SimMember) -> None:
    assert isinstance(run.network, Lines)
    run.network.up_bps[victim.peer] = SLOW_BPS


def slow_download(run: Swarm, victim: SimMember) -> None:
    assert isinstance(run.network, Lines)
    run.network.down_bps[victim.peer] = SLOW_BPS


def over_a_relay(run: Swarm, victim: SimMember) -> None:
    slow_upload(run, victim)
    for member in run.members:
        member.paths = (PathReport(peer=victim.peer, kind="relayed"),) if member is not victim else ()


def late_by(phase: WorkPhase) -> Callable[[Swarm, SimMember], None]:
    def make(run: Swarm, victim: SimMember) -> None:
        assert isinstance(victim, Straggler)
        victim.late = phase, 4.0

    return make


@pytest.mark.parametrize("settings", [{}, {"group_size": 2}, {"overlap": True}, {"algorithm": "virtual_batch"}])
def test_nobody_is_named_in_a_quiet_run(settings: dict[str, Any]) -> None:
    path, timing = named(nothing, number=2, elements=FEW_ELEMENTS if settings else ELEMENTS, **settings)
    assert path is None
    assert timing.utilisation is not None
    assert timing.mean is not None
    assert timing.mean.total_s == pytest.approx(timing.wall_s, rel=0.05, abs=0.15)


@pytest.mark.parametrize(
    ("make", "cause", "settings"),
    [
        (slow_upload, "slow upload", {}),
        (slow_download, "slow download", {}),
        (over_a_relay, "relay", {}),
        (slow_upload, "slow upload", {"group_size": 3, "members": 6}),
        (slow_download, "slow download", {"group_size": 3, "members": 6}),
        (slow_upload, "slow upload", {"overlap": True}),
        (slow_upload, "slow upload", {"algorithm": "virtual_batch"}),
    ],
)
def test_a_slow_link_is_named(make: Callable[[Swarm, SimMember], None], cause: str, settings: dict[str, Any]) -> None:
    path, timing = named(make, **settings)
    assert path is not None
    assert (path.cause, path.phase, path.is_claimed) == (cause, "exchange", False)
    assert 1.0 < path.extra_s <= timing.exchange_s + 0.01
    assert path.bps == 0 or SLOW_BPS / 4 < path.bps < 10 * SLOW_BPS


@pytest.mark.parametrize(
    ("phase", "cause", "settings"),
    [
        ("compute", "slow device", {}),
        ("compute", "slow device", {"group_size": 2}),
        ("data", "slow data", {}),
        ("applying", "slow applying", {}),
        ("checkpoint", "slow checkpoint", {}),
        ("checkpoint", "slow checkpoint", {"overlap": True}),
        ("data", "slow data", {"algorithm": "virtual_batch"}),
    ],
)
def test_who_is_ready_late_is_named_and_says_why(phase: WorkPhase, cause: str, settings: dict[str, Any]) -> None:
    path, timing = named(late_by(phase), elements=FEW_ELEMENTS, **settings)
    assert path is not None
    assert (path.cause, path.phase, path.is_claimed) == (cause, phase, True)
    assert path.extra_s == pytest.approx(4.0, abs=0.5)
    assert timing.gather_s >= path.extra_s


def test_a_process_that_stops_in_the_exchange_is_named() -> None:
    async def main() -> CriticalPath | None:
        async with swarm(MEMBERS, run_toml(10 * MEMBERS), FEW_ELEMENTS, Lines(), make=Straggler) as run:
            victim, others = run[1], [run[0], run[2], run[3]]
            async with asyncio.TaskGroup() as tasks:
                doomed = tasks.create_task(victim.play(torch.ones(FEW_ELEMENTS), 10))
                playing = [tasks.create_task(one.play(torch.ones(FEW_ELEMENTS), 10)) for one in others]
                await until(lambda: victim.view.phase == "averaging", 0.05)
                victim.die()
                doomed.cancel()
                await asyncio.wait(playing)
            timing = run.coordinator.machine.scope.timings.newest
            assert timing is not None
            assert timing.path is not None
            assert timing.path.peer == victim.peer
            return timing.path

    path = run_virtual(main())
    assert path is not None
    assert (path.cause, path.phase) == ("stopped", "exchange")


def test_a_newcomer_that_all_wait_for_has_joined_late() -> None:
    async def main() -> CriticalPath | None:
        async with asyncio.TaskGroup() as tasks, swarm(3, run_toml(40), FEW_ELEMENTS, Lines(), make=Straggler) as run:
            early = [tasks.create_task(one.play(torch.ones(FEW_ELEMENTS), 10)) for one in run.members]
            await asyncio.sleep(2.0)
            newcomer = Straggler(run, 9, 0.01)
            newcomer.late = "compute", 4.0
            run.members.append(newcomer)
            await newcomer.join(tasks)
            await newcomer.play(torch.ones(FEW_ELEMENTS), 10)
            await asyncio.wait(early)
            timing = run.coordinator.machine.scope.timings.newest
            assert timing is not None
            assert timing.path is not None
            assert timing.path.peer == newcomer.peer
            return timing.path

    path = run_virtual(main())
    assert path is not None
    assert path.cause == "late join"
