"""What of an exchange need not wait for its plan: contributions, by the plan that is expected.

They are asked for as soon as the round's closing is announced, and sent as soon as their members are ready: the first
are on their way while those say so. Nothing is reduced, and no more taken than a stream's window: who is in,
with which weights, the plan has to say.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.averaging.ahead import StreamAhead
from shoal.swarm.averaging.contribution import ContributionSource, contribution_blob
from shoal.swarm.averaging.seat import Seat
from shoal.swarm.protocol.messages import RoundPlan

_TRIES = 3
"""A stream is opened anew after such a part of what it is waited for; one that has nothing to bring yet need not be."""


class HeadStart:
    """By a plan that may not come. What was made of it goes into the exchange, or is closed."""

    def __init__(self, seat: Seat) -> None:
        """``seat``: in the expected plan, a flat group's, without anything to offer yet."""
        self.seat = seat
        self.plan = seat.store.plan
        self.source = ContributionSource(seat.store)
        seat.sources[contribution_blob(self.plan)] = self.source
        self.has_begun = False
        """Whether others may have got something of ours."""

    def ask(self, tasks: asyncio.TaskGroup, wait_s: float) -> None:
        """Have others ask us, and ask them: for so long there may be nothing yet."""
        seat, store = self.seat, self.seat.store
        seat.publish()
        wanted = replace(seat.contributions(), wait_s=_TRIES * wait_s)
        for part in self.plan.parts:
            for member in range(len(seat.members)):
                if part.owner == seat.me != member:
                    chunks = store.chunks_of(part)
                    seat.ahead[member, wanted.blob, chunks] = StreamAhead(seat.stream(member, wanted, chunks), tasks)

    def begin(self, feedback: ErrorFeedback) -> None:
        """We are ready: others get what they ask for. ``feedback`` is in its round with what we bring."""
        if not self.has_begun:
            self.has_begun = True
            self.seat.share_uplink()
            self.source.begin(feedback)

    def has_chunks_of(self, plan: RoundPlan) -> bool:
        """Whether what we offer is what that plan's owners ask us for: they may have got some of it."""
        return contribution_blob(plan) == contribution_blob(self.plan)

    def fits(self, plan: RoundPlan) -> bool:
        """Whether this is the plan that was expected, but for weights and bounds."""
        same_members = [one.peer for one in plan.members] == [one.peer for one in self.plan.members]
        return (
            same_members and plan.model_copy(update={"members": self.plan.members, "rho": self.plan.rho}) == self.plan
        )

    async def close(self) -> None:
        """Forget what was fetched, and offer nothing more. Then the feedback may be settled, or discarded."""
        await self.seat.withdraw()
        await self.source.close()
