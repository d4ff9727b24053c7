"""Who waits for whom when many ask for the run's history."""

import asyncio
import threading

import pytest

from shoal.swarm.coordinator.history_reader import HistoryReader
from shoal.swarm.errors import TryLater


class Gate:
    """A journal that is read when it is let."""

    def __init__(self) -> None:
        self.opened, self.reads = threading.Event(), 0

    def verdicts(self, first: int, limit: int, scope: int | None) -> list[object]:
        self.reads += 1
        assert self.opened.wait(10)
        return []


async def until(holds: object) -> None:
    while not holds():  # type: ignore[operator]  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_one_peer_has_two_requests_waiting_and_no_more() -> None:
    async def play() -> None:
        journal = Gate()
        reader = HistoryReader(journal)  # type: ignore[arg-type]
        asked = [asyncio.create_task(reader.page("guest", 0, None, is_guest=True)) for _ in range(2)]
        await until(lambda: journal.reads)
        for _ in range(3):
            with pytest.raises(TryLater):
                await reader.page("guest", 0, None, is_guest=True)
        journal.opened.set()
        assert [page.more for page in await asyncio.gather(*asked)] == [False, False]
        await reader.page("guest", 0, None, is_guest=True)

    asyncio.run(play())


def test_a_member_does_not_wait_for_guests() -> None:
    async def play() -> None:
        journal = Gate()
        reader = HistoryReader(journal)  # type: ignore[arg-type]
        guests = [asyncio.create_task(reader.page(f"guest {one}", 0, None, is_guest=True)) for one in range(5)]
        await until(lambda: journal.reads == 1)
        member = asyncio.create_task(reader.page("member", 0, None, is_guest=False))
        await until(lambda: journal.reads == 2)
        journal.opened.set()
        await member
        assert journal.reads == 2, "guests are read for one at a time"
        for one in guests:
            one.cancel()

    asyncio.run(play())
