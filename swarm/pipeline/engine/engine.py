"""State machine of one peer of a pipeline: events and moments in, effects (``effects.py``) out.

It covers one peer that holds the stages ``first..last``, one round after the other; a peer that holds stage 0 also
drives micro-batches of its own. The executor answers effects with events: one computation at a time, everything else in
any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from shoal.swarm.pipeline.engine.claims import Claims
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
    MicroBatch,
    MicroBatchDone,
    PeerNote,
    Reply,
    Send,
    TensorOffer,
)
from shoal.swarm.pipeline.engine.gradient_outbox import GradientOutbox, KeptGradient
from shoal.swarm.pipeline.engine.micro_batch_source import MicroBatchSource
from shoal.swarm.pipeline.engine.routing import Router
from shoal.swarm.sample_ranges import Ranges


class Backpressure:
    """FIFO wait queue for peers refused with ``busy``.

    It reserves a slot for the next one, for ``hold_s``, so that none starves.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._queue: dict[str, None] = {}
        self._until_s: dict[str, float] = {}

    def reserved(self, now_s: float, besides: str = "") -> int:
        """Number of slots reserved for peers other than ``besides``."""
        self._until_s = {peer: until_s for peer, until_s in self._until_s.items() if now_s < until_s}
        return sum(peer != besides for peer in self._until_s)

    def has_reservation(self, peer: str) -> bool:
        return peer in self._until_s

    def enqueue(self, peer: str) -> None:
        """Queue a refused peer, once."""
        self._queue.setdefault(peer)

    def remove(self, peer: str) -> None:
        """Remove a peer that got a slot or is gone."""
        self._queue.pop(peer, None)
        self._until_s.pop(peer, None)

    def reserve_next(self, free: int, now_s: float) -> list[str]:
        """Reserve ``free`` slots, less those already reserved; returns the peers to notify."""
        called = []
        while self._queue and self.reserved(now_s) < free:
            peer = next(iter(self._queue))
            del self._queue[peer]
            self._until_s[peer] = now_s + self._hold_s
            called.append(peer)
        return called


@dataclass(frozen=True)
class StageSpan:
    """Consecutive stages that a peer holds, ``last`` inclusive."""

    first: int
    last: int


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a stage engine.

    ``micro_batch``: samples. ``retry_s``: delay before a failed action is repeated. ``patience_s``: the run's; a
    gradient is kept for so long for a recipient that does not fetch it.
    """

    stages: int
    micro_batch: int
    max_in_flight: int
    retry_s: float
    patience_s: float


Phase = Literal["input", "forward", "away", "gradient", "backward"]
"""Phase of a job: its input is being fetched; forward is due or running; the output is to be sent or was sent; the
gradient is being fetched; backward is due or running."""


@dataclass
class Job:
    """One micro-batch under way here; there is never more than one job for it.

    ``upstreams``: peers that offered its input and want the gradient, each with its newest offer; ``peer``: the next
    hop that has the output, since ``since_attempt``; None: the output has to be sent.
    """

    number: int
    micro_batch: MicroBatch
    from_stage: int
    is_own: bool = False
    phase: Phase = "input"
    upstreams: dict[str, TensorOffer] = field(default_factory=dict)
    fetch: Fetch | None = None
    peer: str | None = None
    attempt: int = 0
    since_attempt: int = 0
    avoid: set[str] = field(default_factory=set)
    wait_until_s: float = 0.0

    def stages(self, span: StageSpan) -> range:
        return range(self.from_stage, span.last + 1)


class StageEngine:
    """Engine of the stages ``span``; the ``router`` chooses the next stage's replicas.

    Every public method is named for an event and returns the effects, to be executed in their order.
    """

    def __init__(self, span: StageSpan, settings: EngineSettings, router: Router, first_number: int = 0) -> None:
        """``first_number``: tensors are offered under numbers from here on. Earlier and later processes of the same
        peer must not use the same numbers within a round."""
        assert 0 <= span.first <= span.last < settings.stages
        self.span = span
        self.settings = settings
        self._router = router
        self._number = first_number
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self._round: int | None = None
        self._past = -1
        self._next_peers: Set[str] = frozenset()
        self._running: Compute | None = None
        self._was_backward = False
        self._start_empty(-1)

    def _start_empty(self, number: int) -> None:
        settings = self.settings
        self._jobs: dict[MicroBatch, Job] = {}
        self._attempts: dict[MicroBatch, int] = {}
        self._answers: dict[tuple[MicroBatch, str], tuple[int, Answer]] = {}
        self._claims = Claims()
        self._outbox = GradientOutbox(settings.max_in_flight, settings.patience_s)
        self._backpressure = Backpressure(settings.retry_s)
        self._source = MicroBatchSource(number, settings.micro_batch, settings.retry_s)

    @property
    def is_last(self) -> bool:
        return self.span.last == self.settings.stages - 1

    @property
    def kept_activations(self) -> int:
        """Micro-batches accepted or begun whose backward is not done: at most ``max_in_flight``."""
        return len(self._jobs)

    def counted(self, stage: int) -> Ranges:
        """Sample ranges in this stage's accumulated gradient: its contribution to the round."""
        return self._claims.counted(stage)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way here that may still count."""
        return not self._jobs and self._running is None

    # The round ------------------------------------------------------------------------------------------------

    def round_opened(self, number: int, now_s: float) -> list[Effect]:
        """Round ``number`` begins or, if it had begun, needs more samples after all."""
        if self._round == number:
            self._source.is_closing = False
        else:
            self._drop_round()
            self._round = number
            self._start_empty(number)
        return self._go_on(now_s)

    def round_closing(self, now_s: float) -> list[Effect]:
        """All samples are leased: finish what is under way, accept others' work as before."""
        self._source.is_closing = True
        return self._go_on(now_s)

    def round_over(self, now_s: float) -> list[Effect]:
        """The round has a verdict, or the coordinator gave this peer up and its samples to others."""
        self._drop_round()
        return self._go_on(now_s)

    def driving_granted(self, ask: AskToDrive, ranges: Ranges, now_s: float) -> list[Effect]:
        """Answer to ``ask``; empty when there is nothing to drive now."""
        if ask.round == self._round:
            own = {job.micro_batch for job in self._jobs.values() if job.is_own}
            self._source.granted(ask, ranges, own, now_s)
        return self._go_on(now_s)

    def claim_answered(self, claim: Claim, granted: Ranges, now_s: float) -> list[Effect]:
        """Answer to ``claim``; ``granted``: the ranges that are this peer's now."""
        if claim.micro_batch.round == self._round:
            job = self._jobs.get(claim.micro_batch)
            is_wanted = job is not None and claim.stage in job.stages(self.span)
            self._emit(*self._claims.answered(claim, granted, is_wanted))
        return self._go_on(now_s)

    # Other peers ----------------------------------------------------------------------------------------------

    def offered(self, offer: TensorOffer, now_s: float) -> list[Effect]:
        """Offer from another peer; the first effect is the ``Reply``."""
        self._now_s = now_s
        take = self._take_activation if offer.kind == "activation" else self._take_gradient
        answer, effects = take(offer)
        self._emit(Reply(offer, answer), *effects)
        return self._go_on(now_s)

    def noted(self, note: PeerNote, now_s: float) -> list[Effect]:
        """Note from another peer."""
        self._now_s = now_s
        match note.kind:
            case "cancel":
                self._cancelled(note)
            case "abandoned":
                self._was_abandoned(note)
            case "taken":
                self._emit(*self._outbox.settled(note.peer, note.micro_batch, note.attempt))
            case "slot_free":
                self._use_slot(note.peer)
        return self._go_on(now_s)

    def tensor_arrived(self, fetch: Fetch, now_s: float) -> list[Effect]:
        """The fetched tensor is here and checked."""
        self._now_s = now_s
        job = self._job_of(fetch)
        if job is not None:
            if fetch.kind == "activation":
                job.phase = "forward"
            else:
                job.phase = "backward"
                self._router.finished(fetch.peer, (job.micro_batch, job.attempt), now_s)
                stage = self.span.last + 1
                self._emit(PeerNote("taken", fetch.peer, job.micro_batch, stage, job.attempt))
            job.fetch = None
        return self._go_on(now_s)

    def fetch_failed(self, fetch: Fetch, now_s: float) -> list[Effect]:
        """The fetch failed, after the executor's own retries."""
        self._now_s = now_s
        job = self._job_of(fetch)
        if job is not None and fetch.kind == "activation":
            attempt = job.upstreams[fetch.peer].attempt
            self._lose_upstream(job, fetch.peer)
            self._emit(PeerNote("abandoned", fetch.peer, job.micro_batch, job.from_stage - 1, attempt))
        elif job is not None:
            self._fail(job)
        return self._go_on(now_s)

    def refused(self, send: Send, answer: Answer, now_s: float) -> list[Effect]:
        """A sent offer was answered by ``busy`` or ``outdated``."""
        self._now_s = now_s
        if send.kind == "gradient":
            if answer == "outdated":
                self._emit(*self._outbox.settled(send.peer, send.micro_batch, send.attempt))
            else:
                self._outbox.failed(send)
        elif (job := self._awaiting(send.peer, send.micro_batch, send.attempt)) is not None:
            self._router.refused(send.peer, (job.micro_batch, job.attempt), now_s)
            self._avoid(job, send.peer)
        return self._go_on(now_s)

    def send_failed(self, send: Send, now_s: float) -> list[Effect]:
        """A sent offer was not answered; it may have arrived."""
        self._now_s = now_s
        if send.kind == "gradient":
            self._outbox.failed(send)
        elif (job := self._awaiting(send.peer, send.micro_batch, send.attempt)) is not None:
            self._fail(job)
        return self._go_on(now_s)

    def replicas_changed(self, stage: int, rates: Mapping[str, float | None], now_s: float) -> list[Effect]:
        """Replicas of a stage now, each with its planned micro-batches a second, or None."""
        self._now_s = now_s
        self._router.set_replicas(stage, rates, now_s)
        if stage == self.span.last + 1:
            self._next_peers = frozenset(rates)
            for job in self._jobs.values():
                if job.peer is not None and job.peer not in rates and job.phase == "away":
                    self._give_up_on(job)
        return self._go_on(now_s)

    def replica_gone(self, peer: str, now_s: float) -> list[Effect]:
        """A peer died or restarted: what was sent to it is lost, and it wants nothing any more."""
        self._now_s = now_s
        self._router.retire(peer)
        self._next_peers -= {peer}
        self._answers = {key: answer for key, answer in self._answers.items() if key[1] != peer}
        self._outbox.gone(peer)
        self._backpressure.remove(peer)
        for job in list(self._jobs.values()):
            if job.peer == peer and job.phase in ("away", "gradient"):
                self._avoid(job, peer)
            # Work that it sent goes on: another driver of the same micro-batch finds it here.
            self._lose_upstream(job, peer)
        return self._go_on(now_s)

    # Computing ------------------------------------------------------------------------------------------------

    def computed(self, compute: Compute, now_s: float) -> list[Effect]:
        """A computation is done, whether its result is still wanted or not."""
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
        """Act on time alone: send overdue micro-batches to another replica, repeat what had to wait."""
        self._now_s = now_s
        self._look_for_overdue()
        if self._round is not None:
            self._emit(*self._outbox.again(now_s, self.settings.retry_s))
        return self._go_on(now_s)

    def _go_on(self, now_s: float) -> list[Effect]:
        """Finish every event: do what can be done now, and return all effects."""
        self._now_s = now_s
        if self._round is not None:
            self._send_waiting()
            self._compute_next()
            if self.is_last:
                self._claim_ahead()
            free = self._free_slots()
            for peer in self._backpressure.reserve_next(free, now_s):
                self._emit(PeerNote("slot_free", peer, MicroBatch(self._round, 0, 0), self.span.first, 0))
            if self.span.first == 0:
                self._emit(*self._source.ask(free, now_s))
        effects, self._effects = self._effects, []
        return effects

    def _emit(self, *effects: Effect) -> None:
        self._effects += effects

    # The round's state ----------------------------------------------------------------------------------------

    def _drop_round(self) -> None:
        if self._round is not None:
            self._emit(DropRound(self._round))
            self._past = max(self._past, self._round)
            for job in self._jobs.values():
                self._withdraw(job)
            self._round = None
            self._start_empty(-1)

    def _out_of_round(self, micro_batch: MicroBatch) -> Answer | None:
        """Answer to a micro-batch of another round, which may be new; None for the open round."""
        if micro_batch.round == self._round:
            return None
        newest = self._past if self._round is None else self._round
        return "outdated" if micro_batch.round <= newest else "busy"

    # Offers of other peers ------------------------------------------------------------------------------------

    def _take_activation(self, offer: TensorOffer) -> tuple[Answer, list[Effect]]:
        micro_batch, sender = offer.micro_batch, offer.sender
        if (early := self._out_of_round(micro_batch)) is not None:
            return early, []
        if not max(1, self.span.first) <= offer.stage <= self.span.last:
            return "outdated", []
        known, answer = self._answers.get((micro_batch, sender), (0, "outdated"))
        if offer.attempt <= known:
            return (answer if offer.attempt == known else "outdated"), []
        answer, effects = self._place(offer)
        self._answers[micro_batch, sender] = offer.attempt, answer
        return answer, effects

    def _place(self, offer: TensorOffer) -> tuple[Answer, list[Effect]]:
        """Answer a new attempt; anything already here of its micro-batch serves it too."""
        micro_batch, sender, now_s = offer.micro_batch, offer.sender, self._now_s
        kept = self._outbox.find(micro_batch, offer.stage)
        if kept is not None:
            return "accepted", [self._outbox.offer(kept, sender, offer.attempt, now_s)]
        job = self._jobs.get(micro_batch)
        if job is not None and job.from_stage == offer.stage:
            job.upstreams[sender] = offer
            fetch = job.fetch if job.phase == "input" else None
            if fetch is not None and fetch.peer == sender and fetch.number != offer.number:
                return "accepted", [
                    self._fetch_input(job, offer)
                ]  # the sender restarted and keeps the tensor under another number
            return "accepted", []
        if job is not None:
            return "busy", []  # it entered by another stage, and must finish there first
        is_full = self._free_slots() <= self._backpressure.reserved(now_s, besides=sender)
        # A driver with samples of its own takes others' only in a slot reserved for them.
        has_own = self._source.has_more and not self._backpressure.has_reservation(sender)
        if is_full or has_own:
            self._backpressure.enqueue(sender)
            return "busy", []
        self._backpressure.remove(sender)
        job = self._new_job(micro_batch, offer.stage)
        job.upstreams[sender] = offer
        return "accepted", [self._fetch_input(job, offer)]

    def _take_gradient(self, offer: TensorOffer) -> tuple[Answer, list[Effect]]:
        if (early := self._out_of_round(offer.micro_batch)) is not None:
            return early, []
        job = self._jobs.get(offer.micro_batch)
        if job is None or job.peer != offer.sender or offer.attempt > job.attempt or offer.attempt < job.since_attempt:
            return "outdated", []
        if job.phase != "away":
            return ("accepted" if job.fetch is not None else "outdated"), []
        job.phase = "gradient"
        job.fetch = Fetch("gradient", offer.sender, offer.number, job.number, offer.micro_batch, self.span.last)
        return "accepted", [job.fetch, *self._claims.ask(job.micro_batch, job.stages(self.span))]

    def _cancelled(self, note: PeerNote) -> None:
        self._emit(*self._outbox.settled(note.peer, note.micro_batch, note.attempt))
        if self._out_of_round(note.micro_batch) is not None:
            return
        known, _ = self._answers.get((note.micro_batch, note.peer), (0, "outdated"))
        if note.attempt < known:
            return
        self._answers[note.micro_batch, note.peer] = note.attempt, "outdated"
        job = self._jobs.get(note.micro_batch)
        if job is None or note.peer not in job.upstreams:
            return
        if job.upstreams.keys() == {note.peer} and not job.is_own and job.phase != "backward":
            self._abandon(job)
        else:
            self._lose_upstream(job, note.peer)

    # Jobs -----------------------------------------------------------------------------------------------------

    def _free_slots(self) -> int:
        return self.settings.max_in_flight - len(self._jobs)

    def _new_job(self, micro_batch: MicroBatch, from_stage: int) -> Job:
        assert micro_batch not in self._jobs
        assert self._free_slots() > 0
        job = Job(self._number, micro_batch, from_stage)
        self._number += 1
        self._jobs[micro_batch] = job
        return job

    def _job_of(self, fetch: Fetch) -> Job | None:
        """Job of a fetch; None if it was given up or is fetched from another peer by now."""
        job = self._jobs.get(fetch.micro_batch)
        return job if job is not None and job.fetch == fetch else None

    def _fetch_input(self, job: Job, offer: TensorOffer) -> Fetch:
        job.fetch = Fetch("activation", offer.sender, offer.number, job.number, job.micro_batch, job.from_stage)
        return job.fetch

    def _lose_upstream(self, job: Job, peer: str) -> None:
        """Forget an upstream; if the input was being fetched from it, fetch it from another one."""
        job.upstreams.pop(peer, None)
        if job.fetch is None or job.phase != "input" or job.fetch.peer != peer:
            return
        if job.upstreams:
            self._emit(self._fetch_input(job, next(iter(job.upstreams.values()))))
        else:
            self._abandon(job)

    def _abandon(self, job: Job) -> None:
        """Give up a job that nobody wants and whose gradient was not counted."""
        if job.peer is not None:
            self._give_up_on(job)
        del self._jobs[job.micro_batch]
        self._emit(*self._claims.give_up(job.micro_batch), Drop(job.number))

    # The next hop ---------------------------------------------------------------------------------------------

    def _awaiting(self, peer: str, micro_batch: MicroBatch, attempt: int) -> Job | None:
        """Job whose newest attempt is at that peer and unanswered; else None."""
        job = self._jobs.get(micro_batch)
        is_it = job is not None and (job.peer, job.attempt, job.phase) == (peer, attempt, "away")
        return job if is_it else None

    def _was_abandoned(self, note: PeerNote) -> None:
        if (job := self._awaiting(note.peer, note.micro_batch, note.attempt)) is not None:
            self._fail(job)

    def _fail(self, job: Job) -> None:
        """The next hop gets no further with the output, or its gradient cannot be fetched."""
        assert job.peer is not None
        peer = job.peer
        self._router.failed(peer, (job.micro_batch, job.attempt), self._now_s)
        self._give_up_on(job)
        self._avoid(job, peer)

    def _give_up_on(self, job: Job) -> None:
        """Cancel the job's attempt at its next hop; nothing from there counts any more."""
        if job.peer is not None and job.phase in ("away", "gradient"):
            self._withdraw(job)
            self._emit(PeerNote("cancel", job.peer, job.micro_batch, self.span.last + 1, job.attempt))
            job.phase, job.fetch, job.peer = "away", None, None

    def _withdraw(self, job: Job) -> None:
        """Have the router stop waiting for the job's attempt."""
        if job.peer is not None and job.phase in ("away", "gradient"):
            self._router.withdrawn(job.peer, (job.micro_batch, job.attempt))

    def _avoid(self, job: Job, peer: str) -> None:
        job.phase, job.fetch, job.peer = "away", None, None
        job.avoid.add(peer)
        job.wait_until_s = self._now_s

    def _send_waiting(self) -> None:
        """Send outputs that have no next hop; where no replica can take one now, try again later."""
        for job in self._jobs.values():
            if job.phase != "away" or job.peer is not None or self._now_s < job.wait_until_s:
                continue
            peer = self._router.pick(self.span.last + 1, self._now_s, job.avoid)
            if peer is None:
                job.avoid.clear()
                job.wait_until_s = self._now_s + self.settings.retry_s
            else:
                self._send_to(job, peer)
                job.since_attempt = job.attempt

    def _use_slot(self, peer: str) -> None:
        """Send the first waiting output to a peer that reserved a slot for it."""
        for job in self._jobs.values():
            if job.phase == "away" and job.peer is None and peer in self._next_peers:
                self._send_to(job, peer)
                job.since_attempt = job.attempt
                return

    def _send_to(self, job: Job, peer: str) -> None:
        attempt = self._attempts[job.micro_batch] = self._attempts.get(job.micro_batch, 0) + 1
        job.peer, job.attempt = peer, attempt
        self._router.sent(peer, (job.micro_batch, attempt), self._now_s)
        self._emit(Send("activation", peer, job.micro_batch, self.span.last + 1, attempt, job.number))

    def _look_for_overdue(self) -> None:
        """Send overdue outputs to another replica or, without one, again to the same: free if it still has it."""
        for micro_batch, attempt in self._router.overdue(self._now_s):
            job = self._jobs.get(micro_batch)
            if job is None or job.attempt != attempt or job.peer is None or job.phase != "away":
                continue
            peer = job.peer
            other = self._router.pick(self.span.last + 1, self._now_s, {peer})
            if other is not None:
                self._fail(job)
            else:
                self._router.failed(peer, (micro_batch, attempt), self._now_s)
                self._send_to(job, peer)

    # What is computed next ------------------------------------------------------------------------------------

    def _compute_next(self) -> None:
        """Alternate forward and backward (1F1B) while both are due: bursts would leave the neighbours idle."""
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
        """Begin the oldest forward; else drive a new micro-batch, unless other peers wait for the slot."""
        for job in self._jobs.values():
            if job.phase == "forward":
                self._forward(job)
                return True
        if self._free_slots() <= self._backpressure.reserved(self._now_s):
            return False
        micro_batch = self._source.next(self._jobs)
        if micro_batch is None:
            return False
        job = self._new_job(micro_batch, 0)
        job.is_own, job.phase = True, "forward"
        self._forward(job)
        return True

    def _may_go_back(self, job: Job) -> bool:
        has_room = job.is_own or self._outbox.has_room(self._now_s)
        return has_room and self._claims.is_settled(job.micro_batch, job.stages(self.span))

    def _forward(self, job: Job) -> None:
        self._running = ComputeForward(job.number, job.micro_batch, job.from_stage)
        self._was_backward = False
        self._emit(self._running)

    def _claim_ahead(self) -> None:
        """Claim in the last stage for the next forward.

        As late as hides the answer's round trip: claimed samples are driven again when this peer dies.
        """
        for job in self._jobs.values():
            if job.phase == "forward":
                self._emit(*self._claims.ask(job.micro_batch, job.stages(self.span)))
                if self._running is None or self._running.job != job.number:
                    return

    def _backward(self, job: Job) -> None:
        if not job.is_own:
            self._emit(*self._outbox.make_room(self._now_s))
        accumulate = self._claims.count(job.micro_batch, job.stages(self.span))
        self._running = ComputeBackward(job.number, job.micro_batch, job.from_stage, accumulate)
        self._was_backward = True
        self._emit(self._running)

    def _hand_back(self, job: Job) -> None:
        del self._jobs[job.micro_batch]
        if job.is_own:
            self._source.finished(job.micro_batch)
            self._emit(Drop(job.number), MicroBatchDone(job.micro_batch))
            return
        kept = KeptGradient(job.number, job.micro_batch, job.from_stage)
        self._outbox.add(kept)
        for peer, offer in job.upstreams.items():
            self._emit(self._outbox.offer(kept, peer, offer.attempt, self._now_s))
