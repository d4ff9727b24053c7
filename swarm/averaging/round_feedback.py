"""Error feedback of one member across rounds: begun with its offer, settled by the verdict, carried to the next round.

``ErrorFeedback`` computes the residual; this module alone decides when its rounds begin and end, and what each verdict
leaves of a contribution.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CodecError
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.norm_claims import claim_of, ranges
from shoal.swarm.averaging.outcome import CarriedResidual, RoundOffer
from shoal.swarm.averaging.reduction import ReducedChunk


@dataclass(frozen=True)
class LateContribution:
    """Contribution whose round was committed without it. Its samples are leased to us for as long as ``joins`` is the
    number of our current membership."""

    contribution: Tensor
    norms: Sequence[float]
    weight_tokens: int
    joins: int


class RoundFeedback:
    """Residual of one member, and its contribution that came too late for its round, if any."""

    def __init__(self, elements: int, decay: float) -> None:
        self._elements = elements
        self._decay = decay
        self._ranges = ranges(elements)
        self._weight_tokens = 0
        self._measuring: asyncio.Future[list[float]] | None = None
        self.error_feedback = ErrorFeedback(elements, decay)
        self.late: LateContribution | None = None

    @property
    def carried(self) -> CarriedResidual:
        """The residual after the last verdict, outside of rounds. It is our own memory: copy it before the next
        round."""
        return CarriedResidual(self.error_feedback.residual, self._weight_tokens)

    def restore(self, carried: CarriedResidual) -> None:
        """Continue from a saved residual. Raises ``CodecError`` when it is not finite."""
        assert carried.residual.numel() == self._elements
        self.error_feedback.load(carried.residual)
        self._weight_tokens = carried.weight_tokens

    def forget(self) -> None:
        """Drop the residual, outside of rounds: others repeat the work that it stems from, or it is not usable."""
        self.error_feedback, self._weight_tokens = ErrorFeedback(self._elements, self._decay), 0

    async def begin(self, offer: RoundOffer, joins: int) -> tuple[RoundOffer, bytes]:
        """Begin a round. Returns the offer with the late contribution in it, as the mean of both weighted by their
        tokens, and the claim of what we bring.

        Raises ``CodecError`` when contribution and residual add up to infinity; the residual is dropped then."""
        if self._measuring is not None:  # it reads the residual, which beginning may scale
            await asyncio.wait([self._measuring])
            self._measuring = None
        return await in_thread(self._begin_with_late, offer, joins)

    async def resume(self, offer: RoundOffer) -> None:
        """Begin the round again after ``discard``, with the offer that ``begin`` returned."""
        await in_thread(self._begin, offer)

    def discard(self) -> None:
        """End the round as if it had not begun."""
        self.error_feedback.discard()

    def measure(self) -> None:
        """Begin to compute the residual's norms, which the next claim needs: now rather than when that round ends."""
        loop = asyncio.get_running_loop()
        self._measuring = loop.run_in_executor(None, self.error_feedback.residual_norms, self._ranges)

    def end(self, offer: RoundOffer, exchange: AllReduce | None, joins: int, *, planned: bool, ours: bool) -> None:
        """End a committed round: what the mean lacks of our contribution stays for the next one. For a worker thread.

        ``planned``: the plan has this offer in it; ``ours``: its samples are still leased to us, by ``joins``. If they
        are not, others train on them again. ``exchange``: None if there was no plan for us; one that has not run if the
        verdict came first, as others may have fetched some chunks ahead."""
        if not planned:
            self.discard()
        elif ours and not self.error_feedback.in_round:
            self._begin(offer)
        if exchange is not None and self.error_feedback.in_round:
            settle(exchange, keep=ours)
        if planned:
            self.late = None
        elif offer.weight_tokens and ours:
            self.late = LateContribution(offer.contribution, offer.norms, offer.weight_tokens, joins)

    def _begin_with_late(self, offer: RoundOffer, joins: int) -> tuple[RoundOffer, bytes]:
        late = self.late
        if late is not None and late.joins == joins and late.weight_tokens <= offer.weight_tokens:
            share = late.weight_tokens / offer.weight_tokens
            both = offer.contribution.mul_(1.0 - share).add_(late.contribution, alpha=share)
            norms = [(1.0 - share) * one + share * other for one, other in zip(offer.norms, late.norms, strict=True)]
            offer = replace(offer, contribution=both, norms=norms)
        self._begin(offer)
        return offer, claim_of(offer.norms, self.error_feedback.residual_norms(self._ranges))

    def _begin(self, offer: RoundOffer) -> None:
        """Begin the residual's round.

        A residual makes up for what a mean lacked, so it keeps the weight that it had there."""
        weight, largest = offer.weight_tokens, math.hypot(*offer.norms)
        try:
            if self._weight_tokens not in (0, weight):
                self.error_feedback.scale(self._weight_tokens / weight)
            self._weight_tokens = weight
            self.error_feedback.begin(offer.contribution, largest)
        except CodecError:
            self.forget()
            raise


def settle(exchange: AllReduce, *, keep: bool) -> None:
    """Record what the committed means lack of our contribution, chunk by chunk, and commit the residual.

    For a worker thread, after the results have been decoded. What a chunk's mean leaves out is pending for the next
    round; without ``keep`` only the residual from before is, because others have our samples by now. Chunks that we
    reduced ourselves as owner went in exactly; so did those that we reduced as row reducer, if our partial sum was
    used; all others went in as encoded. The part that the plan's factor cuts off is not carried, neither of the
    contribution nor of what encoding lost. The loss of encoding a mean, or a partial sum, is carried by the member that
    made the committed bytes: whole, as the next round has a factor of its own.
    """
    store, feedback, me = exchange.store, exchange.feedback, exchange.me
    leave_out = feedback.keep_chunk if keep else feedback.withdraw_chunk
    for index in range(store.chunks):
        bounds, header = store.bounds(index), store.header(index)
        if me not in header.included:
            leave_out(*bounds)
            continue
        partial_sum, result = _used_partial_sum(exchange, index, header), _committed(exchange, index, header)
        if result is not None and result is exchange.as_owner.made.get(index):
            assert result.error is not None, "a mean without an error has nobody in it"
            with suppress(CodecError):  # the loss would not be finite
                feedback.include_with_written_error(*bounds, result.error.largest)
            continue
        if partial_sum is not None:
            _carry(exchange, bounds, partial_sum, exactly=True)
        else:
            feedback.include_encoded(*bounds, store.norm_bounds.factors[me])
        if result is not None:
            _carry(exchange, bounds, result)
    feedback.commit()


def _used_partial_sum(exchange: AllReduce, index: int, header: ChunkHeader) -> ReducedChunk | None:
    """Return our row's partial sum of a chunk if it went into the mean."""
    made = exchange.as_row_reducer.made.get(index)
    return made if made is not None and made.error is not None and exchange.row in header.reduced_rows else None


def _committed(exchange: AllReduce, index: int, header: ChunkHeader) -> ReducedChunk | None:
    """Return the mean of a chunk if the committed bytes are ours and we are the one to carry their error.

    Several stand-ins may have made the same bytes; the first of them carries the error. A stand-in before us that is in
    the bytes gave us its contribution although it had not given us results, so it was making them itself."""
    store = exchange.store
    for reduction in (exchange.as_owner, *exchange.as_stand_in):
        made = reduction.made.get(index)
        if made is not None and made.error is not None and same_bytes(made.result, store[index]):
            if reduction is exchange.as_owner:
                return made
            part = next(part for part in store.plan.parts if index in store.chunks_of(part))
            earlier = part.stand_ins[: part.stand_ins.index(exchange.me)]
            return made if set(earlier).isdisjoint(header.included) else None
    return None


def _carry(exchange: AllReduce, bounds: tuple[int, int], made: ReducedChunk, *, exactly: bool = False) -> None:
    """Carry the error of a mean. Only our share of what we add next reaches a mean, so it is divided by that share.

    ``exactly``: our own values went into it as they were, so nothing else is pending."""
    assert made.error is not None, "a mean without an error has nobody in it"
    group = exchange.store.group
    times = group.weight(made.included) / group.weights[exchange.me]
    with suppress(CodecError):  # the error would not be finite
        if exactly:
            exchange.feedback.include_exactly(*bounds, made.error, times)
        else:
            exchange.feedback.add_owner_error(bounds[0], made.error, times)
