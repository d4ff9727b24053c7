"""A member of a simulated run that audits as much as it can, and judges its evidence itself."""

import asyncio
import random

from tests.fakes.swarm import SimMember, Swarm

from shoal.compression.codec_map import CodecMap
from shoal.swarm.averaging.auditor import Auditor
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.chunk_judge import Judgement, RunFacts, judge


class Audited(SimMember):
    """``found``: what its evidence was judged to be."""

    def _begin(self, swarm: Swarm) -> None:
        super()._begin(swarm)
        self.found: list[Judgement] = []

    @property
    def facts(self) -> RunFacts:
        run = self.client.run_file
        codec_map = CodecMap(run.format_map([("w", (self.elements,))]))
        return RunFacts(run.hash, self.swarm.coordinator.identity.public_key, self.elements, codec_map)

    async def _make_averager(self, tasks: asyncio.TaskGroup) -> Averager:
        averager, known = await super()._make_averager(tasks), self.facts

        async def accuse(evidence: bytes) -> None:
            self.found.append(judge(evidence, known))

        rng = random.Random(self.peer)
        averager.auditor = Auditor(self.endpoint, self.peer, 1.0, self.client.deadlines, accuse, rng)
        return averager

    async def _live(self) -> None:
        assert self.averager.auditor is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super()._live())
            tasks.create_task(self.averager.auditor.run())
