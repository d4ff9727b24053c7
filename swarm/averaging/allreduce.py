"""The exchange of one round: butterfly all-reduce by pulling, every mean encoded once and decoded by all alike.

Each owner pulls its part from every member and reduces it; every member pulls every other part's results from
their owners, or from stand-ins (reduce-scatter and all-gather, overlapping chunk by chunk). Nothing is applied here:
results are kept until the coordinator's verdict.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.compression.codec import CodecError
from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.averaging.reducing import Reduction, Seat
from shoal.swarm.averaging.results import ResultStore, adopt_part, fetch_part
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import BlobUnavailable, ShoalError
from shoal.swarm.links import in_thread
from shoal.swarm.messages import Blob, Part
from shoal.swarm.transport import Endpoint

__all__ = ["AllReduce", "Exchange", "ResultStore"]

log = logging.getLogger(__name__)


class _ContributionSource:
    """Our contribution, encoded when the first owner asks for a chunk and kept until ``close``."""

    def __init__(self, store: ResultStore, feedback: ErrorFeedback) -> None:
        self.chunks = store.chunks
        self._store = store
        self._feedback = feedback
        self._encoded: dict[int, memoryview] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closed = False

    async def chunk(self, index: int) -> memoryview:
        """Raises ``BlobUnavailable`` once closed: streams outlive the round."""
        async with self._locks.setdefault(index, asyncio.Lock()):
            if self._closed:
                raise BlobUnavailable(f"round {self._store.plan.round} is over")
            if index not in self._encoded:
                bounds = self._store.bounds(index)
                codec = self._store.coding.contribution(*bounds)
                packed = await in_thread(self._feedback.encode_chunk, codec, *bounds)
                self._encoded[index] = packed.numpy().data
            return self._encoded[index]

    async def close(self) -> None:
        """Returns when nothing is being encoded any more."""
        self._closed = True
        for lock in list(self._locks.values()):
            async with lock:
                pass
        self._encoded.clear()


@dataclass
class Exchange:
    """How the exchange went on this member: ``dropped`` members in what we reduced, owners that ``failed`` to give us
    their part, and why a part is missing."""

    dropped: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    trouble: str = ""


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
    ) -> None:
        """``feedback``: in a round that has begun with our contribution, (elements,) float32. ``was_away``: as in
        ``Seat``."""
        self._endpoint = endpoint
        self._store = store
        self._plan = store.plan
        self._members = [member.peer for member in store.plan.members]
        self._me = self._members.index(me)
        self._feedback = feedback
        self._seat = Seat(endpoint, store, self._me, deadlines, was_away)
        self._exchange = Exchange()
        self._source = _ContributionSource(store, feedback)
        self._as_owner = Reduction(self._seat, feedback.corrected)
        self._as_stand_in: list[Reduction] = []

    @property
    def blob(self) -> Blob:
        return self._seat.contribution

    async def run(self) -> Exchange:
        """Returns when every part has arrived or is given up; results are in the store."""
        self._endpoint.publish(self.blob, self._source)
        async with asyncio.TaskGroup() as tasks:
            for part in self._rotated():
                tasks.create_task(self._own(part) if part.owner == self._me else self._gather(part))
        for reduction in (self._as_owner, *self._as_stand_in):
            self._exchange.dropped |= reduction.dropped
        return self._exchange

    async def close(self) -> None:
        """After ``run`` and before the feedback is settled, committed or discarded: hand out no contribution more."""
        self._endpoint.retract(self.blob)
        await self._source.close()

    def settle(self, *, keep: bool) -> None:
        """After ``store.mean`` of a committed verdict: what the mean left out of ours is the next round's.

        Unless not to ``keep``, because others have our samples by now: then only the residual of before stays. Runs in
        a worker thread. What an owner reduced itself went in as it was; what a stand-in did, as it was encoded; the
        error of encoding a mean is carried by whoever made the bytes that were committed.
        """
        leave_out = self._feedback.keep_chunk if keep else self._feedback.take_back
        for index in range(self._store.chunks):
            start, stop = self._store.bounds(index)
            if self._me not in self._store.included(index):
                leave_out(start, stop)
                continue
            for reduction in (self._as_owner, *self._as_stand_in):
                made = reduction.made.get(index)
                if made is None or made.error is None or made.result != self._store[index]:
                    continue
                if reduction is self._as_owner:
                    self._feedback.include_exactly(start, stop)
                # Only 1/share of what we add reaches the mean, so the error is added that many times over.
                weights = [member.weight_tokens for member in self._plan.members]
                share = sum(weights[member] for member in made.included) / weights[self._me]
                with suppress(CodecError):  # it would not be finite
                    self._feedback.add_owner_error(start, made.error.mul_(share))
                break

    def _rotated(self) -> list[Part]:
        """Parts beginning with our own: so that not everybody asks the same owner first."""
        parts = list(self._plan.parts)
        first = next((i for i, part in enumerate(parts) if part.owner >= self._me), 0)
        return parts[first:] + parts[:first]

    async def _own(self, part: Part) -> None:
        await self._as_owner.run(self._store.chunks_of(part))

    async def _gather(self, part: Part) -> None:
        """The part's results from its owner, else from the first stand-in that has or makes them."""
        wait_s = self._seat.deadlines.result_s
        for holder in (part.owner, *part.stand_ins):
            peer = self._members[holder]
            try:
                if holder == self._me:
                    await self._stand_in(part)
                else:
                    fetch = functools.partial(fetch_part, self._endpoint, self._store, part, peer, wait_s)
                    await self._seat.patiently(fetch)
                return
            except ShoalError as error:
                log.warning("round %d: no result from %s: %s", self._plan.round, peer, error)
                if holder == part.owner:
                    self._exchange.failed.add(holder)
                self._exchange.trouble = f"{peer} did not deliver the part of {self._members[part.owner]}: {error}"

    async def _stand_in(self, part: Part) -> None:
        """Adopt what others have of a failed owner's results, and make the rest anew."""
        log.warning("round %d: standing in for %s", self._plan.round, self._members[part.owner])
        for member, peer in enumerate(self._members):
            if member not in (self._me, part.owner) and not self._store.has(part):
                with suppress(ShoalError):
                    await adopt_part(self._endpoint, self._store, part, peer, self._seat.deadlines.adopt_s)
        for run in self._store.missing(part):
            encoded = {index: await self._source.chunk(index) for index in run}
            reduction = Reduction(self._seat, self._decoded(encoded), frozenset((part.owner,)))
            self._as_stand_in.append(reduction)
            await reduction.run(run)
        self._exchange.trouble = ""

    def _decoded(self, encoded: dict[int, memoryview]) -> Callable[[int, int], Tensor]:
        """Our own values as any owner would have got them."""

        def own(start: int, stop: int) -> Tensor:
            codec = self._store.coding.contribution(start, stop)
            packed = encoded[start // self._plan.chunk_elements]
            return codec.decode(packed, stop - start, torch.empty(stop - start))

        return own
