"""Exchange of one round: a butterfly all-reduce by owners of parts, and by stand-ins for owners that fail.

Every mean is encoded once and decoded by all members alike. Each owner pulls its part from every member and reduces it;
every member pulls the results of all other parts from their owners, or from stand-ins (reduce-scatter and all-gather,
overlapped chunk by chunk). In a grid, an owner collects its own row's contributions and the other rows' partial sums,
which those rows' reducers make and sign, and the row reducers pass its results on to their rows. Nothing is applied
here: results are kept until the coordinator's verdict.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_header import holders, may_hold
from shoal.swarm.averaging.chunk_streams import ExchangeContext
from shoal.swarm.averaging.contribution import ContributionSource, EncodedContribution, contribution_blob
from shoal.swarm.averaging.inclusions import Inclusions
from shoal.swarm.averaging.partial_sums import sign_partial_sum
from shoal.swarm.averaging.prefetch import Prefetch
from shoal.swarm.averaging.reduction import Reduction
from shoal.swarm.averaging.result_fetch import adopt_agreed, fetch_part
from shoal.swarm.averaging.results import ChunkStore, ResultStore
from shoal.swarm.averaging.straggler_guard import StragglerGuard
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound, ShoalError
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import Part
from shoal.swarm.protocol.statements import ChunkRanges, PlanSigner, ranges_of
from shoal.swarm.protocol.types import MAX_MADE_RANGES, Blob, Delivery
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_FINISHED_AT_ONCE, _FINISHED_ELEMENTS, _PIECES = 4, 2**22, 16
"""Fewest chunks that a worker thread digests at once, unless they have more elements than that, and most
turns for a part: a turn of a worker thread costs about as much as a small chunk."""


@dataclass
class ExchangeResult:
    """Result of an exchange on one member; members as indices of the plan.

    ``dropped``: members that some mean made here does without; ``undelivered``: those whose contributions did not all
    reach us as owner or row reducer; ``failed``: owners and row reducers that did not deliver to us what they had to,
    or left us out; ``trouble``: why a part is missing."""

    dropped: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    undelivered: set[int] = field(default_factory=set)
    trouble: str = ""

    def report(self, store: ResultStore, deliveries: tuple[Delivery, ...]) -> PeerToCoordinatorRoundReport:
        """Return the report for the coordinator. It computes digests: for a worker thread."""
        return PeerToCoordinatorRoundReport(
            round=store.plan.round,
            digests=tuple(store.digest(part) if store.has(part) else None for part in store.plan.parts),
            # Also the members that other owners' means do without: those owners may die before they report it.
            dropped=tuple(sorted(self.dropped | store.left_out())),
            failed=tuple(sorted(self.failed)),
            undelivered=tuple(sorted(self.undelivered)),
            deliveries=deliveries,
            trouble=self.trouble[:2000],
        )


class AllReduce:
    """One member's part in one round's exchange."""

    def __init__(
        self,
        endpoint: Endpoint,
        store: ResultStore,
        signer: PlanSigner,
        feedback: ErrorFeedback,
        contribution: EncodedContribution,
        deadlines: Deadlines,
        was_away: Callable[[float], bool] = lambda since_s: False,
        prefetch: Prefetch | None = None,
    ) -> None:
        """``signer``: ours; ``feedback``: begun with our contribution, (elements,) float32, which is encoded as
        ``contribution``. ``was_away``: see ``ExchangeContext``. ``prefetch``: with the same chunks; its streams are
        taken over."""
        plan = store.plan
        self.blob = contribution_blob(plan)
        self.signer = signer
        self._endpoint = endpoint
        self.store = store
        self._plan = plan
        self._members = [member.peer for member in plan.members]
        self.me = self._members.index(signer.peer)
        self.row = plan.members[self.me].row
        self.feedback = feedback
        self._exchange = ExchangeResult()
        self._source = ContributionSource(store) if prefetch is None else prefetch.source
        self._source.begin(contribution)
        self._partial_sums = ChunkStore(store.chunks, f"the partial sums of round {plan.round}")
        sources: dict[Blob, ChunkSource] = {self.blob: self._source}
        if plan.columns:
            sources[Blob(kind="partial", number=plan.round)] = self._partial_sums
        self._context = ExchangeContext(
            endpoint, store, self.me, deadlines, was_away, sources, plan_statement=signer.plan
        )
        if prefetch is not None:
            taken = prefetch.context
            self._context = replace(self._context, prefetched=taken.prefetched, meters=taken.meters)
        self._inclusions: Inclusions | None = None
        self.as_owner = Reduction(self._context, store.group, store.put)
        self.as_row_reducer = Reduction(self._context, store.group.row(self.row), self._put_partial_sum)
        self.as_stand_in: list[Reduction] = []
        self._guard = StragglerGuard(self._context, lambda: [part.start for part in plan.parts if not store.has(part)])

    def keep_inclusions(self, inclusions: Inclusions) -> None:
        """Keep there what the means and partial sums made here include. Call it before ``run``."""
        self._inclusions = self.as_owner.inclusions = self.as_row_reducer.inclusions = inclusions

    async def run(self) -> ExchangeResult:
        """Run the exchange until every part is in the store or given up."""
        self._context.publish()
        self._context.share_uplink()
        async with asyncio.TaskGroup() as background:
            guard = background.create_task(self._guard.watch())
            async with asyncio.TaskGroup() as tasks:
                for part in self._rotated():
                    tasks.create_task(self._bring(part))
                    if part.owner != self.me and self.me in self._plan.row_reducers(part):
                        tasks.create_task(self.as_row_reducer.run(self.store.chunks_of(part)))
            guard.cancel()
        for reduction in (self.as_owner, *self.as_stand_in):
            self._exchange.dropped |= reduction.dropped
            self._exchange.failed |= reduction.failed - {self.me}
        self._exchange.undelivered = self.as_owner.dropped | self.as_row_reducer.dropped
        self._exchange.failed |= self._leave_us_out()
        return self._exchange

    async def close(self) -> None:
        """Serve nothing more. Call it after ``run``, before the feedback's round ends."""
        await self._context.withdraw()
        await self._partial_sums.close()
        await self._source.close()

    async def _put_partial_sum(self, chunk: int, data: memoryview) -> None:
        await in_thread(sign_partial_sum, self.signer, self.row, self.as_row_reducer.group, chunk, data)
        await self._partial_sums.put(chunk, data)

    def deliveries(self) -> tuple[Delivery, ...]:
        """Return the delivery rates of the other members in this exchange."""
        return self._context.meters.deliveries(self._members, self._members[self.me], self._plan.round)

    def made(self) -> dict[int, ChunkRanges]:
        """Return the parts that this member has reduced, by index, with the chunks that it made itself."""
        made: dict[int, ChunkRanges] = {}
        for index, part in enumerate(self._plan.parts):
            held = self.store.chunks_of(part) if self.store.has(part) else range(0)
            if chunks := [chunk for chunk in held if self._has_made(chunk)]:
                made[index] = ranges_of(chunks)[:MAX_MADE_RANGES]
        return made

    def _has_made(self, chunk: int) -> bool:
        """Whether we have made a chunk that we hold, as owner or stand-in."""
        made = [one for each in (self.as_owner, *self.as_stand_in) if (one := each.made.get(chunk)) is not None]
        return any(same_bytes(one.result, self.store[chunk]) for one in made)

    def _leave_us_out(self) -> set[int]:
        """Return the owners and row reducers that asked for all that we brought to them, but made a sum without us.

        None if most others did so, too: then it is our link. It proves nothing, as nobody can show what has arrived."""
        store, group, with_us, without_us = self.store, self.store.group, set[int](), set[int]()
        for part in self._plan.parts:
            row_reducers, chunks = self._plan.row_reducers(part), list(store.chunks_of(part))
            collector = row_reducers[self.row] if row_reducers else part.owner
            if collector == self.me or not store.has(part):
                continue
            if collector != part.owner:  # of the other chunks it made no sum: others were to ask for those
                chunks = [one for one in chunks if group.came_reduced(store[one], self.row)]
            if not chunks:
                continue
            if all(group.includes(store[one], self.me) for one in chunks):
                with_us.add(collector)
            elif self._source.asked.issuperset(chunks):
                without_us.add(collector)
        return without_us if len(without_us) <= len(with_us - without_us) else set()

    def _rotated(self) -> list[Part]:
        """Return the parts beginning with our own, so that not everybody asks the same owner first."""
        parts = list(self._plan.parts)
        first = next((i for i, part in enumerate(parts) if part.owner == self.me), self.me % len(parts))
        return parts[first:] + parts[:first]

    async def _bring(self, part: Part) -> None:
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(self._digest_ahead(part))
            if part.owner == self.me:
                await self.as_owner.run(self.store.chunks_of(part), self._row_reducers(part))
            else:
                await self._gather(part)
            ahead.cancel()
        if self.store.has(part):
            await in_thread(self.store.digest, part)

    async def _digest_ahead(self, part: Part) -> None:
        """Digest results while others are still on their way, so that little is left after the last one."""
        store, chunks = self.store, self.store.chunks_of(part)
        at_once = min(_FINISHED_AT_ONCE, _FINISHED_ELEMENTS // store.plan.chunk_elements)
        step = max(1, at_once, len(chunks) // _PIECES)
        for start in range(chunks.start, chunks.stop - step, step):
            for index in range(start, start + step):
                await store.chunk(index)
            await in_thread(store.digest_ahead, part, start + step)

    def _row_reducers(self, part: Part) -> list[int | None]:
        """Return each row's reducer of a part; None for the owner's row, whose members it sums itself."""
        return [None if one == part.owner else one for one in self._plan.row_reducers(part) or (part.owner,)]

    async def _gather(self, part: Part) -> None:
        """Fetch a part's results from our row reducer or the owner, else from the first stand-in that delivers."""
        trouble, responsible = "", {part.owner, *self._plan.row_reducers(part)[self.row : self.row + 1]}
        for holder in holders(self._plan, part, self.me):
            peer = self._members[holder]
            try:
                if holder == self.me:
                    await self._stand_in(part)
                else:
                    wait_s = self._wait_s(part, holder)
                    meter = self._context.meter(holder, self.store.blob)
                    attempt = functools.partial(
                        fetch_part, self._endpoint, self.store, part, peer, wait_s, self.store.put_checked, meter
                    )
                    await self._guard.fetch(part.start, wait_s, self.store.lacks(part), meter, attempt)
                return
            except ShoalError as error:
                log.warning("round %d: %s did not deliver a part: %s", self._plan.round, peer, error)
                if holder in responsible:
                    self._exchange.failed.add(holder)
                if isinstance(error, AboveBound):  # reported even if a stand-in delivers: this is no failing link
                    self._exchange.trouble = f"{peer}: {error}"
                trouble = f"{peer} did not deliver the part of {self._members[part.owner]}: {error}"
        self._exchange.trouble = trouble

    def _wait_s(self, part: Part, holder: int) -> float:
        deadlines = self._context.deadlines
        if not self._plan.columns:
            return deadlines.result_s
        return deadlines.grid_result_s if holder == part.owner else deadlines.row_result_s

    async def _stand_in(self, part: Part) -> None:
        """Adopt results of a failed owner that others agree on, and make the rest anew."""
        log.warning("round %d: standing in for the failed owner %s", self._plan.round, self._members[part.owner])
        others = [one for one in may_hold(self._plan, part) if one not in (self.me, part.owner)]
        await adopt_agreed(self._context, part, others)
        for run in self.store.missing(part):
            without = frozenset((part.owner,))
            reduction = Reduction(self._context, self.store.group, self.store.put, without, self._inclusions)
            self.as_stand_in.append(reduction)
            await reduction.run(run, self._row_reducers(part))
