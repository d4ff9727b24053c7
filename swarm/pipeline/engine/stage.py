"""One peer of a pipeline as a pure state machine: events and moments in, effects out (``effects.py``).

It covers one peer that holds the stages ``first..last``, one round after the other; whoever holds stage 0 drives.
Whoever executes the effects answers them with events; computations one at a time, all else as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.swarm.coordinator.lease_ledger import Ranges
from shoal.swarm.pipeline.engine.accepting import Accepting
from shoal.swarm.pipeline.engine.effects import (
    Answer,
    AskToDrive,
    Claim,
    Compute,
    ComputeBackward,
    ComputeForward,
    Done,
    Drop,
    DropRound,
    Effect,
    Fetch,
    MicroBatch,
    Note,
    Offer,
    Reply,
    Send,
)
from shoal.swarm.pipeline.engine.gradient_outbox import Handback
from shoal.swarm.pipeline.engine.hops import Job, NextHop, Settings, Span


class StageEngine(Accepting):
    """The events, and what is computed next. Taking offers is in ``accepting.py``, sending on in ``hops.py``.

    Every method named for an event returns the effects, to be executed in their order.
    """

    def __init__(self, span: Span, settings: Settings, router: NextHop, first_number: int = 0) -> None:
        """``first_number``: tensors are offered under numbers from here on; other processes of the same peer, before
        and after this one, must not use the same ones in a round."""
        super().__init__(span, settings, router, first_number)
        self._running: Compute | None = None
        self._was_backward = False

    @property
    def kept_activations(self) -> int:
        """Micro-batches whose forward was accepted or begun, and whose backward is not done: at most
        ``max_in_flight``."""
        return len(self._jobs)

    @property
    def kept_gradients(self) -> int:
        """Gradients that are kept for the one before: at most ``max_in_flight``."""
        return len(self._handbacks)

    def counted(self, stage: int) -> Ranges:
        """The samples in this stage's accumulated gradient: what it brings to the round."""
        return self._claims.counted(stage)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way here that may still count."""
        return not self._jobs and self._running is None

    # The round ------------------------------------------------------------------------------------------------

    def round_opened(self, number: int, now_s: float) -> list[Effect]:
        """It begins; or, if it had begun, more samples are needed after all."""
        if self._round == number:
            self._driving.is_closing = False
        else:
            self._drop_round()
            self._round = number
            self._start_empty(number)
        return self._go_on(now_s)

    def round_closing(self, now_s: float) -> list[Effect]:
        """The batch is given out. What is under way is finished, and others' work is taken as before."""
        self._driving.is_closing = True
        return self._go_on(now_s)

    def round_over(self, now_s: float) -> list[Effect]:
        """There is a verdict, of whatever kind; or the coordinator gave up on us, and all that we had is others'."""
        self._drop_round()
        return self._go_on(now_s)

    def driving_granted(self, ask: AskToDrive, ranges: Ranges, now_s: float) -> list[Effect]:
        """The answer to ``ask``; empty when there is nothing to drive now."""
        if ask.round == self._round:
            own = {job.micro_batch for job in self._jobs.values() if job.is_own}
            self._driving.granted(ask, ranges, own, now_s)
        return self._go_on(now_s)

    def claim_answered(self, claim: Claim, granted: Ranges, now_s: float) -> list[Effect]:
        """``granted``: the part of it that is ours now."""
        if claim.micro_batch.round == self._round:
            job = self._jobs.get(claim.micro_batch)
            is_wanted = job is not None and claim.stage in job.stages(self.span)
            self._emit(*self._claims.answered(claim, granted, is_wanted))
        return self._go_on(now_s)

    # Other peers ----------------------------------------------------------------------------------------------

    def offered(self, offer: Offer, now_s: float) -> list[Effect]:
        """The first effect is the ``Reply``."""
        self._now_s = now_s
        take = self._take_activation if offer.kind == "activation" else self._take_gradient
        answer, effects = take(offer)
        self._emit(Reply(offer, answer), *effects)
        return self._go_on(now_s)

    def noted(self, note: Note, now_s: float) -> list[Effect]:
        self._now_s = now_s
        match note.kind:
            case "cancel":
                self._cancelled(note)
            case "abandoned":
                self._was_abandoned(note)
            case "taken":
                self._emit(*self._handbacks.settled(note.peer, note.micro_batch, note.attempt))
            case "room":
                self._use_room(note.peer)
        return self._go_on(now_s)

    def tensor_arrived(self, fetch: Fetch, now_s: float) -> list[Effect]:
        self._now_s = now_s
        job = self._job_of(fetch)
        if job is not None:
            if fetch.kind == "activation":
                job.phase = "forward"
            else:
                job.phase = "backward"
                self._router.finished(fetch.peer, (job.micro_batch, job.attempt), now_s)
                stage = self.span.last + 1
                self._emit(Note("taken", fetch.peer, job.micro_batch, stage, job.attempt))
            job.fetch = None
        return self._go_on(now_s)

    def fetch_failed(self, fetch: Fetch, now_s: float) -> list[Effect]:
        """After whatever tries the executor thought right."""
        self._now_s = now_s
        job = self._job_of(fetch)
        if job is not None and fetch.kind == "activation":
            attempt = job.upstreams[fetch.peer].attempt
            self._lose_upstream(job, fetch.peer)
            self._emit(Note("abandoned", fetch.peer, job.micro_batch, job.from_stage - 1, attempt))
        elif job is not None:
            self._fail(job)
        return self._go_on(now_s)

    def refused(self, send: Send, answer: Answer, now_s: float) -> list[Effect]:
        """``busy`` or ``outdated`` was the answer."""
        self._now_s = now_s
        if send.kind == "gradient":
            if answer == "outdated":
                self._emit(*self._handbacks.settled(send.peer, send.micro_batch, send.attempt))
            else:
                self._handbacks.failed(send)
        elif (job := self._awaiting(send.peer, send.micro_batch, send.attempt)) is not None:
            self._router.refused(send.peer, (job.micro_batch, job.attempt), now_s)
            self._avoid(job, send.peer)
        return self._go_on(now_s)

    def send_failed(self, send: Send, now_s: float) -> list[Effect]:
        """No answer, so it may have got there or not."""
        self._now_s = now_s
        if send.kind == "gradient":
            self._handbacks.failed(send)
        elif (job := self._awaiting(send.peer, send.micro_batch, send.attempt)) is not None:
            self._fail(job)
        return self._go_on(now_s)

    def replicas_changed(self, stage: int, rates: Mapping[str, float | None], now_s: float) -> list[Effect]:
        """Who holds it now, with the micro-batches a second that the plan expects of each, or None."""
        self._now_s = now_s
        self._router.set_replicas(stage, rates, now_s)
        if stage == self.span.last + 1:
            self._next_peers = frozenset(rates)
            for job in self._jobs.values():
                if job.peer is not None and job.peer not in rates and job.phase == "away":
                    self._give_up_on(job)
        return self._go_on(now_s)

    def replica_gone(self, peer: str, now_s: float) -> list[Effect]:
        """The peer is dead, or began anew: whatever it had of ours is lost, and whatever it wanted not wanted."""
        self._now_s = now_s
        self._router.retire(peer)
        self._next_peers -= {peer}
        self._answers = {key: answer for key, answer in self._answers.items() if key[1] != peer}
        self._handbacks.gone(peer)
        self._rooms.leave(peer)
        for job in list(self._jobs.values()):
            if job.peer == peer and job.phase in ("away", "gradient"):
                self._avoid(job, peer)
            # What is under way goes on: who drives it again, and comes to us, finds it.
            self._lose_upstream(job, peer)
        return self._go_on(now_s)

    # Computing ------------------------------------------------------------------------------------------------

    def computed(self, compute: Compute, now_s: float) -> list[Effect]:
        """It is done, whether anybody still wants it or not."""
        self._now_s = now_s
        if compute == self._running:
            self._running = None
        job = self._jobs.get(compute.micro_batch)
        if job is not None and job.number == compute.job:
            if isinstance(compute, ComputeForward):
                job.phase = "backward" if self.is_last else "away"
            else:
                self._hand_back(job)
        return self._go_on(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Whatever time decides: what is overdue is sent to another replica; what had to wait is tried again."""
        self._now_s = now_s
        self._look_for_overdue()
        if self._round is not None:
            self._emit(*self._handbacks.again(now_s, self.settings.retry_s))
        return self._go_on(now_s)

    # ----------------------------------------------------------------------------------------------------------

    def _hand_back(self, job: Job) -> None:
        del self._jobs[job.micro_batch]
        if job.is_own:
            self._driving.finished(job.micro_batch)
            self._emit(Drop(job.number), Done(job.micro_batch))
            return
        handback = Handback(job.number, job.micro_batch, job.from_stage)
        self._handbacks.add(handback)
        for peer, offer in job.upstreams.items():
            self._emit(self._handbacks.offer(handback, peer, offer.attempt, self._now_s))

    def _drop_round(self) -> None:
        if self._round is not None:
            self._emit(DropRound(self._round))
            self._end()

    def _go_on(self, now_s: float) -> list[Effect]:
        """After every event: whatever can be done now is."""
        self._now_s = now_s
        if self._round is not None:
            self._send_waiting()
            self._compute_next()
            if self.is_last:
                self._claim_ahead()
            free = self._free_places()
            for peer in self._rooms.call(free, now_s):
                self._emit(Note("room", peer, MicroBatch(self._round, 0, 0), self.span.first, 0))
            if self.span.first == 0:
                self._emit(*self._driving.ask(free, now_s))
        effects, self._effects = self._effects, []
        return effects

    def _compute_next(self) -> None:
        """One forward, one backward (1F1B) while there are both: what goes on in bursts leaves others idle before and
        after."""
        if self._running is None:
            first, second = self._go_forward, self._go_back
            if not self._was_backward:
                first, second = second, first
            if not first():
                second()

    def _go_back(self) -> bool:
        for job in self._jobs.values():
            if job.phase == "backward" and self._may_go_back(job):
                self._backward(job)
                return True
        return False

    def _go_forward(self) -> bool:
        """The oldest; else one of our own, unless others wait for the place."""
        for job in self._jobs.values():
            if job.phase == "forward":
                self._forward(job)
                return True
        if self._free_places() <= self._rooms.held(self._now_s):
            return False
        micro_batch = self._driving.next(self._jobs)
        if micro_batch is None:
            return False
        job = self._new_job(micro_batch, 0)
        job.is_own, job.phase = True, "forward"
        self._forward(job)
        return True

    def _may_go_back(self, job: Job) -> bool:
        has_room = job.is_own or self._handbacks.has_room(self._now_s)
        return has_room and self._claims.is_settled(job.micro_batch, job.stages(self.span))

    def _forward(self, job: Job) -> None:
        self._running = ComputeForward(job.number, job.micro_batch, job.from_stage)
        self._was_backward = False
        self._emit(self._running)

    def _claim_ahead(self) -> None:
        """In the last stage, for what is next: as late as hides the answer's way, for the samples of a claim are driven
        again when its peer dies."""
        for job in self._jobs.values():
            if job.phase == "forward":
                self._emit(*self._claims.ask(job.micro_batch, job.stages(self.span)))
                if self._running is None or self._running.job != job.number:
                    return

    def _backward(self, job: Job) -> None:
        if not job.is_own:
            self._emit(*self._handbacks.make_room(self._now_s))
        accumulate = self._claims.count(job.micro_batch, job.stages(self.span))
        self._running = ComputeBackward(job.number, job.micro_batch, job.from_stage, accumulate)
        self._was_backward = True
        self._emit(self._running)
