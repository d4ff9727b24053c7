"""Runner of the stage engine: executes its effects on the event loop and reports what comes back as its events.

Computations go to the training thread, which takes one task after the other; the engine has at most one of them out.
The training thread reports a result to the engine itself (``next_at_once``), so that the next task need not wait for
the event loop, which executes the other effects when its turn comes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from shoal.compression.formats import CodecError
from shoal.peer.member.memberships import Memberships, scope_of
from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline.claims import ClaimQueue, DriveRequests
from shoal.peer.pipeline.mailbox import StageMailbox, StageShapes
from shoal.peer.pipeline.tasks import AttentionTask, BackwardTask, ComputeResult, ForgetTask, ForwardTask, Task
from shoal.peer.pipeline.tensor_io import Staging
from shoal.peer.pipeline.tensor_store import TensorStore, offer_of
from shoal.peer.pipeline.view_watch import ViewWatch
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
from shoal.swarm.protocol.messages import Acknowledged, PeerToPeerNote
from shoal.swarm.sample_ranges import Ranges

Do = Callable[[Iterable[Effect | ComputeResult]], None]


class SharedEngine:
    """Stage engine shared by two threads: the event loop and, for results, the training thread.

    ``do``: executes effects on the loop, in the engine's order; a result comes before its consequences. ``begin``:
    takes the next computation, on the training thread itself.
    """

    def __init__(self, engine: StageEngine, do: Do, begin: Callable[[Compute], None]) -> None:
        self._engine = engine
        self._do, self._begin = do, begin
        self._lock = threading.RLock()
        self._behind: deque[Effect | ComputeResult] = deque()
        """Results from the training thread and their consequences; the loop executes them before anything newer."""
        self._is_behind = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    # On the loop ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind to the running loop, before any event."""
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Execute what follows from results handed in, until cancelled."""
        while True:
            await self._is_behind.wait()
            self._is_behind.clear()
            with self._lock:
                self._catch_up()

    def wake(self) -> None:
        """Wake the loop after ``hand_in``."""
        self._is_behind.set()

    def tell(self, event: Callable[..., list[Effect]], *arguments: object) -> None:
        """Report an event to the engine and execute the effects."""
        with self._lock:
            self._catch_up()
            self._do(event(*arguments, self._loop.time()))

    def offered(self, offer: TensorOffer) -> Answer:
        with self._lock:
            self._catch_up()
            reply, *effects = self._engine.offered(offer, self._loop.time())
            assert isinstance(reply, Reply)
            self._do(effects)
        return reply.answer

    def noted(self, note: PeerNote) -> None:
        self.tell(self._engine.noted, note)

    def _catch_up(self) -> None:
        while self._behind:
            self._do([self._behind.popleft()])

    # On the training thread -----------------------------------------------------------------------------------

    def hand_in(self, made: ComputeResult) -> None:
        """Report a result to the engine. The loop has to be woken afterwards (``wake``)."""
        with self._lock:
            self._behind.append(made)
            for effect in self._engine.computed(made.compute, self._loop.time()):
                if isinstance(effect, ComputeForward | ComputeBackward):
                    self._begin(effect)
                else:
                    self._behind.append(effect)


log = logging.getLogger(__name__)


class StageRunner:
    """Runner of one span: ``run`` lasts from entering its stages, which ``members`` has joined, until ``close``."""

    def __init__(self, members: Memberships, engine: StageEngine, shapes: StageShapes, staging: Staging) -> None:
        self._members = members
        self._engine = engine
        self._shared = SharedEngine(engine, self._execute, self._begin)
        self._shapes = shapes
        self._node = members.run.node
        self._deadlines = members.run.client.deadlines
        self._tensors = TensorStore(self._node, staging)
        self._drives = DriveRequests(members.run.client)
        self._watch = ViewWatch(members, engine.span)
        offered, noted = self._shared.offered, self._shared.noted
        self._inbox = StageMailbox(self._node, engine.span, shapes, self._tensors, offered, noted)
        self._lines: dict[int, ClaimQueue] = {
            stage: ClaimQueue(members.stages[stage].client, self._claim_answered)
            for stage in range(engine.span.first, engine.span.last + 1)
        }
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._jobs: set[int] = set()
        """Jobs that were not dropped."""
        self._due: deque[Task] = deque()
        self._woken = asyncio.Event()
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._round = -1
        self._is_closing = False
        self.trouble = ""
        """Reason why a result cannot be sent, as it is infinite or NaN; else empty."""
        self._tasks: asyncio.TaskGroup

    @property
    def in_flight(self) -> int:
        """Micro-batches under way here; from any thread."""
        return self._engine.kept_activations

    async def run(self) -> None:
        """Take part until ``close``."""
        self._shared.open()
        self._inbox.open()
        try:
            with suppress(_Over):
                async with task_scope() as self._tasks:
                    self._tasks.create_task(self._shared.run())
                    for line in self._lines.values():
                        self._tasks.create_task(line.run())
                    self._tasks.create_task(self._watch.run(self._look))
                    self._tasks.create_task(self._tick())
                    self._tasks.create_task(self._end())
        except Exception as error:
            self._failure = error  # the training thread may be waiting for something to do
            self._woken.set()
            raise
        finally:
            self._inbox.close()
            self._tensors.drop_all()

    async def _end(self) -> None:
        await self._over.wait()
        raise _Over

    def close(self) -> None:
        self._over.set()

    # The training thread --------------------------------------------------------------------------------------

    async def open_round(self, number: int) -> None:
        """Begin a round whose anchor is in place; earlier results are of no use."""
        self._round, self._is_closing = number, False
        self._shared.tell(self._engine.round_opened, number)
        self._look()

    async def end_round(self) -> None:
        """End the round: there is a verdict, or the work here is lost."""
        self._shared.tell(self._engine.round_over)

    def next_at_once(self, made: ComputeResult | None) -> Task | None:
        """Report a result and get the next task, on the training thread; None: ask ``next_task``.

        After a result the loop has to be woken (``wake``).
        """
        if made is not None:
            self._shared.hand_in(made)
        if not self._due or self._failure is not None or self._reason() is not Attention.NOTHING:
            return None
        self._members.run.progress.has_work = True
        return self._due.popleft()

    async def next_task(self) -> Task:
        """Wait for the next task."""
        progress = self._members.run.progress
        while True:
            self._woken.clear()
            reason = self._reason()
            progress.has_work = bool(self._due) and reason is Attention.NOTHING  # till it asks again
            if self._failure is not None:
                raise self._failure
            if reason is not Attention.NOTHING:
                return AttentionTask(reason)
            if self._due:
                return self._due.popleft()
            if self._engine.is_settled:
                self._watch.say_idle()
            await self._woken.wait()

    def wake(self) -> None:
        """Wake the loop after a result from the training thread."""
        self._shared.wake()

    def _reason(self) -> Attention:
        found = self._watch.attention(self._round)
        return Attention.SPOILT if found is Attention.NOTHING and self.trouble else found

    def _take(self, made: ComputeResult) -> None:
        job = made.compute.job
        if made.tensor is not None and job in self._jobs:
            kind: TensorKind = "activation" if isinstance(made.compute, ComputeForward) else "gradient"
            self._tensors.made(job, kind, made.tensor, made.targets)
        if self._engine.is_settled:  # perhaps the last one of the batch: the coordinator waits to hear that
            self._watch.tell_progress()

    def _put(self, task: Task) -> None:
        self._due.append(task)
        self._woken.set()

    def _forget_round(self) -> None:
        """Drop all tasks and tensors of the round."""
        for fetch in self._fetches.values():
            fetch.cancel()
        waiting = [task.compute for task in self._due if isinstance(task, ForwardTask | BackwardTask)]
        self._due.clear()
        self._jobs.clear()
        self.trouble = ""
        self._inbox.forget()
        self._tensors.drop_all()
        self._put(ForgetTask(None))
        for compute in waiting:
            self._shared.tell(self._engine.computed, compute)

    # Effects --------------------------------------------------------------------------------------------------

    def _execute(self, effects: Iterable[Effect | ComputeResult]) -> None:
        for effect in effects:
            match effect:
                case ComputeResult():
                    self._take(effect)
                case Send():
                    self._tasks.create_task(self._send(effect))
                case PeerNote():
                    self._tasks.create_task(self._note(effect))
                case Fetch():
                    self._begin_fetch(effect)
                case Claim(stage=stage) | Release(stage=stage):
                    self._lines[stage].put(effect)
                case ComputeForward() | ComputeBackward():
                    self._begin(effect)
                    self._woken.set()
                case Drop():
                    self._drop(effect.job)
                case DropRound():
                    self._forget_round()
                case AskToDrive():
                    self._tasks.create_task(self._drive(effect))
                case MicroBatchDone():
                    self._watch.driven += effect.micro_batch.samples
                case Reply():
                    raise AssertionError("an answer that nobody asked for")

    def _begin(self, compute: Compute) -> None:
        """Queue a computation whose inputs are here; on either thread."""
        if isinstance(compute, ComputeForward):
            self._jobs.add(compute.job)
            self._due.append(ForwardTask(compute, *self._tensors.take_input(compute.job)))
        else:
            self._due.append(BackwardTask(compute, self._tensors.take_gradient(compute.job)))

    def _drop(self, job: int) -> None:
        if fetch := self._fetches.get(job):
            fetch.cancel()
        self._jobs.discard(job)
        self._tensors.drop(job)
        self._put(ForgetTask(job))

    async def _send(self, send: Send) -> None:
        engine = self._engine
        try:
            parcel = await self._tensors.parcel(send.number, send.kind)
        except CodecError as error:
            if send.number in self._jobs:  # sending it once more would end in the same
                self.trouble = f"the {send.kind} of a micro-batch cannot be sent: {error}"
                self._woken.set()
            return
        if parcel is None:
            return
        wait_s, scope = self._deadlines.request_s, scope_of(send.stage)
        try:
            await self._node.ask(send.peer, offer_of(send, parcel), Acknowledged, wait_s, scope)
        except StaleWork:
            self._shared.tell(engine.refused, send, "outdated")
        except (Busy, WireError) as error:  # the latter, too, from one that has not entered its stage yet
            log.debug("%s does not take %s of %s: %s", send.peer, send.kind, send.micro_batch, error)
            self._shared.tell(engine.refused, send, "busy")
        except LinkError as error:
            log.debug("%s was not offered %s of %s: %s", send.peer, send.kind, send.micro_batch, error)
            self._shared.tell(engine.send_failed, send)

    async def _note(self, note: PeerNote) -> None:
        of = note.micro_batch
        message = PeerToPeerNote(
            kind=note.kind, round=of.round, start=of.start, stop=of.stop, stage=note.stage, attempt=note.attempt
        )
        with suppress(LinkError):  # nobody needs it for a result
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
            await self._tensors.fetch(fetch, self._inbox.offer_for(fetch), self._deadlines.request_s)
            if self._engine.is_last:
                _, targets = self._tensors.take_input(fetch.job)
                await in_thread(self._shapes.check_targets, targets, fetch.micro_batch.samples)
        except LinkError as error:
            log.debug("%s of %s cannot be had from %s: %s", fetch.kind, fetch.micro_batch, fetch.peer, error)
            self._shared.tell(self._engine.fetch_failed, fetch)
        else:
            self._shared.tell(self._engine.tensor_arrived, fetch)

    async def _drive(self, ask: AskToDrive) -> None:
        ranges = await self._drives.ask(ask)
        self._shared.tell(self._engine.driving_granted, ask, ranges)

    def _claim_answered(self, claim: Claim, granted: Ranges) -> None:
        self._shared.tell(self._engine.claim_answered, claim, granted)

    # Time and views -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Report what has changed in the views of the run and the stages to the engine."""
        engine = self._engine
        for peer in self._watch.take_gone():
            self._shared.tell(engine.replica_gone, peer)
        if (replicas := self._watch.take_replicas()) is not None and not engine.is_last:
            self._shared.tell(engine.replicas_changed, engine.span.last + 1, replicas)
        is_closing = self._watch.is_closing(self._round)
        if is_closing and not self._is_closing:
            self._shared.tell(engine.round_closing)
        self._is_closing = is_closing
        self._woken.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._engine.settings.retry_s)
            self._shared.tell(self._engine.tick)
            self._look()


class _Over(ShoalError):
    """Ends a runner's tasks."""
