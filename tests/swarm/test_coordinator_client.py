"""A member always knows the newest verdict, though it is told it once: on the virtual clock."""

import asyncio
from typing import Any

import torch
from tests.fakes.memory_coordinator import MemoryChannel
from tests.fakes.swarm import Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.messages import CoordinatorToPeerView, Message, RunView

ELEMENTS = 4096


class _Heard:
    """The views that a member got, as they came."""

    def __init__(self, channel: MemoryChannel) -> None:
        self.views: list[RunView] = []
        request, push = channel.request, channel.push

        async def requested(*arguments: Any) -> Message:
            return self._note(await request(*arguments))

        async def pushed(message: Message, scope: int = 0) -> None:
            await push(self._note(message), scope)

        channel.request, channel.push = requested, pushed  # type: ignore[method-assign]

    def _note(self, message: Message) -> Message:
        if isinstance(message, CoordinatorToPeerView):
            self.views.append(message.view)
        return message


async def a_round(run: Swarm) -> None:
    await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))


def test_a_verdict_is_told_until_it_is_known_and_kept_from_then_on() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            heard = _Heard(run[0].channel)
            for number in range(2):
                await a_round(run)
                heard.views.clear()
                verdict = run.coordinator.machine.verdict
                assert verdict is not None
                await asyncio.sleep(3 * run[0].client.deadlines.heartbeat_s)
                assert heard.views[-1].verdict is None
                assert heard.views[-1].verdict_chain == verdict.chain
                assert run[0].view.verdict == verdict
                assert verdict.round == number

    run_virtual(main())


def test_a_verdict_that_got_lost_is_told_again() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            deaf = run[0]
            await a_round(run)
            before = deaf.view.verdict
            deaf.channel.silent = True
            plays = [asyncio.create_task(member.play(torch.ones(ELEMENTS), 4)) for member in run.members]
            await asyncio.sleep(5.0)
            assert deaf.view.verdict == before
            deaf.channel.silent = False
            await asyncio.gather(*plays)
            assert deaf.view.verdict == run.coordinator.machine.verdict != before

    run_virtual(main())


def test_a_view_without_a_verdict_that_is_not_known_here_counts_as_lost() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(4), ELEMENTS) as run:
            await a_round(run)
            before = run[0].view
            strange = before.model_copy(
                update={"sequence": before.sequence + 1, "verdict": None, "verdict_chain": b"s" * 32}
            )
            await run[0].channel.push(CoordinatorToPeerView(view=strange))
            assert run[0].view is before
            known = strange.model_copy(update={"verdict_chain": before.verdict_chain})
            await run[0].channel.push(CoordinatorToPeerView(view=known))
            assert run[0].view == before.model_copy(update={"sequence": before.sequence + 1})

    run_virtual(main())
