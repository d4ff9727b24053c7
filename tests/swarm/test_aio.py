import asyncio

from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.aio import Changes


def test_what_holds_already_is_not_waited_for() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(Changes().until(lambda: True))
        await asyncio.sleep(0)
        assert task.done()

    run_virtual(main())


def test_everybody_looks_again_after_every_change() -> None:
    async def main() -> None:
        changes, number, looked = Changes(), 0, 0

        def reached(limit: int) -> bool:
            nonlocal looked
            looked += 1
            return number >= limit

        waiting = [asyncio.ensure_future(changes.until(lambda limit=limit: reached(limit))) for limit in (1, 2, 2)]
        for done in ([False] * 3, [True, False, False], [True] * 3):
            for _ in range(3):
                await asyncio.sleep(0)
            assert [one.done() for one in waiting] == done
            number += 1
            changes.announce()
        assert looked == 3 + 3 + 2, "and not without one"

    run_virtual(main())


def test_who_is_cancelled_leaves_the_others_waiting() -> None:
    async def main() -> None:
        changes, holds = Changes(), False
        waiting = [asyncio.ensure_future(changes.until(lambda: holds)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        holds = True
        changes.announce()
        await waiting[1]
        assert waiting[0].cancelled()

    run_virtual(main())
