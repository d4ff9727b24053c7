"""One member's way through the end of a round: ready, exchange, report, verdict; level-triggered on the view.

Whatever was announced while this member looked away, the view tells it where the round is now, so a coordinator
that restarts, or a push that was lost, changes nothing but the time it takes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CodecError
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.chunk_header import may_hold
from shoal.swarm.averaging.norm_claims import claim_of, ranges
from shoal.swarm.averaging.outcome import Aborted, CarriedResidual, Committed, Outcome, Resync, RoundOffer
from shoal.swarm.averaging.prefetch import Prefetch, PrefetchManager
from shoal.swarm.averaging.result_fetch import ensure_part
from shoal.swarm.averaging.results import Archive, PublishedResults, ResultDecoder, ResultStore
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, NotAdmitted, StaleWork
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan, RunView, Verdict
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Late:
    """A contribution whose round was committed without it; its samples are still ours while ``joins`` is current."""

    contribution: Tensor
    norms: Sequence[float]
    weight_tokens: int
    joins: int


class Averager:
    """Carries the residual, what came too late, and the recent results from round to round.

    ``archive``: where those of committed rounds go, if anywhere."""

    def __init__(
        self,
        client: CoordinatorClient,
        endpoint: Endpoint,
        codec_map: CodecMap,
        elements: int,
        archive: Archive | None = None,
    ) -> None:
        self._decay = client.run_file.averaging.residual_decay
        self.feedback = ErrorFeedback(elements, self._decay)
        self.activity = ""
        self.on_exchange: Callable[[bool], object] = bool
        """Told when an exchange begins here and when it has ended: what else uses the link can wait."""
        self._client = client
        self._endpoint = endpoint
        self._codec_map = codec_map
        self._buffers = RoundBuffers()
        self._elements = elements
        self._archive = archive
        self._residual_weight = 0
        self._late: _Late | None = None
        self._stores = PublishedResults(self._endpoint, archive)
        self._exchange: AllReduce | None = None
        self.prefetch_manager = PrefetchManager(client, self._endpoint, codec_map, self._buffers)
        """To be run beside everything else: rounds are begun with before ``average`` is called for them."""
        self._prefetch: Prefetch | None = None
        self._is_offered = False
        self._joins = 0
        self._claim = b""
        self._ranges = ranges(elements)
        self._measuring: asyncio.Future[list[float]] | None = None

    @property
    def carried(self) -> CarriedResidual:
        """What belongs to the state that the last verdict made; not while ``average`` runs. The residual is our own
        memory: copy it before the next round."""
        return CarriedResidual(self.feedback.residual, self._residual_weight)

    def restore(self, carried: CarriedResidual) -> None:
        """Go on from what was saved. Raises ``CodecError`` when that is not finite."""
        assert carried.residual.numel() == self._elements
        self.feedback.load(carried.residual)
        self._residual_weight = carried.weight_tokens

    @property
    def chunks_moved(self) -> int:
        """Result chunks made or received so far: what the heartbeat shows as progress."""
        return self._stores.moved

    async def average(self, offer: RoundOffer) -> Outcome:
        """Take part in the round's end, or at least in its outcome; returns when the verdict is known."""
        self._joins, self._is_offered, self._claim = self._client.joins, False, b""
        self._prefetch = self.prefetch_manager.take(offer.round)
        try:
            async with task_scope() as tasks:
                outcome = await self._until_verdict(offer, tasks)
        except (StaleWork, NotAdmitted, CodecError) as error:
            outcome = Resync(str(error), is_unusable=isinstance(error, CodecError))
        finally:
            await self._end_exchange()
            self.prefetch_manager.release()
            self.feedback.discard()
            self._buffers.trim()
            self.activity = ""
        if isinstance(outcome, Resync):
            self._late = None
            if self._is_offered:  # some of the residual may be in a mean by now: it must not come twice
                self.forget_residual()
        return outcome

    def forget_residual(self) -> None:
        """What earlier rounds left is of work that others do again, or is spoilt. Not while ``average`` runs."""
        self.feedback, self._residual_weight = ErrorFeedback(self._elements, self._decay), 0

    async def _until_verdict(self, offer: RoundOffer, tasks: asyncio.TaskGroup) -> Outcome:
        client, number = self._client, offer.round
        if offer.weight_tokens:
            await self._residual_measured()
            offer = await in_thread(self._begin_with_late, offer)
            self._begin_ahead(offer)
        ready = PeerToCoordinatorRoundReady(
            round=number,
            anchor_version=offer.anchor_version,
            state_digest=offer.state_digest,
            weight_tokens=offer.weight_tokens,
            ranges=offer.ranges,
            loss=offer.loss,
            norms=self._claim,
        )
        report: PeerToCoordinatorRoundReport | None = None
        reported: tuple[int, int] | None = None
        while (view := client.view).round <= number:
            if view.plan is None:
                self.activity = "ready"
                view = await client.ask_view(ready)
                if view.round == number and view.plan is None:
                    if view.phase in ("training", "waiting"):
                        return Aborted("the round was reopened: samples of its batch had been lost")
                    await self._wait(number)
            elif report is None:
                report = await self._take_part(view, view.plan, offer, tasks)
            elif reported != (view.epoch, client.joins):
                # Once to each coordinator and membership: a report counts as progress and delays the verdict.
                reported = (view.epoch, client.joins)
                await client.ask_view(report)
            else:
                self.activity = "waiting for verdict"
                await self._wait(number)
        return await self._conclude(view, offer)

    async def _wait(self, number: int) -> None:
        """Until the view changes in something that matters here, or it is time to repeat ourselves."""
        before = self._client.view
        await self._client.wait_for(
            lambda view: (
                view.round != number or (view.epoch, view.phase, view.plan) != (before.epoch, before.phase, before.plan)
            ),
            self._client.deadlines.heartbeat_s,
        )

    def _is_planned(self, plan: RoundPlan, offer: RoundOffer) -> bool:
        """Whether it is this offer that the plan counts on, not one of an earlier process or membership of ours."""
        planned = {member.peer: (member.weight_tokens, member.norms) for member in plan.members}
        return planned.get(self._client.peer) == (offer.weight_tokens, self._claim) and _same_state(plan, offer)

    # What we bring ------------------------------------------------------------------------------------------

    def _begin(self, offer: RoundOffer) -> None:
        """Begin the feedback's round, and make the claim of what we bring. Raises ``CodecError``.

        Residuals make up for what a mean lacked, so they count with the weight that they had in it."""
        weight, largest = offer.weight_tokens, math.hypot(*offer.norms)
        try:
            if self._residual_weight not in (0, weight):
                self.feedback.scale(self._residual_weight / weight)
            self._residual_weight = weight
            self.feedback.begin(offer.contribution, largest)
            self._claim = claim_of(offer.norms, self.feedback.residual_norms(self._ranges))
        except CodecError:
            self.forget_residual()
            raise

    async def _residual_measured(self) -> None:
        """Returns when nobody reads the residual any more to measure it."""
        if self._measuring is not None:
            await asyncio.wait([self._measuring])
            self._measuring = None

    def _begin_with_late(self, offer: RoundOffer) -> RoundOffer:
        """As ``_begin``, once for each offer. Returns it with what came too late before, weighted by their tokens."""
        offer = self._with_late(offer)
        self._begin(offer)
        return offer

    def _with_late(self, offer: RoundOffer) -> RoundOffer:
        late = self._late
        if late is None or late.joins != self._joins or late.weight_tokens > offer.weight_tokens:
            return offer
        share = late.weight_tokens / offer.weight_tokens
        both = offer.contribution.mul_(1.0 - share).add_(late.contribution, alpha=share)
        norms = [(1.0 - share) * one + share * other for one, other in zip(offer.norms, late.norms, strict=True)]
        return replace(offer, contribution=both, norms=norms)

    # Exchange -----------------------------------------------------------------------------------------------

    def _begin_ahead(self, offer: RoundOffer) -> None:
        """Let others have what they ask for ahead, unless it is not all that we bring, as something came too late."""
        one = self._prefetch
        if one is not None and self._late is None and _same_state(one.plan, offer):
            self._is_offered = True
            one.begin(self.feedback)

    async def _drop_head_start(self) -> None:
        """Everything is as before it: nobody who goes by the plan has got anything of ours."""
        if self._prefetch is not None:
            await self._prefetch.close()
            self._prefetch, self._is_offered = None, False
            self.feedback.discard()

    async def _take_part(
        self, view: RunView, plan: RoundPlan, offer: RoundOffer, tasks: asyncio.TaskGroup
    ) -> PeerToCoordinatorRoundReport | None:
        """Exchange and make the report of it; None when the verdict came first."""
        is_planned = self._is_planned(plan, offer)
        if self._prefetch is not None and not (is_planned and self._prefetch.has_chunks_of(plan)):
            await self._drop_head_start()
        if not is_planned:
            nothing = (None,) * len(plan.parts)
            return PeerToCoordinatorRoundReport(round=plan.round, digests=nothing, dropped=(), trouble="")
        self.activity = "averaging"
        client, self._is_offered = self._client, True
        if not self.feedback.in_round:
            await in_thread(self._begin, offer)
        if self._prefetch is not None:
            if not (view.as_expected and self._prefetch.fits(plan)):
                self._prefetch.context.close_streams(tasks)
            self._prefetch.begin(self.feedback)
        store = self._open_store(plan)
        self.on_exchange(True)
        exchange = self._exchange = self._all_reduce(store)
        self._prefetch = None
        async with asyncio.TaskGroup() as running_tasks:
            running = running_tasks.create_task(exchange.run())
            running.add_done_callback(lambda _: client.wake())
            await client.wait_for(lambda view: running.done() or view.round > plan.round)
            if not running.done():
                running.cancel()
                return None
        return await in_thread(running.result().report, store, exchange.deliveries())

    def _all_reduce(self, store: ResultStore) -> AllReduce:
        client = self._client
        return AllReduce(
            self._endpoint, store, client.peer, self.feedback, client.deadlines, client.was_away, self._prefetch
        )

    async def _end_exchange(self) -> None:
        if self._prefetch is not None:
            await self._prefetch.close()
            self._prefetch = None
        if self._exchange is not None:
            await self._exchange.close()
            self._exchange = None
            self.on_exchange(False)

    def _open_store(self, plan: RoundPlan) -> ResultStore:
        return self._stores.add(ResultStore(plan, self._codec_map, self._buffers))

    # Verdict ------------------------------------------------------------------------------------------------

    async def _conclude(self, view: RunView, offer: RoundOffer) -> Outcome:
        verdict, exchange = view.verdict, self._exchange
        await self._end_exchange()
        # Whoever lags fetches the last committed round's bytes here: they are kept until the next one is committed.
        before = sorted(number for number in self._stores if number < offer.round)
        await self._stores.drop(*before[:-1])
        if verdict is None or verdict.round != offer.round:
            return Resync(f"the verdict of round {offer.round} was missed")
        if verdict.anchor_version < offer.anchor_version:
            self.forget_residual()  # of work that others will do again
            return Resync(verdict.reason)
        if not verdict.committed:
            await self._stores.drop(offer.round)
            return Aborted(verdict.reason, verdict)
        assert verdict.plan is not None
        if not _same_state(verdict.plan, offer):
            return Resync("the others averaged on another state than ours")
        self.activity = "applying"
        try:
            mean = await self._committed_mean(verdict, exchange)
        except LinkError as error:
            return Resync(f"committed results of round {offer.round} cannot be had: {error}")
        if self._archive is not None:
            self._archive.keep(self._stores[offer.round], verdict)
        await self._stores.drop(*before)
        planned = self._is_planned(verdict.plan, offer)
        if planned and exchange is None:
            exchange = self._all_reduce(self._stores[offer.round])
        await in_thread(self._account, offer, exchange, planned)
        # A pass over all of it, which the next claim needs: done while others train or apply, not when a round ends.
        loop = asyncio.get_running_loop()
        self._measuring = loop.run_in_executor(None, self.feedback.residual_norms, self._ranges)
        return Committed(mean, verdict, included=planned)

    def _account(self, offer: RoundOffer, exchange: AllReduce | None, planned: bool) -> None:
        """What of ours is not in the committed mean stays for the next one, unless others train on our samples now.

        ``exchange``: ours; one that has not run, if the verdict came first, as others may have got something ahead."""
        ours = self._client.joins == self._joins
        if not planned:
            self.feedback.discard()
        elif ours and not self.feedback.in_round:
            self._begin(offer)
        if exchange is not None and self.feedback.in_round:
            exchange.settle(keep=ours)
            self.feedback.commit()
        if planned:
            self._late = None
        elif offer.weight_tokens and ours:
            self._late = _Late(offer.contribution, offer.norms, offer.weight_tokens, self._joins)

    async def _committed_mean(self, verdict: Verdict, exchange: AllReduce | None) -> Tensor:
        """The decoded mean of the committed bytes, fetched from whoever has what we lack. Raises ``LinkError``.

        ``exchange``: ours, which has been decoding."""
        plan = verdict.plan
        assert plan is not None
        if plan.parts[-1].stop != self._elements:
            raise LinkError("the plan is for a model of another size")
        store = self._stores.get(plan.round) or self._open_store(plan)
        members = range(len(plan.members))
        for part, digest in zip(plan.parts, verdict.digests, strict=True):
            if digest is None:
                store.drop(part)
            elif not store.holds(part, digest):
                near = dict.fromkeys([*may_hold(plan, part), *members])
                others = [plan.members[one].peer for one in near if plan.members[one].peer != self._client.peer]
                await ensure_part(self._endpoint, store, part, digest, others, self._client.deadlines)
        return await in_thread(ResultDecoder(store).finish if exchange is None else exchange.decoder.finish)


def _same_state(plan: RoundPlan, offer: RoundOffer) -> bool:
    return (plan.anchor_version, plan.state_digest) == (offer.anchor_version, offer.state_digest)
