"""Tests of the shared engine in pipeline/runner: events of the loop and results of the training thread in order."""

import asyncio
import threading

from tests.swarm.pipeline.turns import Turns

from shoal.peer.pipeline.runner import SharedEngine
from shoal.peer.pipeline.training import ComputeResult
from shoal.swarm.pipeline.engine.effects import Compute, ComputeForward, Effect, Fetch, MicroBatch, Send, TensorOffer
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan

ROUND = 3


class Side:
    """The middle one of three stages, in its loop. ``done``: in this order; ``begun``: by the training thread."""

    def __init__(self) -> None:
        self.engine = StageEngine(StageSpan(1, 1), EngineSettings(3, 2, 4, 2.0, 30.0), Turns(30.0, 2.0))
        self.done: list[Effect | ComputeResult] = []
        self.begun: list[Compute] = []
        self.shared = SharedEngine(self.engine, self.done.extend, self.begun.append)
        self.shared.bind_loop()
        self.shared.report(self.engine.round_opened, ROUND)
        self.shared.report(self.engine.replicas_changed, 2, {"down": None})

    def arrive(self, index: int) -> None:
        """A micro-batch's input."""
        micro_batch = MicroBatch(ROUND, 2 * index, 2 * index + 2)
        assert self.shared.answer_offer(TensorOffer("activation", "up", micro_batch, 1, 1, index)) == "accepted"
        (fetch,) = [one for one in self.done if isinstance(one, Fetch) and one.micro_batch == micro_batch]
        self.shared.report(self.engine.tensor_arrived, fetch)

    def train(self, micro_batches: int) -> None:
        """As the training thread does: from one computation to the next."""
        (compute,) = [one for one in self.done if isinstance(one, ComputeForward)]
        for number in range(micro_batches):
            self.shared.report_result(ComputeResult(compute))
            compute = self.begun[number] if number < len(self.begun) else compute


def test_the_next_computation_waits_for_no_turn_of_the_loop() -> None:
    async def main() -> None:
        side = Side()
        side.arrive(0)
        side.arrive(1)
        before = list(side.done)
        (first,) = [one for one in before if isinstance(one, ComputeForward)]
        side.shared.report_result(ComputeResult(first))
        assert [one.micro_batch.start for one in side.begun] == [2]
        assert side.done == before, "the loop has not had a turn"

    asyncio.run(main())


def test_what_follows_from_what_is_handed_in_is_done_before_anything_newer() -> None:
    async def main() -> None:
        side = Side()
        side.arrive(0)
        running = asyncio.create_task(side.shared.execute_backlog())
        await asyncio.sleep(0)
        thread = threading.Thread(target=side.train, args=(1,))
        thread.start()
        thread.join()
        side.arrive(1)
        kinds = [type(one) for one in side.done]
        assert kinds == [Fetch, ComputeForward, ComputeResult, Send, Fetch, ComputeForward]
        running.cancel()

    asyncio.run(main())


def test_the_loop_does_what_follows_when_it_is_woken() -> None:
    async def main() -> None:
        side = Side()
        for index in range(3):
            side.arrive(index)
        async with asyncio.timeout(10.0):
            running = asyncio.create_task(side.shared.execute_backlog())
            await asyncio.to_thread(side.train, 3)
            assert not [one for one in side.done if isinstance(one, Send)]
            side.shared.wake()
            while len([one for one in side.done if isinstance(one, Send)]) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert [one.micro_batch.start for one in side.done if isinstance(one, Send)] == [0, 2, 4]
        running.cancel()

    asyncio.run(main())
