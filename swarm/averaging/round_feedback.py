"""Error feedback of one member across rounds: begun with its offer, settled by the verdict, carried to the next round.

``ErrorFeedback`` computes the residual; this module alone decides when its rounds begin and end, and what each verdict
leaves of a contribution.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CodecError
from shoal.compression.norms import norms_of_reader
from shoal.compression.range_reader import RangeReader
from shoal.compression.scratch import zeros
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.norm_claims import claim_of, ranges
from shoal.swarm.averaging.outcome import CarriedResidual, RoundOffer
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.secure_exchange import SecureExchange, settle_secure
from shoal.swarm.protocol.run_file import AveragingSection


@dataclass(frozen=True)
class LateContribution:
    """Contribution whose round was committed without it; it is in the residual. Its samples are leased to us for as
    long as ``joins`` is the number of our current membership."""

    weight_tokens: int
    joins: int


class RoundFeedback:
    """Residual of one member, and whether a contribution is in it that came too late for its round.

    ``late``: work that does not count as done yet, so the residual is dropped with it if others get its samples."""

    def __init__(self, elements: int, averaging: AveragingSection, *, is_gathering: bool = False) -> None:
        """``is_gathering``: contributions are gathered, so that nothing is ever carried."""
        self._elements = elements
        self._is_gathering = is_gathering
        self._ranges = ranges(elements)
        self._weight_tokens = 0
        self._measuring: asyncio.Future[list[float]] | None = None
        self._brought: RangeReader | None = None
        self._largest = 0.0
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[averaging.residual_precision]
        self.error_feedback = ErrorFeedback(elements, averaging.residual_decay, dtype)
        self.late: LateContribution | None = None

    @property
    def carried(self) -> CarriedResidual:
        """The residual after the last verdict. It is our own memory: copy it before the next round.

        Nothing within a round, which replaces it in place, and nothing with a late contribution in it: whoever restores
        it joins anew, and others have its samples then."""
        if self.error_feedback.in_round or self.late is not None:
            return CarriedResidual(zeros(self._elements), 0)
        return CarriedResidual(self.error_feedback.residual, self._weight_tokens)

    def restore(self, fill: Callable[[Tensor], int | None]) -> bool:
        """Continue from a saved residual, which ``fill`` writes into the residual's memory, (n,) float32.

        ``fill`` returns the weight in tokens that it counts with, or None where there is none that fits; returns
        whether there was. Raises ``CodecError`` when it is not finite, and what ``fill`` raises."""
        weight_tokens = self.error_feedback.load(fill)
        if weight_tokens is not None:
            self._weight_tokens = weight_tokens
        return weight_tokens is not None

    def forget(self) -> None:
        """Drop the residual, and the round: others repeat the work that it stems from, or it is not usable."""
        self.error_feedback.reset()
        self._weight_tokens, self.late = 0, None

    async def begin(self, offer: RoundOffer, joins: int) -> bytes:
        """Begin a round with the mean of contribution and late contribution, if any, weighted by their tokens.

        Returns the claim of what we bring. Raises ``CodecError`` when the contribution is infinite or not a number, or
        is so together with the residual, which is dropped then."""
        if self._measuring is not None:  # it reads the residual, which beginning may scale
            await asyncio.wait([self._measuring])
            self._measuring = None
        return await in_thread(self._begin_measured, offer, joins)

    async def discard(self) -> None:
        """End the round, if there is one, as if it had not begun; nobody may encode any more."""
        if self.error_feedback.in_round:
            await in_thread(self.error_feedback.discard)

    async def close(self) -> None:
        """Discard the round if it has no verdict, and read the contribution no more."""
        await self.discard()
        self._brought = None

    def measure(self) -> None:
        """Begin to compute the residual's norms, which the next claim needs: now rather than when that round ends."""
        loop = asyncio.get_running_loop()
        self._measuring = loop.run_in_executor(None, self.error_feedback.residual_norms, self._ranges)

    def end(
        self, offer: RoundOffer, exchange: AllReduce | SecureExchange | None, joins: int, *, planned: bool, ours: bool
    ) -> None:
        """End a committed round: what the mean lacks of our contribution stays for the next one. For a worker thread.

        ``planned``: the plan has this offer in it; ``ours``: its samples are still leased to us, by ``joins``. If they
        are not, others train on them again. ``exchange``: None if there was no plan for us; one that has not run if the
        verdict came first, as others may have fetched some chunks ahead."""
        feedback = self.error_feedback
        if self._is_gathering:  # there is no mean that a later one could make up for
            self.forget()
            return
        if not planned:
            feedback.discard()
        if offer.weight_tokens and ours and not feedback.in_round:
            self._begin(offer.weight_tokens)
        if planned:
            if feedback.in_round:
                assert exchange is not None
                if isinstance(exchange, SecureExchange):
                    settle_secure(exchange, keep=ours)
                else:
                    settle(exchange, keep=ours)
            if self.late is not None and not ours:
                self.forget()
            self.late = None
        elif feedback.in_round:
            feedback.commit()  # nothing of it was encoded, so all of it is carried over
            self.late = LateContribution(offer.weight_tokens, joins)

    def _begin_measured(self, offer: RoundOffer, joins: int) -> bytes:
        late, share = self.late, 0.0
        if late is not None and late.joins == joins and late.weight_tokens <= offer.weight_tokens:
            share = late.weight_tokens / offer.weight_tokens
        elif late is not None:
            self.forget()
        self._brought = _Scaled(offer.contribution, 1.0 - share) if share else offer.contribution
        norms = norms_of_reader(self._brought, self._ranges)
        self._largest = math.hypot(*norms)
        if not math.isfinite(self._largest):
            raise CodecError("the local work had become infinite or not a number")
        self._begin(offer.weight_tokens)
        return claim_of(norms, self.error_feedback.residual_norms(self._ranges))

    def _begin(self, weight_tokens: int) -> None:
        """Begin the residual's round.

        A residual makes up for what a mean lacked, so it keeps the weight that it had there."""
        assert self._brought is not None
        try:
            if self._weight_tokens not in (0, weight_tokens):
                self.error_feedback.scale(self._weight_tokens / weight_tokens)
            self._weight_tokens = weight_tokens
            self.error_feedback.begin(self._brought, self._largest)
        except CodecError:
            self.forget()
            raise


class _Scaled:
    """Reader of another reader's values times a factor."""

    def __init__(self, reader: RangeReader, factor: float) -> None:
        self._reader = reader
        self._factor = factor

    @property
    def elements(self) -> int:
        return self._reader.elements

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self._reader.read(start, stop, out)
        out.mul_(self._factor)


def settle(exchange: AllReduce, *, keep: bool) -> None:
    """Record what the committed means lack of our contribution, chunk by chunk, and commit the residual.

    For a worker thread, after ``ResultStore.find_undecodable``. What a chunk's mean leaves out stays for the next
    round; without ``keep`` only the residual from before does, because others have our samples by now. Our own values
    went in as encoded everywhere. The part that the plan's factor cuts off is not carried, neither of the contribution
    nor of what encoding lost. The loss of encoding a mean, or a partial sum, is carried by the member that made the
    committed bytes: whole, as the next round has a factor of its own. Nobody carries that of a robust mean: with
    the weight of all members on one contribution it would look like an attack, and be left out. What such a mean clips
    or trims is not carried either.
    """
    store, feedback, me = exchange.store, exchange.feedback, exchange.me
    leave_out = feedback.keep_chunk if keep else feedback.withdraw_chunk
    for index in range(store.chunks):
        bounds, header = store.bounds(index), store.header(index)
        leaves = [store.leaf_grid.bounds(leaf) for leaf in store.leaf_grid.within(*bounds)]
        if me not in header.included:
            for leaf in leaves:
                leave_out(*leaf)
            continue
        for leaf in leaves:
            feedback.include_chunk(*leaf, store.norm_bounds.factors[me])
        if store.plan.mean != "weighted":
            continue
        for made in (_used_partial_sum(exchange, index, header), _committed(exchange, index, header)):
            if made is not None:
                _carry(exchange, bounds[0], made)
    feedback.commit()


def _used_partial_sum(exchange: AllReduce, index: int, header: ChunkHeader) -> ReducedChunk | None:
    """Return our row's partial sum of a chunk if it went into the mean."""
    made = exchange.as_row_reducer.made.get(index)
    return made if made is not None and made.loss is not None and exchange.row in header.reduced_rows else None


def _committed(exchange: AllReduce, index: int, header: ChunkHeader) -> ReducedChunk | None:
    """Return the mean of a chunk if the committed bytes are ours and we are the one to carry their loss.

    Several stand-ins may have made the same bytes; the first of them carries the loss. A stand-in before us that is in
    the bytes gave us its contribution although it had not given us results, so it was making them itself."""
    store = exchange.store
    for reduction in (exchange.as_owner, *exchange.as_stand_in):
        made = reduction.made.get(index)
        if made is not None and made.loss is not None and same_bytes(made.result, store[index]):
            if reduction is exchange.as_owner:
                return made
            part = next(part for part in store.plan.parts if index in store.chunks_of(part))
            earlier = part.stand_ins[: part.stand_ins.index(exchange.me)]
            return made if set(earlier).isdisjoint(header.included) else None
    return None


def _carry(exchange: AllReduce, start: int, made: ReducedChunk) -> None:
    """Carry the loss of a mean. Only our share of what we add next reaches a mean, so it is divided by that share: by
    the one that counts whole, as that of an owner does later."""
    assert made.loss is not None, "a mean without a loss has nobody in it"
    members = exchange.store.plan.members
    tokens = sum(members[one].weight_tokens for one in made.included)
    with suppress(CodecError):  # the sum would not be finite
        exchange.feedback.add_mean_loss(start, made.loss, tokens / members[exchange.me].weight_tokens)
