"""Attempts to meet other members, on the virtual clock: how soon one that was out of reach for a while is met again."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.virtual_clock import now_s, run_virtual, until

from shoal.swarm.client.meeting_probe import keep_meeting
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import Unreachable
from shoal.swarm.transport.paths.unmet_peers import UnmetPeers

DEAD_S = 4.0


class Busy:
    """A client, its node and its endpoint, beside members that answer ``delay_s`` after they are asked."""

    peer = "me"
    deadlines = Deadlines(DEAD_S)

    def __init__(self, delay_s: Callable[[str], float]) -> None:
        self.node: Any = self
        self.unmet = UnmetPeers()
        self.view = SimpleNamespace(phase="training")
        self.delay_s = delay_s
        self.members = ["a", "b", "c", "me"]
        self.linked: set[str] = set()
        self.met: set[str] = set()
        self.asked: list[tuple[str, float]] = []
        self.told: list[tuple[str, ...]] = []

    async def wait_for(self, holds: Callable[[Any], bool]) -> Any:
        await until(lambda: holds(self.view), 0.1)
        return self.view

    def reachable_owners(self) -> list[str]:
        return self.members

    def is_linked(self, peer: str) -> bool:
        return peer in self.linked

    async def fetch(self, peer: str, blob: Any, chunks: range, sink: Any, wait_s: float) -> AsyncGenerator[int, None]:
        self.asked.append((peer, now_s()))
        delay_s = self.delay_s(peer)
        await asyncio.sleep(min(delay_s, wait_s))
        if delay_s > wait_s:
            self.unmet.note_failure(peer, now_s())
            raise Unreachable(peer)
        self.unmet.note_met(peer)
        self.met.add(peer)
        sink(0, 8)
        yield 0

    async def meets_all(self, within_s: float) -> float:
        """Run until all were met; return when."""
        client: Any = self
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(keep_meeting(client, client, lambda: self.told.append(self.unmet.named)))
            async with asyncio.timeout(within_s):
                await until(lambda: len(self.met) == 3, 0.1)
            running.cancel()
        return now_s()


def test_members_are_asked_once_each() -> None:
    async def main() -> None:
        world = Busy(lambda peer: 0.1)
        await world.meets_all(10.0)
        assert sorted(peer for peer, _ in world.asked) == ["a", "b", "c"]
        assert not world.told

    run_virtual(main())


def test_a_machine_that_is_busy_does_not_keep_members_apart() -> None:
    """A connection takes five seconds as long as this lasts, and the first attempts have three."""

    async def main() -> None:
        world = Busy(lambda peer: 5.0 if peer in "bc" and now_s() < 60.0 else 0.1)
        await world.meets_all(30.0)
        assert not world.told, "nobody is named"

    run_virtual(main())


def test_a_first_attempt_lasts_until_others_may_know_our_key() -> None:
    """From their next heartbeat on, which is later than three seconds where patience is usual."""

    async def main() -> None:
        world = Busy(lambda peer: 8.0)
        world.deadlines = Deadlines(30.0)
        await world.meets_all(40.0)
        assert len(world.asked) == 3

    run_virtual(main())


@pytest.mark.parametrize("busy_s", [20.0, 60.0])
def test_members_are_met_again_soon_after_they_can_be(busy_s: float) -> None:
    async def main() -> None:
        world = Busy(lambda peer: 99.0 if peer in "bc" and now_s() < busy_s else 0.1)
        took_s = await world.meets_all(500.0) - busy_s
        assert world.told[0] == ("b", "c")
        assert took_s < 0.7 * busy_s + 12.0

    run_virtual(main())


def test_a_member_that_has_connected_to_us_is_tried_at_once() -> None:
    async def main() -> None:
        world = Busy(lambda peer: 99.0 if peer == "c" and peer not in world.linked else 0.1)

        async def connect() -> None:
            await asyncio.sleep(300.0)
            world.linked.add("c")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(connect())
            assert await world.meets_all(400.0) < 300.0 + 5.0 + 12.0 + 1.0
        assert world.told[0] == ("c",)

    run_virtual(main())


def test_who_stays_out_of_reach_is_tried_ever_more_seldom() -> None:
    async def main() -> None:
        world = Busy(lambda peer: 99.0 if peer == "c" else 0.1)
        with pytest.raises(ExceptionGroup):
            await world.meets_all(1200.0)
        moments = [moment_s for peer, moment_s in world.asked if peer == "c"]
        pauses = [later - earlier for earlier, later in pairwise(moments)]
        assert pauses[0] < 12.0
        assert 100.0 < pauses[-1] < 140.0

    run_virtual(main())
