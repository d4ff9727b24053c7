"""Prefetch: owners request contributions by the expected plan before the real one is here.

They do as soon as the round's closing is announced, so that links and streams are open when the plan comes. Nothing is
sent before it: who has seen others' contributions could still copy them while the list of roots is open. No stream
takes more than its window.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from shoal.compression.codec_map import CodecMap
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_streams import ExchangeContext
from shoal.swarm.averaging.contribution import ContributionSource, contribution_blob
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_TRIES = 3
"""A stream without chunks is reopened after a third of its ``wait_s``; a prefetched one is not, as it may have none
yet."""


class Prefetch:
    """Streams opened by an expected plan. If that plan comes, the exchange takes them over; otherwise ``close``
    them."""

    def __init__(self, context: ExchangeContext) -> None:
        """``context``: of the expected plan, which is a flat group's, and without sources."""
        self.context = context
        self.plan = context.store.plan
        self.source = ContributionSource(context.store)
        context.sources[contribution_blob(self.plan)] = self.source

    def request_contributions(self, tasks: asyncio.TaskGroup, wait_s: float) -> None:
        """Request contributions for our parts, and accept requests for ours; the first chunk may take ``wait_s``."""
        context, store = self.context, self.context.store
        context.publish()
        request = replace(context.contributions(), wait_s=_TRIES * wait_s)
        for part in self.plan.parts:
            for member in range(len(context.members)):
                if part.owner == context.me != member:
                    context.prefetch(member, request, store.chunks_of(part), tasks)

    def has_chunks_of(self, plan: RoundPlan) -> bool:
        """Whether that plan's owners ask for the chunks that this prefetch serves."""
        return contribution_blob(plan) == contribution_blob(self.plan)

    def fits(self, plan: RoundPlan) -> bool:
        """Whether this is the expected plan, except for weights and bounds."""
        same_members = [one.peer for one in plan.members] == [one.peer for one in self.plan.members]
        return (
            same_members and plan.model_copy(update={"members": self.plan.members, "rho": self.plan.rho}) == self.plan
        )

    async def close(self) -> None:
        """Drop what was fetched and serve nothing more. Call it before the feedback's round ends."""
        await self.context.withdraw()
        await self.source.close()


class PrefetchManager:
    """Begins a prefetch when a closing is announced with its expected plan; holds at most one.

    A prefetch that is not taken ends when another plan is expected or the time for ``ready`` is over."""

    def __init__(
        self, client: CoordinatorClient, endpoint: Endpoint, codec_map: CodecMap, buffers: RoundBuffers
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._codec_map = codec_map
        self._buffers = buffers
        self._tasks: asyncio.TaskGroup | None = None
        self._prefetch: Prefetch | None = None
        self._joins = 0
        self._ends_s = 0.0
        self._last: RoundPlan | None = None
        self._is_taken = False

    async def run(self) -> None:
        """Begin and end prefetches as the view changes, until cancelled."""
        client = self._client
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    left_s = None if self._prefetch is None or self._is_taken else self._ends_s - _now_s()
                    await client.wait_for(lambda _: self._is_over or self._expected is not None, left_s)
                    if self._is_over:
                        await self._close()
                    self._begin_expected()
        finally:
            self._tasks = None
            if not self._is_taken:
                await self._close()

    def take(self, round_number: int) -> Prefetch | None:
        """Return the prefetch of that round, for the caller to close; until ``release``, no other begins."""
        self._begin_expected()
        self._is_taken = True
        one = self._prefetch
        if one is None or self._joins != self._client.joins or one.plan.round != round_number:
            return None
        self._prefetch = None
        return one

    def release(self) -> None:
        """Allow prefetches again after the round."""
        self._is_taken = False
        self._client.wake()

    @property
    def _expected(self) -> RoundPlan | None:
        """The plan to begin a prefetch by now, if any."""
        plan = self._client.view.expected
        if (
            plan is None
            or plan.secure is not None
            or self._client.run_file.averaging.secure
            or self._is_taken
            or self._prefetch is not None
            or plan == self._last
        ):
            return None
        return plan if self._client.peer in [member.peer for member in plan.members] else None

    @property
    def _is_over(self) -> bool:
        """Whether the current prefetch is useless now."""
        if self._prefetch is None or self._is_taken:
            return False
        client, plan = self._client, self._prefetch.plan
        return client.view.expected != plan or client.joins != self._joins or _now_s() >= self._ends_s

    def _begin_expected(self) -> None:
        plan, client = self._expected, self._client
        if plan is None or self._tasks is None:
            return
        log.debug("round %d: requesting contributions ahead of the plan", plan.round)
        index = [member.peer for member in plan.members].index(client.peer)
        store = ResultStore(plan, self._codec_map, self._buffers)
        self._prefetch = Prefetch(ExchangeContext(self._endpoint, store, index, client.deadlines, client.was_away, {}))
        self._last, self._joins = plan, client.joins
        wait_s = max(0.0, (client.closes_at_s or 0.0) - _now_s()) + client.deadlines.ready_s
        self._ends_s = _now_s() + wait_s
        self._prefetch.request_contributions(self._tasks, wait_s)

    async def _close(self) -> None:
        one, self._prefetch = self._prefetch, None
        if one is not None:
            await one.close()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
