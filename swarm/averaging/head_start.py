"""What of an exchange need not wait for its plan: contributions, by the plan that is expected.

They are offered, and asked for, as soon as their members are ready, so they are on their way while those say so.
Nothing is reduced, and no more taken than a stream's first credit: who is in, with which weights, the plan has to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.averaging.ahead import StreamAhead
from shoal.swarm.averaging.contributions import ContributionSource, contribution_blob
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.seat import Seat
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.links import in_thread
from shoal.swarm.messages import RoundPlan
from shoal.swarm.transport import Endpoint


class HeadStart:
    """By a plan that may not come. What was made of it goes into the exchange, or is closed."""

    def __init__(
        self,
        endpoint: Endpoint,
        store: ResultStore,
        me: str,
        feedback: ErrorFeedback,
        deadlines: Deadlines,
        was_away: Callable[[float], bool],
    ) -> None:
        """``store``: of the expected plan, a flat group's with us in it; ``was_away``: as in ``Seat``."""
        plan = store.plan
        self.source = ContributionSource(store, feedback)
        index = [member.peer for member in plan.members].index(me)
        self.seat = Seat(endpoint, store, index, deadlines, was_away, {contribution_blob(plan): self.source})
        self.begun: asyncio.Task[None]

    def begin(self, tasks: asyncio.TaskGroup, begin_round: Callable[[], None]) -> None:
        """Offer, and ask; ``begin_round``, run in a worker thread, is to begin the feedback's round."""
        seat, store = self.seat, self.seat.store
        self.begun = tasks.create_task(self._begin(begin_round))
        seat.offer()
        for part in store.plan.parts:
            for member in range(len(seat.members)):
                if part.owner == seat.me != member:
                    wanted, chunks = seat.contributions(), store.chunks_of(part)
                    seat.ahead[member, wanted.blob, chunks] = StreamAhead(seat.stream(member, wanted, chunks), tasks)

    async def _begin(self, begin_round: Callable[[], None]) -> None:
        await in_thread(begin_round)
        self.source.begin()

    def has_chunks_of(self, plan: RoundPlan) -> bool:
        """Whether what we offer is what that plan's owners ask us for: they may have got some of it."""
        return plan.chunk_elements == self.seat.store.plan.chunk_elements

    def fits(self, plan: RoundPlan) -> bool:
        """Whether this is the plan that was expected, but for weights."""
        expected = self.seat.store.plan
        same_members = [one.peer for one in plan.members] == [one.peer for one in expected.members]
        return same_members and plan.model_copy(update={"members": expected.members}) == expected

    async def close(self) -> None:
        """Forget what was fetched, and offer nothing more. Then the feedback may be settled, or discarded."""
        await asyncio.wait([self.begun])
        await self.seat.withdraw()
        await self.source.close()
