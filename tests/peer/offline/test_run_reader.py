"""A guest gets all stages of one version, however often the run goes on meanwhile."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.offline.export import _chains
from shoal.peer.offline.run_reader import LiveRun, StateShare
from shoal.swarm.errors import LinkError, StateFileError

HEARTBEAT_S, PATIENCE_S = 1.0, 6.0


class Client:
    """Client of one stage; ``show`` delivers a view."""

    deadlines = SimpleNamespace(heartbeat_s=HEARTBEAT_S, patience_s=PATIENCE_S)

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.show(1, 0)

    def show(self, version: int, round_number: int, *, is_held: bool = True) -> None:
        digest = bytes([version]) if is_held else None
        verdict = SimpleNamespace(round=round_number)
        self.view = SimpleNamespace(anchor_version=version, verdict=verdict, state_digest=digest)
        self._changed.set()

    async def wait_for(self, predicate: Callable[[Any], bool], timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self.view):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.view


def run_of(*clients: Client) -> LiveRun:
    stand_ins: list[Any] = list(clients)
    recipe: Any = None
    return LiveRun(stand_ins[0], recipe, tuple(StateShare(client, (), 1) for client in stand_ins))


def versions(views: Sequence[Any]) -> list[int]:
    return [view.anchor_version for view in views]


def test_it_waits_until_all_stages_are_at_the_end_of_one_round() -> None:
    async def main() -> None:
        one, other = Client(), Client()
        one.show(2, 1)

        async def late() -> None:
            await asyncio.sleep(HEARTBEAT_S / 2)
            other.show(2, 1, is_held=False)
            await asyncio.sleep(HEARTBEAT_S)
            other.show(2, 1)

        async def fetch(views: Sequence[Any]) -> list[int]:
            assert all(view.state_digest == bytes([2]) for view in views)
            return versions(views)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(late())
            assert await run_of(one, other).at_one_version(fetch) == [2, 2]

    run_virtual(main())


def test_what_is_out_of_date_is_fetched_anew() -> None:
    async def main() -> None:
        one, other = Client(), Client()
        tried: list[list[int]] = []

        async def fetch(views: Sequence[Any]) -> str:
            tried.append(versions(views))
            if len(tried) < 3:
                one.show(1 + len(tried), len(tried))
                other.show(1 + len(tried), len(tried))
                raise LinkError("nobody has that version any more")
            return "all"

        assert await run_of(one, other).at_one_version(fetch) == "all"
        assert tried == [[1, 1], [2, 2], [3, 3]]

    run_virtual(main())


def test_other_failures_and_a_run_that_is_always_faster_are_told() -> None:
    async def main() -> None:
        client = Client()
        tries = 0

        async def fail(views: Sequence[Any]) -> None:
            raise LinkError("the only donor is gone")

        async def too_slow(views: Sequence[Any]) -> None:
            nonlocal tries
            tries += 1
            client.show(tries + 1, tries)
            raise LinkError("gone on")

        with pytest.raises(LinkError, match="the only donor is gone"):
            await run_of(client).at_one_version(fail)
        with pytest.raises(LinkError, match="gone on"):
            await run_of(client).at_one_version(too_slow)
        assert tries == 8

    run_virtual(main())


def test_a_stage_that_nobody_holds_is_named() -> None:
    async def main() -> None:
        one, other = Client(), Client()
        other.show(1, 0, is_held=False)

        async def fetch(views: Sequence[Any]) -> None:
            raise AssertionError("there is nothing to fetch")

        with pytest.raises(StateFileError, match="no member of the run holds its state of stage 1 at the moment"):
            await run_of(one, other).at_one_version(fetch)

    run_virtual(main())


def test_what_a_run_starts_from_is_not_put_together_once_more_also_after_an_aborted_round() -> None:
    async def main() -> None:
        client = Client()
        client.show(0, 3)
        live: Any = SimpleNamespace(shares=run_of(client).shares, run_file=SimpleNamespace(start=object()))
        with pytest.raises(StateFileError, match="no round of the run has been committed yet"):
            await _chains(live, [client.view])

    run_virtual(main())
