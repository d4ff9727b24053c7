"""Lives that work on for the next round while one is averaged, as a session does in a run with ``overlap``."""

import asyncio
from dataclasses import dataclass

from tests.chaos.lives import Life, Reborn
from tests.fakes.swarm import Swarm
from torch import Tensor

from shoal.swarm.averaging.outcome import Resync, RoundOutcome
from shoal.swarm.sample_ranges import Ranges, merge


@dataclass(frozen=True)
class _Offered:
    """What a round that is averaged was given: ``local`` (n,) float64; ``joins`` when it was offered."""

    round: int
    joins: int
    local: Tensor
    done: Ranges
    outcome: asyncio.Task[RoundOutcome]


class OverlapLife(Life):
    """``local`` and ``done`` are what is done since the last offer; ``steps_ahead`` counts what was done under one."""

    overlap = True
    steps_ahead = 0

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        super().__init__(swarm, number, latency_s)
        self._offered: _Offered | None = None
        self._exchanges: asyncio.TaskGroup

    async def live(self) -> None:
        await self.sync()
        async with asyncio.TaskGroup() as self._exchanges:
            while self.until is None or self.round <= self.until:
                await self._live_on()
            await self._conclude()

    async def _live_on(self) -> None:
        view, offered = self.view, self._offered
        if offered is not None and offered.outcome.done():
            await self._conclude()
        elif self.rejoined or view.must_resync:
            if await self._conclude():
                await self.start_afresh()
        elif offered is not None and view.round < self.round:
            self.steps_ahead += 1
            await self._work_some()
        elif view.round != self.round or view.phase in ("closing", "averaging"):
            await self.close_round()
        else:
            await self._work_some()

    async def close_round(self) -> None:
        await self.until_due()
        if not await self._conclude():
            return
        offer = self.make_offer()
        outcome = self._exchanges.create_task(self.averager.average(offer))
        self._offered = _Offered(self.round, self.client.joins, self.local, self.done, outcome)
        self.local, self.done = self.local * 0, []
        self.round += 1

    async def _conclude(self) -> bool:
        """Act on the outcome of what was offered; False when that cost the work that was done since."""
        offered, self._offered = self._offered, None
        if offered is None:
            return True
        outcome = await offered.outcome
        local, done = self.local, self.done  # of now: the samples in hand are not interrupted
        self.local, self.done, self.round = offered.local, offered.done, offered.round
        await self.act(offered.round, offered.joins, outcome)
        if isinstance(outcome, Resync):
            return False
        self.local, self.done = self.local + local, merge([*self.done, *done])
        await self.beat()
        return True


class OverlapReborn(OverlapLife, Reborn):
    """The process after."""


OverlapLife.born_again = OverlapReborn
