"""Runner of the stage engine: executes its effects on the event loop and reports their results to it as events.

Computations go to the training thread, one at a time. The training thread reports each result to the engine itself
(``StageRunner.take_ready_task``), so that its next task need not wait for the event loop; the loop executes the other
effects in its next turn.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Literal

from shoal.compression.formats import CodecError
from shoal.peer.member.memberships import Memberships, scope_of
from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline.claims import ClaimQueue, DriveRequests
from shoal.peer.pipeline.mailbox import StageMailbox, StageShapes
from shoal.peer.pipeline.tensor_io import Staging
from shoal.peer.pipeline.tensor_store import TensorStore, offer_of
from shoal.peer.pipeline.training import BackwardTask, ComputeResult, ForgetTask, ForwardTask, RepeatTask, Task
from shoal.peer.pipeline.view_watch import ViewWatch, holders
from shoal.peer.pipeline.work_checks import CheckContext, CheckSettings, ExchangeLog, WorkChecker, WorkRepeater
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.errors import Busy, LinkError, ShoalError, StaleWork, WireError
from shoal.swarm.pipeline.engine.effects import (
    Answer,
    AskToDrive,
    Claim,
    Compute,
    ComputeBackward,
    ComputeForward,
    Drop,
    DropRound,
    Effect,
    Fetch,
    MicroBatchDone,
    PeerNote,
    Release,
    Reply,
    Send,
    TensorKind,
    TensorOffer,
)
from shoal.swarm.pipeline.engine.engine import StageEngine
from shoal.swarm.pipeline.engine.norm_bounds import Hop, NormBounds
from shoal.swarm.protocol.messages import Acknowledged, PeerToCoordinatorAccuseReplica, PeerToPeerNote

log = logging.getLogger(__name__)

_MOST_REFUSED = 3
"""Tensors in a row of one replica that are refused for their size before this peer does without it."""

_WITHOUT_ROUNDS = 16
"""Rounds for which this peer does without a replica that sent it wrong values, or until its process is another one."""

Execute = Callable[[Iterable[Effect | ComputeResult]], None]


class SharedEngine:
    """Stage engine shared by two threads: the event loop and, for results, the training thread.

    ``execute``: executes effects on the loop, in the engine's order, each result before its effects.
    ``queue_computation``: queues the next computation; called on the training thread, too.
    """

    def __init__(self, engine: StageEngine, execute: Execute, queue_computation: Callable[[Compute], None]) -> None:
        self._engine = engine
        self._execute, self._queue_computation = execute, queue_computation
        self._lock = threading.RLock()
        self._backlog: deque[Effect | ComputeResult] = deque()
        """Results from the training thread and their effects; the loop executes them before anything newer."""
        self._has_backlog = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    # On the loop ----------------------------------------------------------------------------------------------

    def bind_loop(self) -> None:
        """Bind to the running loop; call before any event."""
        self._loop = asyncio.get_running_loop()

    async def execute_backlog(self) -> None:
        """Execute the effects of results from the training thread, until cancelled."""
        while True:
            await self._has_backlog.wait()
            self._has_backlog.clear()
            with self._lock:
                self._clear_backlog()

    def wake(self) -> None:
        """Wake the loop after ``report_result``."""
        self._has_backlog.set()

    def report(self, event: Callable[..., list[Effect]], *arguments: object) -> None:
        """Report an event to the engine and execute its effects."""
        with self._lock:
            self._clear_backlog()
            self._execute(event(*arguments, self._loop.time()))

    def answer_offer(self, offer: TensorOffer) -> Answer:
        """Report an offer to the engine, execute its effects and return its answer."""
        with self._lock:
            self._clear_backlog()
            reply, *effects = self._engine.offered(offer, self._loop.time())
            assert isinstance(reply, Reply)
            self._execute(effects)
        return reply.answer

    def _clear_backlog(self) -> None:
        while self._backlog:
            self._execute([self._backlog.popleft()])

    # On the training thread -----------------------------------------------------------------------------------

    def report_result(self, made: ComputeResult) -> None:
        """Report a result to the engine. The caller wakes the loop afterwards (``wake``)."""
        with self._lock:
            self._backlog.append(made)
            for effect in self._engine.computed(made.compute, self._loop.time()):
                if isinstance(effect, ComputeForward | ComputeBackward):
                    self._queue_computation(effect)
                else:
                    self._backlog.append(effect)


class StageRunner:
    """Runner of the engine of one span, whose stages ``members`` has joined: ``run`` lasts until ``stop``."""

    def __init__(
        self, members: Memberships, engine: StageEngine, shapes: StageShapes, staging: Staging, checks: CheckSettings
    ) -> None:
        self._members = members
        self._engine = engine
        self._shared = SharedEngine(engine, self._execute, self._queue_computation)
        self._shapes = shapes
        self._node = members.run.node
        self._deadlines = members.run.client.deadlines
        self._tensors = TensorStore(self._node, staging)
        self._drives = DriveRequests(members.run.client)
        self._watch = ViewWatch(members, engine.span)
        context = CheckContext(members, engine.span, shapes, self._tensors, staging, checks)
        on_offer, on_note = self._shared.answer_offer, partial(self._shared.report, engine.noted)
        self._mailbox = StageMailbox(
            self._node, engine.span, shapes, self._tensors, on_offer, on_note, context.holds, self._is_trusted
        )
        self._exchanges = ExchangeLog()
        self._checker = WorkChecker(context, self._is_trusted)
        self._repeater = WorkRepeater(context, self._exchanges, self._queue_task)
        on_claim = partial(self._shared.report, engine.claim_answered)
        self._claims = {
            stage: ClaimQueue(members.stages[stage].client, on_claim)
            for stage in range(engine.span.first, engine.span.last + 1)
        }
        self._norms = NormBounds()
        self._refused: Counter[tuple[Hop, str]] = Counter()
        """By sender, its tensors in a row that were refused for their size."""
        self._distrusted: dict[str, int] = {}
        """Replicas that sent wrong values, each with the first round in which this peer uses it again."""
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._jobs: set[int] = set()
        """Jobs that are computed or fetched and were not dropped."""
        self._task_queue: deque[Task] = deque()
        self._woken = asyncio.Event()
        self._stop = asyncio.Event()
        self._failure: Exception | None = None
        self._round = -1
        self._is_closing = False
        self.trouble = ""
        """Reason why a result of this round cannot be sent (it is infinite or NaN); else empty."""
        self._tasks: asyncio.TaskGroup

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose activations are kept here; from any thread."""
        return self._engine.kept_activations

    async def run(self) -> None:
        """Run until ``stop``."""
        self._shared.bind_loop()
        self._mailbox.open()
        self._repeater.open()
        try:
            with suppress(_Stopped):
                async with task_scope() as self._tasks:
                    self._tasks.create_task(self._shared.execute_backlog())
                    for claims in self._claims.values():
                        self._tasks.create_task(claims.send_queued())
                    self._tasks.create_task(self._watch.run(self._report_view_changes))
                    self._tasks.create_task(self._tick())
                    await self._stop.wait()
                    raise _Stopped
        except Exception as error:
            self._failure = error  # the training thread may be waiting for a task
            self._woken.set()
            raise
        finally:
            self._mailbox.close()
            self._repeater.close()
            self._drop_repeats()
            self._tensors.drop_all()

    def stop(self) -> None:
        """End ``run``."""
        self._stop.set()

    # The training thread --------------------------------------------------------------------------------------

    async def open_round(self, number: int) -> None:
        """Begin a round, or go on with a reopened one; the parameters are those of its anchor."""
        self._round, self._is_closing = number, False
        self._norms.round_opened(number)
        self._repeater.round_opened(number)
        self._shared.report(self._engine.round_opened, number)
        self._report_view_changes()

    async def end_round(self) -> None:
        """End the round: it has a verdict, or the work on it was dropped."""
        self._shared.report(self._engine.round_over)

    def take_ready_task(self, made: ComputeResult | None) -> Task | None:
        """Report a result, if any, and take the next computation, on the training thread.

        Returns None if there is none yet; ``next_task`` waits for it. After a result the caller wakes the loop
        (``wake``).
        """
        if made is not None:
            self._shared.report_result(made)
        if not self._task_queue or self._failure is not None or self._attention() is not Attention.NOTHING:
            return None
        self._members.run.progress.has_work = True
        return self._task_queue.popleft()

    async def next_task(self) -> Task:
        """Wait for the next task. Raises the error that ended ``run``."""
        progress = self._members.run.progress
        while True:
            self._woken.clear()
            attention = self._attention()
            # Holds until the training thread asks for its next task.
            progress.has_work = bool(self._task_queue) and attention is Attention.NOTHING
            if self._failure is not None:
                raise self._failure
            if attention is not Attention.NOTHING:
                return attention
            if self._task_queue:
                return self._task_queue.popleft()
            if self._engine.is_settled:
                self._watch.report_idle()
            await self._woken.wait()

    def wake(self) -> None:
        """Wake the loop to execute the effects of a result from the training thread."""
        self._shared.wake()

    def _attention(self) -> Attention:
        found = self._watch.attention(self._round)
        return Attention.DIVERGED if found is Attention.NOTHING and self.trouble else found

    def _store_result(self, made: ComputeResult) -> None:
        job = made.compute.job
        if made.tensor is not None and job in self._jobs:
            kind: TensorKind = "activation" if isinstance(made.compute, ComputeForward) else "gradient"
            self._tensors.store_result(job, kind, made.tensor, made.targets)
        if self._engine.is_settled:  # if this was the batch's last micro-batch, the coordinator waits for the report
            self._watch.request_heartbeats()

    def _queue_task(self, task: Task) -> None:
        self._task_queue.append(task)
        self._woken.set()

    def _drop_round(self) -> None:
        """Drop all tasks and tensors of the round."""
        for fetch in self._fetches.values():
            fetch.cancel()
        self._drop_repeats()
        self._exchanges.clear()
        waiting = [task.compute for task in self._task_queue if isinstance(task, ForwardTask | BackwardTask)]
        self._task_queue.clear()
        self._jobs.clear()
        self.trouble = ""
        self._mailbox.drop_offers()
        self._tensors.drop_all()
        self._queue_task(ForgetTask(None))
        for compute in waiting:  # the engine has one computation out at a time, and waits for its end
            self._shared.report(self._engine.computed, compute)

    def _drop_repeats(self) -> None:
        """Tell those whose checks wait for a computation here that it will not come."""
        for task in list(self._task_queue):
            if isinstance(task, RepeatTask) and not task.done.done():
                task.done.set_exception(StaleWork("the round is over here"))

    # Effects --------------------------------------------------------------------------------------------------

    def _execute(self, effects: Iterable[Effect | ComputeResult]) -> None:
        for effect in effects:
            match effect:
                case ComputeResult():
                    self._store_result(effect)
                case Send():
                    self._tasks.create_task(self._send(effect))
                case PeerNote():
                    self._tasks.create_task(self._note(effect))
                case Fetch():
                    self._begin_fetch(effect)
                case Claim(stage=stage) | Release(stage=stage):
                    self._claims[stage].put(effect)
                case ComputeForward() | ComputeBackward():
                    self._queue_computation(effect)
                    self._woken.set()
                case Drop():
                    self._drop(effect.job)
                case DropRound():
                    self._drop_round()
                case AskToDrive():
                    self._tasks.create_task(self._drive(effect))
                case MicroBatchDone():
                    pass  # the next AskToDrive names it among the done ones
                case Reply():
                    raise AssertionError("only an offer has a reply")

    def _queue_computation(self, compute: Compute) -> None:
        """Queue a computation whose inputs have arrived; on either thread."""
        if isinstance(compute, ComputeForward):
            self._repeater.note_forward()
            self._jobs.add(compute.job)
            self._task_queue.append(ForwardTask(compute, *self._tensors.received_input(compute.job)))
        else:
            self._task_queue.append(BackwardTask(compute, self._tensors.received_gradient(compute.job)))

    def _drop(self, job: int) -> None:
        if fetch := self._fetches.get(job):
            fetch.cancel()
        self._jobs.discard(job)
        self._tensors.drop(job)
        self._queue_task(ForgetTask(job))

    async def _send(self, send: Send) -> None:
        engine = self._engine
        try:
            parcel = await self._tensors.publish_packed(send.number, send.kind)
        except CodecError as error:
            if send.number in self._jobs:  # no retry: the value stays infinite or NaN
                self.trouble = f"the {send.kind} of a micro-batch cannot be sent: {error}"
                self._woken.set()
            return
        if parcel is None:
            return
        if send.kind == "gradient":
            self._exchanges.gave(send.micro_batch, send.peer, parcel.digest)
        wait_s, scope = self._deadlines.request_s, scope_of(send.stage)
        try:
            await self._node.ask(send.peer, offer_of(send, parcel), Acknowledged, wait_s, scope)
        except StaleWork:
            self._shared.report(engine.refused, send, "outdated")
        except (Busy, WireError) as error:  # WireError also comes from a peer that has not entered its stage yet
            log.debug(
                "%s refused the %s of %s, which is offered again: %s", send.peer, send.kind, send.micro_batch, error
            )
            self._shared.report(engine.refused, send, "busy")
        except LinkError as error:
            log.debug("the %s of %s could not be offered to %s: %s", send.kind, send.micro_batch, send.peer, error)
            self._shared.report(engine.send_failed, send)

    async def _note(self, note: PeerNote) -> None:
        of = note.micro_batch
        message = PeerToPeerNote(
            kind=note.kind, round=of.round, start=of.start, stop=of.stop, stage=note.stage, attempt=note.attempt
        )
        with suppress(LinkError):  # notes only save work
            await self._node.ask(note.peer, message, Acknowledged, self._deadlines.request_s)

    def _begin_fetch(self, fetch: Fetch) -> None:
        self._jobs.add(fetch.job)
        if earlier := self._fetches.get(fetch.job):
            earlier.cancel()
        task = self._fetches[fetch.job] = self._tasks.create_task(self._fetch(fetch))
        task.add_done_callback(lambda done: self._fetched(fetch.job, done))

    def _fetched(self, job: int, task: asyncio.Task[None]) -> None:
        if self._fetches.get(job) is task:
            del self._fetches[job]

    async def _fetch(self, fetch: Fetch) -> None:
        try:
            size = await self._tensors.fetch(fetch, self._mailbox.offer_for(fetch), self._deadlines.request_s)
            self._check_norm(fetch, size)
            if fetch.kind == "activation":
                self._exchanges.took(fetch.micro_batch, fetch.peer, self._tensors.input_digest(fetch.job))
            if self._engine.is_last:
                _, targets = self._tensors.received_input(fetch.job)
                await in_thread(self._shapes.check_targets, targets, fetch.micro_batch.samples)
            await self._check_work(fetch)
        except LinkError as error:
            log.debug("fetching the %s of %s from %s failed: %s", fetch.kind, fetch.micro_batch, fetch.peer, error)
            self._shared.report(self._engine.fetch_failed, fetch)
        else:
            self._shared.report(self._engine.tensor_arrived, fetch)

    def _check_norm(self, fetch: Fetch, size: float) -> None:
        """Check the root mean square of a fetched tensor. Raises ``WireError`` if it is far above the usual.

        After several in a row this peer does without the sender."""
        is_gradient = fetch.kind == "gradient"
        if is_gradient:
            size *= fetch.micro_batch.samples  # losses are means over the samples
        stage = self._engine.span.last + 1 if is_gradient else fetch.stage - 1
        hop, replicas = (fetch.kind, stage), holders(self._members.run.client.view, stage).keys()
        if self._norms.accepts(hop, size):
            if fetch.peer in replicas:
                self._norms.learn(hop, fetch.peer, size)
                self._refused.pop((hop, fetch.peer), None)
            return
        what = f"the {fetch.kind} of {fetch.micro_batch} from stage {stage}, peer {fetch.peer}"
        reason = f"{what}, has the size {size:.3g}; at most {self._norms.bound(hop):.3g} is accepted"
        log.warning("%s: it is refused", reason)
        self._refused[hop, fetch.peer] += 1
        if self._refused[hop, fetch.peer] >= _MOST_REFUSED:
            del self._refused[hop, fetch.peer]
            self._distrust(fetch.peer, stage, "size")
        raise WireError(reason)

    async def _check_work(self, fetch: Fetch) -> None:
        """Have another replica compute a drawn micro-batch again. Raises ``WireError`` if it may not be used."""
        wrong = await self._checker.check(fetch)
        if wrong is not None:
            stage = self._engine.span.last + 1 if fetch.kind == "gradient" else fetch.stage - 1
            self._distrust(wrong, stage, "values")
        if wrong == fetch.peer:
            raise WireError(f"two other replicas compute other values than peer {wrong} for {fetch.micro_batch}")

    # Trust ----------------------------------------------------------------------------------------------------

    def _is_trusted(self, peer: str) -> bool:
        return self._distrusted.get(peer, self._round) <= self._round

    def _distrust(self, peer: str, stage: int, reason: Literal["size", "values"]) -> None:
        """Do without a replica for some rounds and accuse it: others decide for themselves whether they believe it."""
        self._distrusted[peer] = self._round + _WITHOUT_ROUNDS
        log.warning(
            "peer %s sends wrong values from stage %d: this peer does without it for %d rounds%s",
            peer,
            stage,
            _WITHOUT_ROUNDS,
            "" if len(holders(self._members.run.client.view, stage)) > 1 else ", and waits for another replica",
        )
        self._tasks.create_task(self._accuse(PeerToCoordinatorAccuseReplica(accused=peer, stage=stage, reason=reason)))
        self._report_view_changes()

    async def _accuse(self, accusation: PeerToCoordinatorAccuseReplica) -> None:
        try:
            await self._members.run.client.ask(accusation, Acknowledged)
        except LinkError as error:
            log.info("peer %s could not be accused: %s", accusation.accused, error)

    async def _drive(self, ask: AskToDrive) -> None:
        ranges = await self._drives.request_samples(ask)
        self._shared.report(self._engine.driving_granted, ask, ranges)

    # Time and views -------------------------------------------------------------------------------------------

    def _report_view_changes(self) -> None:
        """Report changes in the views of the run and of the stages to the engine."""
        engine = self._engine
        for peer in self._watch.take_gone():
            self._norms.forget(peer)
            self._distrusted.pop(peer, None)
            self._shared.report(engine.replica_gone, peer)
        distrusted = [peer for peer in self._distrusted if not self._is_trusted(peer)]
        if (replicas := self._watch.take_replicas(distrusted)) is not None and not engine.is_last:
            self._shared.report(engine.replicas_changed, engine.span.last + 1, replicas)
        is_closing = self._watch.is_closing(self._round)
        if is_closing and not self._is_closing:
            self._shared.report(engine.round_closing)
        self._is_closing = is_closing
        self._woken.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._engine.settings.retry_s)
            self._shared.report(self._engine.tick)
            self._report_view_changes()


class _Stopped(ShoalError):
    """Cancels the tasks of a runner that is stopped."""
