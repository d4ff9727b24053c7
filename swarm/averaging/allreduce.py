"""The exchange of one round: butterfly all-reduce by pulling, every mean encoded once and decoded by all alike.

Each owner pulls its part from every member and reduces it; every member pulls every other part's results from
their owners, or from stand-ins (reduce-scatter and all-gather, overlapping chunk by chunk). In a grid, an owner does so
within its row, a row reducer does in every other row, and the owner pulls their sums, the row reducers its results.
Nothing is applied here: results are kept until the coordinator's verdict.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CodecError
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_header import ChunkHeader, holders, may_hold
from shoal.swarm.averaging.chunk_streams import ExchangeContext
from shoal.swarm.averaging.contribution import ContributionSource, contribution_blob
from shoal.swarm.averaging.prefetch import Prefetch
from shoal.swarm.averaging.reduction import Reduced, Reduction
from shoal.swarm.averaging.result_fetch import adopt_agreed, fetch_part
from shoal.swarm.averaging.results import ChunkStore, ResultDecoder, ResultStore
from shoal.swarm.averaging.straggler_guard import StragglerGuard
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound, ShoalError
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import Part
from shoal.swarm.protocol.types import Blob, Delivery
from shoal.swarm.transport.node import Endpoint
from shoal.swarm.transport.source import ChunkSource

__all__ = ["AllReduce", "ExchangeResult", "ResultStore"]

log = logging.getLogger(__name__)

_FINISHED_AT_ONCE, _FINISHED_ELEMENTS, _PIECES = 4, 2**22, 16
"""Chunks, at least, if they are no more elements, and how many times of a part, at most: a turn of a worker thread
costs about as much as a small chunk."""


@dataclass
class ExchangeResult:
    """Result of an exchange on one member: ``dropped`` members in what we reduced; owners and row reducers that
    ``failed`` to give us what they had to; ``undelivered`` contributions in what we reduced as owner or row reducer;
    and why a part is missing."""

    dropped: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    undelivered: set[int] = field(default_factory=set)
    trouble: str = ""

    def report(self, store: ResultStore, deliveries: tuple[Delivery, ...]) -> PeerToCoordinatorRoundReport:
        """Makes digests: for a worker thread."""
        return PeerToCoordinatorRoundReport(
            round=store.plan.round,
            digests=tuple(store.digest(part) if store.has(part) else None for part in store.plan.parts),
            # Also what others reduced and left out: whoever made these bytes may not live to tell.
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
        me: str,
        feedback: ErrorFeedback,
        deadlines: Deadlines,
        was_away: Callable[[float], bool] = lambda since_s: False,
        prefetch: Prefetch | None = None,
    ) -> None:
        """``feedback``: in a round that has begun with our contribution, (elements,) float32. ``was_away``: as in
        ``ExchangeContext``. ``prefetch``: one that has begun, with the same chunks; its streams are used on."""
        plan = store.plan
        self.blob = contribution_blob(plan)
        self._endpoint = endpoint
        self._store = store
        self._plan = plan
        self._members = [member.peer for member in plan.members]
        self._me = self._members.index(me)
        self._row = plan.members[self._me].row
        self._feedback = feedback
        self._exchange = ExchangeResult()
        if prefetch is None:
            self._source = ContributionSource(store)
            self._source.begin(feedback)
        else:
            self._source = prefetch.source
        self.decoder = ResultDecoder(store)
        self._partials = ChunkStore(store.chunks, f"the partials of round {plan.round}")
        sources: dict[Blob, ChunkSource] = {self.blob: self._source}
        if plan.columns:
            sources[Blob(kind="partial", number=plan.round)] = self._partials
        self._context = ExchangeContext(endpoint, store, self._me, deadlines, was_away, sources)
        if prefetch is not None:
            taken = prefetch.context
            self._context = replace(self._context, prefetched=taken.prefetched, meters=taken.meters)
        self._as_owner = Reduction(self._context, store.group, store.put, feedback.summands, feedback.error_buffer)
        self._as_row_reducer = Reduction(
            self._context, store.group.row(self._row), self._partials.put, feedback.summands
        )
        self._as_stand_in: list[Reduction] = []
        for part in plan.parts:
            if part.owner == self._me:
                feedback.reserve(part.start, part.stop)
        self._guard = StragglerGuard(self._context, lambda: [part.start for part in plan.parts if not store.has(part)])

    async def run(self) -> ExchangeResult:
        """Run the exchange until every part has arrived or is given up; results are in the store."""
        self._context.publish()
        self._context.share_uplink()
        async with asyncio.TaskGroup() as background:
            guard = background.create_task(self._guard.watch())
            async with asyncio.TaskGroup() as tasks:
                for part in self._rotated():
                    tasks.create_task(self._bring(part))
                    if part.owner != self._me and self._me in self._plan.row_reducers(part):
                        tasks.create_task(self._as_row_reducer.run(self._store.chunks_of(part)))
            guard.cancel()
        for reduction in (self._as_owner, *self._as_stand_in):
            self._exchange.dropped |= reduction.dropped
            self._exchange.failed |= reduction.failed - {self._me}
        self._exchange.undelivered = self._as_owner.dropped | self._as_row_reducer.dropped
        return self._exchange

    async def close(self) -> None:
        """After ``run`` and before the feedback is settled, committed or discarded: hand out no contribution more."""
        await self._context.withdraw()
        await self._partials.close()
        await self._source.close()

    def deliveries(self) -> tuple[Delivery, ...]:
        """Return how fast other members deliver, as measured in this exchange."""
        return self._context.meters.deliveries(self._members, self._members[self._me], self._plan.round)

    def settle(self, *, keep: bool) -> None:
        """After ``decoder.finish`` of a committed verdict: what the mean left out of ours is the next round's.

        Unless not to ``keep``, because others have our samples by now: then only the residual of before stays. Runs in
        a worker thread. What an owner reduced itself went in as it was; so did what a row reducer did, where its
        partial was used; what a stand-in did, and everything else, as it was encoded. What the plan's factor cuts of
        ours is not carried on, nor of what encoding lost. The error of encoding a mean, or a partial, is carried by
        whoever made the bytes that were committed, or are in them: whole, as the next round's factor is its own.
        """
        leave_out = self._feedback.keep_chunk if keep else self._feedback.withdraw_chunk
        for index in range(self._store.chunks):
            bounds, header = self._store.bounds(index), self._store.header(index)
            if self._me not in header.included:
                leave_out(*bounds)
                continue
            partial, result = self._used_partial(index, header), self._committed(index, header)
            if result is not None and result is self._as_owner.made.get(index):
                self._keep_written(bounds, result)
                continue
            if partial is not None:
                self._carry(bounds, partial, exactly=True)
            else:
                self._feedback.include_encoded(*bounds, self._store.norm_bounds.factors[self._me])
            if result is not None:
                self._carry(bounds, result)

    def _rotated(self) -> list[Part]:
        """Return the parts beginning with our own, so that not everybody asks the same owner first."""
        parts = list(self._plan.parts)
        first = next((i for i, part in enumerate(parts) if part.owner >= self._me), 0)
        return parts[first:] + parts[:first]

    async def _bring(self, part: Part) -> None:
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(self._work_ahead(part))
            await (self._own(part) if part.owner == self._me else self._gather(part))
            ahead.cancel()
        if self._store.has(part):
            await in_thread(self._finish, part)

    async def _work_ahead(self, part: Part) -> None:
        """Digest and decode results while others are still on their way: with the last one little is left to do."""
        store, chunks = self._store, self._store.chunks_of(part)
        at_once = min(_FINISHED_AT_ONCE, _FINISHED_ELEMENTS // store.plan.chunk_elements)
        step = max(1, at_once, len(chunks) // _PIECES)
        for start in range(chunks.start, chunks.stop - step, step):
            for index in range(start, start + step):
                await store.chunk(index)
            await in_thread(self._finish_piece, part, range(start, start + step))

    def _finish_piece(self, part: Part, chunks: range) -> None:
        self._store.digest_ahead(part, chunks.stop)
        self.decoder.decode(chunks)

    def _finish(self, part: Part) -> None:
        self._store.digest(part)
        self.decoder.decode(self._store.chunks_of(part))

    async def _own(self, part: Part) -> None:
        await self._as_owner.run(self._store.chunks_of(part), self._row_reducers(part))

    def _row_reducers(self, part: Part) -> list[int | None]:
        """Whose partials its reduction takes: every row's but the owner's, which has none."""
        row_reducers = self._plan.row_reducers(part) or (part.owner,)
        return [None if row_reducer == part.owner else row_reducer for row_reducer in row_reducers]

    async def _gather(self, part: Part) -> None:
        """The part's results from our row reducer or its owner, else from the first stand-in that has or makes
        them."""
        trouble, responsible = "", {part.owner, *self._plan.row_reducers(part)[self._row : self._row + 1]}
        for holder in holders(self._plan, part, self._me):
            peer = self._members[holder]
            try:
                if holder == self._me:
                    await self._stand_in(part)
                else:
                    wait_s = self._wait_s(part, holder)
                    meter = self._context.meter(holder, self._store.blob)
                    attempt = functools.partial(
                        fetch_part, self._endpoint, self._store, part, peer, wait_s, self._store.put_checked, meter
                    )
                    await self._guard.fetch(part.start, wait_s, self._store.lacks(part), meter, attempt)
                return
            except ShoalError as error:
                log.warning("round %d: no result from %s: %s", self._plan.round, peer, error)
                if holder in responsible:
                    self._exchange.failed.add(holder)
                if isinstance(error, AboveBound):  # said also where a stand-in helps: no failure of a link is like it
                    self._exchange.trouble = f"{peer}: {error}"
                trouble = f"{peer} did not deliver the part of {self._members[part.owner]}: {error}"
        self._exchange.trouble = trouble

    def _wait_s(self, part: Part, holder: int) -> float:
        deadlines = self._context.deadlines
        if not self._plan.columns:
            return deadlines.result_s
        return deadlines.grid_result_s if holder == part.owner else deadlines.row_result_s

    async def _stand_in(self, part: Part) -> None:
        """Adopt what others agree on of a failed owner's results, and make the rest anew."""
        log.warning("round %d: standing in for %s", self._plan.round, self._members[part.owner])
        others = [one for one in may_hold(self._plan, part) if one not in (self._me, part.owner)]
        await adopt_agreed(self._context, part, others)
        for run in self._store.missing(part):
            without = frozenset((part.owner,))
            reduction = Reduction(self._context, self._store.group, self._store.put, without=without)
            self._as_stand_in.append(reduction)
            await reduction.run(run, self._row_reducers(part))

    def _used_partial(self, index: int, header: ChunkHeader) -> Reduced | None:
        """Our row's partial of a chunk, if it went into the mean."""
        made = self._as_row_reducer.made.get(index)
        return made if made is not None and made.error is not None and self._row in header.reduced_rows else None

    def _committed(self, index: int, header: ChunkHeader) -> Reduced | None:
        """The mean of a chunk, if the bytes that count are ours, and their error is ours to carry.

        Of several stand-ins that made the same bytes only the first is to carry it. One before us that is in them gave
        us its contribution after it had not given us its results, so it has been making them itself: it does."""
        for reduction in (self._as_owner, *self._as_stand_in):
            made = reduction.made.get(index)
            if made is not None and made.error is not None and same_bytes(made.result, self._store[index]):
                first = reduction is self._as_owner or set(self._before_us(index)).isdisjoint(header.included)
                return made if first else None
        return None

    def _before_us(self, index: int) -> tuple[int, ...]:
        """The stand-ins before us of the part with this chunk."""
        part = next(part for part in self._plan.parts if index in self._store.chunks_of(part))
        return part.stand_ins[: part.stand_ins.index(self._me)]

    def _keep_written(self, bounds: tuple[int, int], made: Reduced) -> None:
        """Take on the error of a mean of our own part, which is in our residual's memory since it was made."""
        assert made.error is not None, "a mean without an error has nobody in it"
        with suppress(CodecError):  # it would not be finite
            self._feedback.include_with_written_error(*bounds, made.error.largest)

    def _carry(self, bounds: tuple[int, int], made: Reduced, *, exactly: bool = False) -> None:
        """Take on the error of a mean: only our share of what we add reaches it, so that many times over. ``exactly``:
        what we brought to it went in as it was, so nothing else is pending."""
        assert made.error is not None, "a mean without an error has nobody in it"
        group = self._store.group
        share = group.weight(made.included) / group.weights[self._me]
        with suppress(CodecError):  # it would not be finite
            if exactly:
                self._feedback.include_exactly(*bounds, made.error, share)
            else:
                self._feedback.add_owner_error(bounds[0], made.error, share)
