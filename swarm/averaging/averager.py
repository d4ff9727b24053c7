"""One member's way through the end of a round: ready, exchange, report, verdict; level-triggered on the view.

Whatever was announced while this member looked away, the view tells it where the round is now, so a coordinator
that restarts, or a push that was lost, changes nothing but the time it takes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from torch import Tensor

from shoal.compression.codec import Codec, CodecError
from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.averaging.allreduce import AllReduce, Exchange, ResultStore, fetch_part
from shoal.swarm.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, NotAdmitted, StaleWork
from shoal.swarm.messages import (
    Blob,
    CoordinatorToPeerView,
    Part,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    RoundPlan,
    RunView,
    SampleRange,
    Verdict,
)
from shoal.swarm.transport import Endpoint

log = logging.getLogger(__name__)

_KEPT_ROUNDS = 3


@dataclass(frozen=True)
class Offer:
    """What we bring to a round. ``contribution``: (n,) float32 on the CPU; the averager may change it."""

    round: int
    anchor_version: int
    state_digest: bytes
    contribution: Tensor
    weight_tokens: int
    ranges: tuple[SampleRange, ...]
    loss: float | None


@dataclass(frozen=True)
class Committed:
    """Apply ``mean`` (n,) float32. ``included``: our samples are in it; else they count with our next offer."""

    mean: Tensor
    verdict: Verdict
    included: bool


@dataclass(frozen=True)
class CarryOn:
    """Nothing changed (aborted, or reopened): keep the local work and go on training from where it is."""

    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class OutOfDate:
    """We missed something: drop the local work, join afresh and fetch the state."""

    reason: str


Outcome = Committed | CarryOn | OutOfDate


class Averager:
    """Carries the residual and the recent results from round to round."""

    def __init__(self, client: CoordinatorClient, endpoint: Endpoint, codec: Codec, elements: int) -> None:
        self.feedback = ErrorFeedback(elements)
        self.activity = ""
        self._client = client
        self._endpoint = endpoint
        self._codec = codec
        self._elements = elements
        self._stores: dict[int, ResultStore] = {}
        self._moved_before = 0

    @property
    def chunks_moved(self) -> int:
        """Result chunks made or received so far: what the heartbeat shows as progress."""
        return self._moved_before + sum(store.moved for store in self._stores.values())

    async def average(self, offer: Offer) -> Outcome:
        """Take part in the round's end, or at least in its outcome; returns when the verdict is known."""
        try:
            return await self._until_verdict(offer)
        except (StaleWork, NotAdmitted, CodecError) as error:
            self.feedback.discard()
            return OutOfDate(str(error))
        finally:
            self.activity = ""

    async def _until_verdict(self, offer: Offer) -> Outcome:
        client, number = self._client, offer.round
        ready = PeerToCoordinatorRoundReady(
            round=number,
            anchor_version=offer.anchor_version,
            state_digest=offer.state_digest,
            weight_tokens=offer.weight_tokens,
            ranges=offer.ranges,
            loss=offer.loss,
        )
        exchange: AllReduce | None = None
        report: PeerToCoordinatorRoundReport | None = None
        while True:
            view = client.view
            if view.round > number:
                return await self._conclude(view, offer, exchange)
            plan = view.plan
            if plan is not None and exchange is None and self._is_member(plan):
                exchange = self._prepare(plan, offer)
                report = await self._exchange(exchange, plan)
            elif plan is not None:
                if report is not None:
                    await client.ask(report, CoordinatorToPeerView)
                self.activity = "waiting for verdict"
                await self._wait(number)
            else:
                self.activity = "ready"
                if (await self._say_ready(ready, number)).phase == "training":
                    return CarryOn("the round was reopened: samples of its batch had been lost")

    async def _say_ready(self, ready: PeerToCoordinatorRoundReady, number: int) -> RunView:
        await self._client.ask(ready, CoordinatorToPeerView)
        view = self._client.view
        if view.round == number and view.plan is None and view.phase == "closing":
            view = await self._wait(number)
        return view if view.round == number and view.plan is None else view.model_copy(update={"phase": "averaging"})

    async def _wait(self, number: int) -> RunView:
        """Until the view changes in something that matters here, or it is time to repeat ourselves."""
        before = self._client.view
        return await self._client.wait_for(
            lambda view: view.round != number or view.phase != before.phase or view.plan != before.plan,
            self._client.deadlines.heartbeat_s,
        )

    def _is_member(self, plan: RoundPlan) -> bool:
        return any(member.peer == self._client.peer for member in plan.members)

    # Exchange -----------------------------------------------------------------------------------------------

    def _prepare(self, plan: RoundPlan, offer: Offer) -> AllReduce:
        corrected = self.feedback.begin(offer.contribution, take=True)
        store = self._open_store(plan)
        return AllReduce(self._endpoint, store, self._client.peer, corrected, self.feedback, self._client.deadlines)

    def _open_store(self, plan: RoundPlan) -> ResultStore:
        store = ResultStore(plan, self._codec)
        self._stores[plan.round] = store
        self._endpoint.publish(Blob(kind="result", number=plan.round), store)
        for old in [number for number in self._stores if number <= plan.round - _KEPT_ROUNDS]:
            self._moved_before += self._stores.pop(old).moved
            self._endpoint.retract(Blob(kind="result", number=old))
        return store

    async def _exchange(self, exchange: AllReduce, plan: RoundPlan) -> PeerToCoordinatorRoundReport | None:
        """Run it, unless the verdict comes first; None in that case."""
        self.activity = "averaging"
        client = self._client
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(exchange.run())
            running.add_done_callback(lambda _: client.wake())
            await client.wait_for(lambda view: running.done() or view.round > plan.round)
            if not running.done():
                running.cancel()
                return None
        return await asyncio.to_thread(self._make_report, running.result(), plan)

    def _make_report(self, result: Exchange, plan: RoundPlan) -> PeerToCoordinatorRoundReport:
        store = self._stores[plan.round]
        return PeerToCoordinatorRoundReport(
            round=plan.round,
            digests=tuple(store.digest(part) if store.has(part) else None for part in plan.parts),
            dropped=tuple(sorted(result.dropped)),
            trouble=result.trouble[:2000],
        )

    # Verdict ------------------------------------------------------------------------------------------------

    async def _conclude(self, view: RunView, offer: Offer, exchange: AllReduce | None) -> Outcome:
        verdict = view.verdict
        if exchange is not None:
            self._endpoint.retract(exchange.blob)
        if verdict is None or verdict.round != offer.round:
            self.feedback.discard()
            return OutOfDate(f"the verdict of round {offer.round} was missed")
        if not verdict.committed:
            self.feedback.discard()
            return CarryOn(verdict.reason, verdict)
        assert verdict.plan is not None
        if verdict.plan.anchor_version != offer.anchor_version or (verdict.plan.state_digest != offer.state_digest):
            self.feedback.discard()
            return OutOfDate("the others averaged on another state than ours")
        self.activity = "applying"
        try:
            mean = await self._committed_mean(verdict)
        except (LinkError, CodecError) as error:
            self.feedback.discard()
            return OutOfDate(f"committed results of round {offer.round} cannot be had: {error}")
        if exchange is not None:
            await asyncio.to_thread(exchange.settle)
            self.feedback.commit()
        elif offer.weight_tokens:
            self.feedback.begin(offer.contribution, take=True)
            self.feedback.commit()
        return Committed(mean, verdict, included=exchange is not None)

    async def _committed_mean(self, verdict: Verdict) -> Tensor:
        """The decoded mean of the committed bytes, fetched from whoever has what we lack. Raises ``LinkError``."""
        plan = verdict.plan
        assert plan is not None
        if plan.parts[-1].stop != self._elements:
            raise LinkError("the plan is for a model of another size")
        store = self._stores.get(plan.round) or self._open_store(plan)
        for part, digest in zip(plan.parts, verdict.digests, strict=True):
            if not (store.has(part) and await asyncio.to_thread(store.digest, part) == digest):
                await self._fetch_committed(store, part, digest)
        return await asyncio.to_thread(store.mean)

    async def _fetch_committed(self, store: ResultStore, part: Part, digest: bytes) -> None:
        members = [member.peer for member in store.plan.members]
        holders = [members[part.owner], *members]
        trouble: LinkError = LinkError("nobody has them")
        for holder in dict.fromkeys(peer for peer in holders if peer != self._client.peer):
            store.forget(part)
            try:
                await fetch_part(self._endpoint, store, part, holder, self._client.deadlines.patience_s)
            except LinkError as error:
                trouble = error
                continue
            if await asyncio.to_thread(store.digest, part) == digest:
                return
            log.warning("%s has other bytes than the committed ones", holder)
        raise trouble
