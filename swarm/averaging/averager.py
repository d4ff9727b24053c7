"""End of a round on one member: ready, exchange, report, verdict.

Every step follows from the coordinator's current view, not from a message, so a coordinator that restarts or a view
that is lost costs nothing but time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.auditor import Auditor
from shoal.swarm.averaging.buffer_pool import RoundBuffers
from shoal.swarm.averaging.committed_contribution import CommittedContribution
from shoal.swarm.averaging.contribution import EncodedContribution, encode
from shoal.swarm.averaging.inclusions import Inclusions
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.outcome import Aborted, Committed, Resync, RoundOffer, RoundOutcome
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.averaging.prefetch import Prefetch, PrefetchManager
from shoal.swarm.averaging.result_fetch import complete_results
from shoal.swarm.averaging.results import PublishedResults, ResultArchive, ResultStore, RoundMean
from shoal.swarm.averaging.round_feedback import RoundFeedback
from shoal.swarm.averaging.secure_exchange import SecureExchange, scales_after
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, NotAdmitted, SecureRefused, StaleWork
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerSecureBoard,
    MadePart,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorSecureStep,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView, Verdict
from shoal.swarm.protocol.secure import commitment
from shoal.swarm.protocol.statements import (
    ContributionStatement,
    PartStatement,
    PlanSigner,
    PlanStatement,
    plan_digest,
    unsigned_contributions,
)
from shoal.swarm.sample_ranges import from_wire
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.reveal_record import RevealRecord
from shoal.swarm.secure.round_keys import fresh_nonce
from shoal.swarm.secure.signed_sets import fault_of as fault_of_sets
from shoal.swarm.token_buckets import TokenBuckets
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_ACQUAINTED = 8
"""Committed secure rounds with a member until it is no stranger: as many as credit takes."""

_DRAWS, _DRAW_EVERY_S = 3, 600.0
"""Secure rounds that may come to nothing for us, whatever their end, after our keys were shown, from when on the host
may know the groups, and time until another one may."""

_UNPLANNED = 4
"""Rounds in a row without a plan after which a member does without the scales that it has, as others may have none."""


class Averager:
    """One member's rounds, one after the other; keeps the residual and the recent results between them."""

    def __init__(
        self,
        client: CoordinatorClient,
        endpoint: Endpoint,
        codec_map: CodecMap,
        elements: int,
        archive: ResultArchive | None = None,
    ) -> None:
        """``archive``: where the results of committed rounds go, if anywhere."""
        is_gathering = client.run_file.collective is not None
        self.round_feedback = RoundFeedback(elements, client.run_file.averaging, is_gathering=is_gathering)
        self.activity = ""
        self.clock = PhaseClock()
        """Of the member's rounds; its training thread may use it, too."""
        self.on_exchange: Callable[[bool], object] = bool
        """Called with True when an exchange begins and False when it has ended, so that other traffic can wait."""
        self._client = client
        self._endpoint = endpoint
        self._codec_map = codec_map
        self._buffers = RoundBuffers()
        self._elements = elements
        self._archive = archive
        self._stores = PublishedResults(endpoint, archive)
        self._inclusions: dict[int, Inclusions] = {}
        self.inclusions_folder: Path | None = None
        """For files of contributions: those that our means include, and our own for validators."""
        self.auditor: Auditor | None = None
        """Gets the results of each committed round; whoever it accuses is named in our reports."""
        self._exchange: AllReduce | SecureExchange | None = None
        self.reveal_record = RevealRecord(None)
        """The rounds whose sets we have signed, under secure averaging."""
        self._nonce = b""
        self._scales = b""
        self._masked_before = 0
        self._unplanned = 0
        self._rounds_with: Counter[str] = Counter()
        """By peer, the committed rounds that it was planned in, of those that we have seen."""
        self._draws: TokenBuckets[str] = TokenBuckets(1 / _DRAW_EVERY_S, _DRAWS)
        self.prefetch_manager = PrefetchManager(client, endpoint, codec_map, self._buffers)
        """Its ``run`` is a task beside everything else: it begins exchanges before ``average`` is called."""
        self._prefetch: Prefetch | None = None
        self._is_offered = False
        self._secure_member: SecureMember | None = None
        self._joins = 0
        self._claim = b""
        self._contribution: EncodedContribution | None = None
        self._committed: dict[int, CommittedContribution] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def _has_masked(self) -> bool:
        """Whether masked bytes of our offer may have left."""
        return self._secure_member is not None and self._secure_member.has_masked

    @property
    def _has_drawn(self) -> bool:
        """Whether our random number has left, so that others may know the round's groups."""
        return self._secure_member is not None and self._secure_member.has_shown_keys

    @property
    def _masked_moved(self) -> int:
        now = self._exchange.moved if isinstance(self._exchange, SecureExchange) else 0
        return self._masked_before + now

    @property
    def chunks_moved(self) -> int:
        """Result chunks made or received so far, which heartbeats report as progress."""
        return self._stores.moved + self._masked_moved

    async def average(self, offer: RoundOffer) -> RoundOutcome:
        """Take part in a round from ``ready`` to its verdict; returns what the verdict means for this member."""
        self._idle.clear()
        self.clock.exchange("packing")
        self._joins, self._is_offered, self._claim = self._client.joins, False, b""
        self._secure_member = None
        outcome: RoundOutcome | None = None
        self._prefetch = None if self._is_secure else self.prefetch_manager.take(offer.round)
        try:
            async with task_scope() as tasks:
                outcome = await self._until_verdict(offer, tasks)
        except (StaleWork, NotAdmitted, CodecError) as error:
            outcome = Resync(str(error), is_unusable=isinstance(error, CodecError))
        finally:
            try:
                await self._end_exchange()
                self.prefetch_manager.release()
                await self.round_feedback.close()
                if self._has_masked and not isinstance(outcome, Committed):
                    self.round_feedback.forget()  # the residual was in what has left
                self._contribution = None
                self._buffers.trim()
                self.activity = ""
                self.clock.exchange(None)
            finally:
                self._idle.set()
        if self._has_drawn and not (self._has_masked and isinstance(outcome, Committed)):
            self._draws.take("draw", 1.0, asyncio.get_running_loop().time())
        if isinstance(outcome, Aborted):
            outcome = self._settle_aborted(offer, outcome)
        # A mean may include some of the residual, which must not be included twice; late work is others' from now on.
        if isinstance(outcome, Resync) and (self._is_offered or self.round_feedback.late is not None):
            self.round_feedback.forget()
        if isinstance(outcome, Resync):
            self._scales = b""  # they follow from the bytes of each round, and we may miss some
        return outcome

    def _settle_aborted(self, offer: RoundOffer, outcome: Aborted) -> Aborted | Resync:
        """Decide what an aborted secure round leaves of our offer.

        Its sum may be known to somebody, so the same work, offered once more, would be what two sums differ by. Where
        the verdict says so, all are done with the samples; where it does not, or there is none, we are."""
        verdict = outcome.verdict
        if verdict is not None and verdict.spent and verdict.plan is not None and self._is_planned(verdict.plan, offer):
            self.round_feedback.forget()  # also where ours has not left, as others cannot know that
            return Aborted(f"{outcome.reason}; its masked work is lost", verdict, is_spent=True)
        if self._has_masked:
            return Resync(f"{outcome.reason}; the masked contribution must not be offered again")
        if verdict is not None:
            self._unplanned = 0 if verdict.plan is not None else self._unplanned + 1
        if self._unplanned >= _UNPLANNED:
            self._scales = b""  # members that have different scales, or none, agree on those of a first round
        return outcome

    async def _await_draw(self, number: int) -> None:
        """Wait until groups may be drawn once more: a host that knows a draw could have others until one suits it."""
        now_s = asyncio.get_running_loop().time()
        if self._draws.is_in_debt("draw", now_s):
            wait_s = self._draws.wait_s("draw", 1.0, now_s)
            log.warning("secure rounds failed after their groups were drawn: sitting out %.0f s", wait_s)
            self.activity = "waiting"
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._client.wait_for(lambda view: view.round > number)

    async def until_idle(self) -> None:
        """Return when no round is running: what is carried to the next one is settled."""
        await self._idle.wait()

    async def _until_verdict(self, offer: RoundOffer, tasks: asyncio.TaskGroup) -> RoundOutcome:
        client, number = self._client, offer.round
        if offer.weight_tokens:
            self._claim = await self.round_feedback.begin(offer, self._joins)
            if self._is_secure:  # nothing of a contribution is said, or encoded, before it is masked
                if self.reveal_record.is_spent(from_wire(offer.ranges)):
                    return Resync("these samples were trained on before, for a sum that may be known")
                await self._await_draw(number)
                self._claim, self._nonce = b"", fresh_nonce()
            else:
                feedback, grid = self.round_feedback.error_feedback, LeafGrid(self._elements, self._codec_map)
                self._contribution = await encode(feedback, grid, self._buffers.passing)
        ready = PeerToCoordinatorRoundReady(
            round=number,
            anchor_version=offer.anchor_version,
            state_digest=offer.state_digest,
            weight_tokens=offer.weight_tokens,
            ranges=offer.ranges,
            loss=offer.loss,
            first=offer.first,
            norms=self._claim,
            root=self._root,
            scales=self._scales,
        )
        statement = ContributionStatement.of_ready(client.round_name(number), ready)
        ready = ready.model_copy(update={"signature": client.sign(statement)})
        self.clock.exchange("waiting")
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
                self.clock.exchange("exchange")
                report = await self._take_part(view, view.plan, offer, tasks)
                self.clock.exchange("waiting")
                if report is not None:
                    report = report.model_copy(update={"times": self.clock.times()})
            elif reported != (view.epoch, client.joins):
                # Once for each epoch and membership: a report counts as progress and delays the verdict.
                reported = (view.epoch, client.joins)
                await client.report(report)
            else:
                self.activity = "waiting for verdict"
                await self._wait(number)
        return await self._conclude(view, offer)

    async def _wait(self, number: int) -> None:
        """Wait until the view's round, epoch, phase or plan changes, or it is time to repeat the last message."""
        before = self._client.view
        await self._client.wait_for(
            lambda view: (
                view.round != number or (view.epoch, view.phase, view.plan) != (before.epoch, before.phase, before.plan)
            ),
            self._client.deadlines.heartbeat_s,
        )

    def _is_planned(self, plan: RoundPlan, offer: RoundOffer) -> bool:
        """Whether the plan includes this very offer, not one of an earlier process or membership of ours."""
        planned = {member.peer: (member.weight_tokens, member.norms, member.root) for member in plan.members}
        ours = (offer.weight_tokens, self._claim, self._root)
        return planned.get(self._client.peer) == ours and _same_state(plan, offer) and self._fits_run(plan)

    def _fits_run(self, plan: RoundPlan) -> bool:
        """Whether the plan masks contributions, or gathers them, just where the run file says so: their secrecy, or
        their memory, depends on it."""
        run = self._client.run_file
        if run.averaging.secure or plan.secure is not None:
            return run.averaging.fits_secure(plan.secure, plan.mean)
        if run.collective is None:
            return plan.mean != "gather"
        return plan.mean == "gather" and len(plan.members) <= run.collective.members

    def _made_up(self, plan: RoundPlan) -> str:
        """Return what is wrong with the members' signatures in a plan; such a plan is not taken part in.

        The coordinator has signed the plan, and checked the signatures before: it has made the contribution up."""
        unsigned = list(unsigned_contributions(self._client.round_name(plan.round), plan))
        if not unsigned:
            return ""
        trouble = f"the plan names a contribution of {plan.members[unsigned[0]].peer} that it has not signed"
        log.error("round %d: %s: the coordinator has made it up", plan.round, trouble)
        return trouble

    @property
    def _root(self) -> bytes:
        if self._is_secure:
            return commitment(self._nonce, self._scales) if self._nonce else bytes(32)
        return bytes(32) if self._contribution is None else self._contribution.root

    @property
    def _is_secure(self) -> bool:
        return self._client.run_file.averaging.secure

    # Exchange -----------------------------------------------------------------------------------------------

    async def _drop_prefetch(self) -> None:
        if self._prefetch is not None:
            await self._prefetch.close()
            self._prefetch = None

    async def _take_part(
        self, view: RunView, plan: RoundPlan, offer: RoundOffer, tasks: asyncio.TaskGroup
    ) -> PeerToCoordinatorRoundReport | None:
        """Run the exchange and return its report; None when the verdict came first."""
        is_planned = self._is_planned(plan, offer)
        if self._prefetch is not None and not (is_planned and self._prefetch.has_chunks_of(plan)):
            await self._drop_prefetch()
        trouble = await in_thread(self._made_up, plan) if is_planned else ""
        if trouble or not is_planned:
            await self._drop_prefetch()
            return _nothing(plan, trouble)
        self.activity = "averaging"
        client, self._is_offered = self._client, True
        if self._prefetch is not None and not (view.as_expected and self._prefetch.fits(plan)):
            self._prefetch.context.close_streams(tasks)
        store = self._open_store(plan)
        try:
            exchange = self._exchange = await self._exchange_of(store, offer)
        except SecureRefused as error:
            log.error("round %d: %s", plan.round, error)
            return _nothing(plan, str(error))
        self.on_exchange(True)
        self._prefetch = None
        async with asyncio.TaskGroup() as running_tasks:
            running = running_tasks.create_task(exchange.run())
            running.add_done_callback(lambda _: client.wake())
            await client.wait_for(lambda view: running.done() or view.round > plan.round)
            if not running.done():
                running.cancel()
                return None
        result = running.result()
        if self.auditor is not None:
            accused = self.auditor.accused(plan.round)
            result.failed |= {index for index, one in enumerate(plan.members) if one.peer in accused}
        report = await in_thread(result.report, store, exchange.deliveries())
        return await in_thread(self._signed, report, exchange)

    def _signed(
        self, report: PeerToCoordinatorRoundReport, exchange: AllReduce | SecureExchange
    ) -> PeerToCoordinatorRoundReport:
        """Return the report with our signatures of the parts that we have reduced."""
        signer, signed = exchange.signer, []
        for part, chunks in exchange.made().items():
            made = MadePart(part=part, chunks=chunks, signature=bytes(64))
            statement = PartStatement.of_report(signer.plan, report, made)
            signed.append(made.model_copy(update={"signature": signer.sign(statement)}))
        return report.model_copy(update={"made": tuple(signed)})

    async def _exchange_of(self, store: ResultStore, offer: RoundOffer) -> AllReduce | SecureExchange:
        """Return our exchange by the store's plan. Raises ``SecureRefused``."""
        client, number = self._client, store.plan.round
        about = PlanStatement(client.round_name(number), await in_thread(plan_digest, store.plan))
        signer = PlanSigner(client.peer, about, client.sign)
        if store.plan.secure is None:
            return self._all_reduce(store, signer)
        known = [peer for peer, rounds in self._rounds_with.items() if rounds >= _ACQUAINTED]
        make = functools.partial(SecureMember, scales=self._scales, ranges=from_wire(offer.ranges), known=known)
        member = await in_thread(make, store.plan, signer, self._nonce, self.reveal_record)
        self._secure_member = member
        feedback, board = self.round_feedback.error_feedback, _CoordinatorBoard(client, number)
        exchange = SecureExchange(
            self._endpoint, store, signer, feedback, member, board, client.deadlines, client.was_away
        )
        self._keep_inclusions(exchange)
        return exchange

    def _all_reduce(self, store: ResultStore, signer: PlanSigner) -> AllReduce:
        client, feedback, contribution = self._client, self.round_feedback.error_feedback, self._contribution
        assert contribution is not None, "the plan has our root"
        deadlines, prefetch = client.deadlines, self._prefetch
        exchange = AllReduce(
            self._endpoint, store, signer, feedback, contribution, deadlines, client.was_away, prefetch
        )
        self._keep_inclusions(exchange)
        return exchange

    def _keep_inclusions(self, exchange: AllReduce | SecureExchange) -> None:
        """Have an exchange keep what its means include, where it will be audited."""
        store, share = exchange.store, self._client.run_file.audit.share
        number = store.plan.round
        if share and len(store.plan.members) > 1:  # alone, there is no auditor
            if number not in self._inclusions:
                self._drop_old_inclusions()
                may_read = None if store.plan.secure is None else self._client.is_trainer
                self._inclusions[number] = Inclusions(store, share, self.inclusions_folder, may_read)
            exchange.keep_inclusions(self._inclusions[number])

    def _drop_inclusions(self, number: int) -> None:
        kept = self._inclusions.pop(number, None)
        if kept is not None:
            self._endpoint.retract(kept.blob)
            kept.close()

    def _drop_old_inclusions(self) -> None:
        for old in sorted(self._inclusions)[:-2]:
            self._drop_inclusions(old)

    def _show_inclusions(self, number: int) -> None:
        """Show what our means of a committed round include, and drop what earlier ones did but for the last one."""
        self._drop_old_inclusions()
        if (kept_now := self._inclusions.get(number)) is not None:
            self._endpoint.publish(kept_now.blob, kept_now)

    async def _end_exchange(self) -> None:
        await self._drop_prefetch()
        if self._exchange is not None:
            await self._exchange.close()
            if isinstance(self._exchange, SecureExchange):
                self._masked_before += self._exchange.moved
            self._exchange = None
            self.on_exchange(False)

    def _open_store(self, plan: RoundPlan) -> ResultStore:
        return self._stores.add(ResultStore(plan, self._codec_map, self._buffers))

    # Verdict ------------------------------------------------------------------------------------------------

    async def _conclude(self, view: RunView, offer: RoundOffer) -> RoundOutcome:
        verdict, exchange = view.verdict, self._exchange
        self.clock.end_round(offer.round)
        self.clock.exchange("applying")
        await self._end_exchange()
        # Members that lag behind fetch the last committed round's bytes here, so they stay until the next is committed.
        before = sorted(number for number in self._stores if number < offer.round)
        await self._stores.drop(*before[:-1])
        if verdict is None or verdict.round != offer.round:
            return Resync(f"the verdict of round {offer.round} was missed")
        if verdict.anchor_version < offer.anchor_version:
            self.round_feedback.forget()  # it stems from work that others will repeat
            return Resync(verdict.reason)
        if not verdict.committed:
            await self._stores.drop(offer.round)
            self._drop_inclusions(offer.round)
            return Aborted(verdict.reason, verdict)
        assert verdict.plan is not None
        if self._has_masked and isinstance(exchange, SecureExchange):
            about = PlanStatement(self._client.round_name(offer.round), await in_thread(plan_digest, verdict.plan))
            if about != exchange.signer.plan:
                return Resync("the round was committed by another plan than the one that we masked for")
        if not _same_state(verdict.plan, offer):
            return Resync("the other members averaged from another state than ours")
        self.activity = "applying"
        try:
            mean = await self._committed_mean(verdict)
        except LinkError as error:
            return Resync(f"nobody delivers the committed results of round {offer.round}: {error}")
        if self._archive is not None:
            self._archive.keep(self._stores[offer.round], verdict)
        await self._stores.drop(*before)
        planned = self._is_planned(verdict.plan, offer)
        if planned and exchange is None:
            try:
                exchange = await self._exchange_of(self._stores[offer.round], offer)
            except SecureRefused as error:
                return Resync(str(error))
        ours = self._client.joins == self._joins
        end = functools.partial(self.round_feedback.end, planned=planned, ours=ours)
        await in_thread(end, offer, exchange, self._joins)
        if verdict.plan.secure is not None:
            await in_thread(self._compare_sets, verdict, exchange)
            self._scales = await in_thread(scales_after, self._stores[offer.round])
            self._rounds_with.update(one.peer for one in verdict.plan.members)
        self.round_feedback.measure()
        self._show_inclusions(offer.round)
        if self.auditor is not None:
            self.auditor.offer(self._stores[offer.round], verdict)
        await self._keep_contribution(offer.round, is_in_mean=planned)
        return Committed(mean, verdict, included=planned)

    def _compare_sets(self, verdict: Verdict, exchange: AllReduce | SecureExchange | None) -> None:
        """Say so if the means of a committed secure round are of other sets than ours, or of such that too few have
        signed. The bytes are those that most members have accepted, so they stay."""
        plan, signed, number, store = verdict.plan, verdict.signed_sets, verdict.round, self._stores[verdict.round]
        assert plan is not None
        about = PlanStatement(self._client.round_name(number), plan_digest(plan))
        means = [
            {one for chunk in store.chunks_of(part) for one in store.header(chunk).included} for part in plan.parts
        ]
        fault = "the verdict names no sets" if signed is None else fault_of_sets(about, plan, signed, means)
        member = exchange.member if isinstance(exchange, SecureExchange) else None
        if not fault and signed is not None and member is not None and member.has_signed_others(signed):
            fault = "enough members have signed these sets, but we have others: the host has shown both"
        if fault:
            log.error("round %d: %s", number, fault)

    async def _keep_contribution(self, number: int, *, is_in_mean: bool) -> None:
        """Keep what we have brought to a committed round for validators, and drop what they cannot score any more."""
        for old in sorted(self._committed)[:-1]:
            kept = self._committed.pop(old)
            self._endpoint.retract(kept.blob)
            kept.close()
        is_wanted = self._client.run_file.audit.work_share and self._client.has_validators()
        if is_in_mean and self._contribution is not None and is_wanted:
            grid = LeafGrid(self._elements, self._codec_map)
            kept = self._committed[number] = CommittedContribution(
                number, grid, self._client.is_validator, self.inclusions_folder
            )
            await in_thread(kept.keep, self._contribution)
            self._endpoint.publish(kept.blob, kept)

    async def _committed_mean(self, verdict: Verdict) -> RoundMean:
        """Return the mean; committed chunks that we lack are fetched. Raises ``LinkError``."""
        plan = verdict.plan
        assert plan is not None
        if plan.parts[-1].stop != self._elements:
            elements = plan.parts[-1].stop
            raise LinkError(f"the plan is for a model of {elements} parameters; ours has {self._elements}")
        if not self._fits_run(plan):
            raise LinkError("the plan makes something else of contributions than the run file says")
        store = self._stores.get(plan.round) or self._open_store(plan)
        await complete_results(self._endpoint, store, verdict, self._client.peer, self._client.deadlines)
        return await in_thread(RoundMean, store)


class _CoordinatorBoard:
    """The coordinator's board of a secure round (a ``BoardLink``)."""

    def __init__(self, client: CoordinatorClient, number: int) -> None:
        self._client = client
        self._number = number

    async def post(self, step: PeerToCoordinatorSecureStep) -> CoordinatorToPeerSecureBoard:
        return await self._client.ask(step, CoordinatorToPeerSecureBoard)

    async def changed(self, stage: int, is_due: Callable[[], bool]) -> int:
        client, epoch = self._client, self._client.view.epoch
        view = await client.wait_for(
            lambda view: is_due() or view.round != self._number or view.epoch != epoch or view.secure_stage > stage,
            client.deadlines.heartbeat_s,
        )
        if view.round > self._number:
            await asyncio.Event().wait()  # the verdict is here: nothing is posted any more
        return view.secure_stage if view.round == self._number else stage

    def wake(self) -> None:
        self._client.wake()


def _nothing(plan: RoundPlan, trouble: str) -> PeerToCoordinatorRoundReport:
    """Return the report of a member that takes no part in an exchange."""
    digests = (None,) * len(plan.parts)
    return PeerToCoordinatorRoundReport(round=plan.round, digests=digests, dropped=(), trouble=trouble)


def _same_state(plan: RoundPlan, offer: RoundOffer) -> bool:
    return (plan.anchor_version, plan.state_digest) == (offer.anchor_version, offer.state_digest)
