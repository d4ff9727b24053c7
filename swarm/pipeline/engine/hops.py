"""What a pipeline's peer has under way, and how it goes on from hop to hop: sent, sent again, given up."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shoal.swarm.pipeline.engine.claims import Claims
from shoal.swarm.pipeline.engine.driving import Driving
from shoal.swarm.pipeline.engine.effects import Answer, Drop, Effect, Fetch, MicroBatch, Note, Offer, Send
from shoal.swarm.pipeline.engine.gradient_outbox import Handbacks
from shoal.swarm.pipeline.engine.rooms import Rooms

Key = tuple[MicroBatch, int]
"""One attempt of ours at one micro-batch."""


class NextHop(Protocol):
    """The choice of replicas (``routing.Router``)."""

    def set_replicas(self, stage: int, rates: Mapping[str, float | None], now_s: float) -> None: ...
    def pick(self, stage: int, now_s: float, avoid: Set[str] = ...) -> str | None: ...
    def sent(self, peer: str, key: Key, now_s: float) -> None: ...
    def finished(self, peer: str, key: Key, now_s: float) -> bool: ...
    def refused(self, peer: str, key: Key, now_s: float) -> bool: ...
    def withdrawn(self, peer: str, key: Key) -> bool: ...
    def failed(self, peer: str, key: Key, now_s: float) -> bool: ...
    def retire(self, peer: str) -> tuple[Key, ...]: ...
    def overdue(self, now_s: float) -> tuple[Key, ...]: ...


@dataclass(frozen=True)
class Span:
    """The stages that a peer holds, ``last`` inclusive."""

    first: int
    last: int


@dataclass(frozen=True)
class Settings:
    """``micro_batch``: samples. ``retry_s``: what could not be done is tried again after so long. ``patience_s``: the
    run's; a gradient is kept for so long for one that does not fetch it."""

    stages: int
    micro_batch: int
    max_in_flight: int
    retry_s: float
    patience_s: float


Phase = Literal["input", "forward", "away", "gradient", "backward"]
"""Its input is being fetched; it may go, or is going, forward; its output is to be sent, or sent; the gradient is being
fetched; it may go, or is going, back."""


@dataclass
class Job:
    """One micro-batch under way here; there is never more than one of it. ``upstreams``: everybody who offered its
    input and wants the gradient, with the newest offer; ``peer``: who has our output, since ``since_attempt``; None:
    it has to be sent."""

    number: int
    micro_batch: MicroBatch
    from_stage: int
    is_own: bool = False
    phase: Phase = "input"
    upstreams: dict[str, Offer] = field(default_factory=dict)
    fetch: Fetch | None = None
    peer: str | None = None
    attempt: int = 0
    since_attempt: int = 0
    avoid: set[str] = field(default_factory=set)
    wait_until_s: float = 0.0

    def stages(self, span: Span) -> range:
        return range(self.from_stage, span.last + 1)


class Hops:
    """The jobs, and their way to the next stage."""

    def __init__(self, span: Span, settings: Settings, router: NextHop, first_number: int) -> None:
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
        self._start_empty(-1)

    @property
    def is_last(self) -> bool:
        return self.span.last == self.settings.stages - 1

    def _emit(self, *effects: Effect) -> None:
        self._effects += effects

    def _end(self) -> None:
        assert self._round is not None
        self._past = max(self._past, self._round)
        for job in self._jobs.values():
            self._withdraw(job)
        self._round = None
        self._start_empty(-1)

    def _start_empty(self, number: int) -> None:
        settings = self.settings
        self._jobs: dict[MicroBatch, Job] = {}
        self._attempts: dict[MicroBatch, int] = {}
        self._answers: dict[tuple[MicroBatch, str], tuple[int, Answer]] = {}
        self._claims = Claims()
        self._handbacks = Handbacks(settings.max_in_flight, settings.patience_s)
        self._rooms = Rooms(settings.retry_s)
        self._driving = Driving(number, settings.micro_batch, settings.retry_s)

    def _out_of_round(self, micro_batch: MicroBatch) -> Answer | None:
        """What to answer when it is not of the round that is open here; we may be the last to hear of a new one."""
        if micro_batch.round == self._round:
            return None
        newest = self._past if self._round is None else self._round
        return "outdated" if micro_batch.round <= newest else "busy"

    # Jobs -----------------------------------------------------------------------------------------------------

    def _free_places(self) -> int:
        return self.settings.max_in_flight - len(self._jobs)

    def _new_job(self, micro_batch: MicroBatch, from_stage: int) -> Job:
        assert micro_batch not in self._jobs
        assert self._free_places() > 0
        job = Job(self._number, micro_batch, from_stage)
        self._number += 1
        self._jobs[micro_batch] = job
        return job

    def _job_of(self, fetch: Fetch) -> Job | None:
        """Unless it was given up, or is fetched from somebody else by now."""
        job = self._jobs.get(fetch.micro_batch)
        return job if job is not None and job.fetch == fetch else None

    def _fetch_input(self, job: Job, offer: Offer) -> Fetch:
        job.fetch = Fetch("activation", offer.sender, offer.number, job.number, job.micro_batch, job.from_stage)
        return job.fetch

    def _lose_upstream(self, job: Job, peer: str) -> None:
        """It does not want the gradient any more; and if we lack the input and it had it, we need another's."""
        job.upstreams.pop(peer, None)
        if job.fetch is None or job.phase != "input" or job.fetch.peer != peer:
            return
        if job.upstreams:
            self._emit(self._fetch_input(job, next(iter(job.upstreams.values()))))
        else:
            self._abandon(job)

    def _abandon(self, job: Job) -> None:
        """Nobody wants it from us, and its gradient has not been counted."""
        if job.peer is not None:
            self._give_up_on(job)
        del self._jobs[job.micro_batch]
        self._emit(*self._claims.give_up(job.micro_batch), Drop(job.number))

    # The next hop ---------------------------------------------------------------------------------------------

    def _awaiting(self, peer: str, micro_batch: MicroBatch, attempt: int) -> Job | None:
        """The job whose newest attempt is with that peer, which has not answered with a gradient."""
        job = self._jobs.get(micro_batch)
        is_it = job is not None and (job.peer, job.attempt, job.phase) == (peer, attempt, "away")
        return job if is_it else None

    def _was_abandoned(self, note: Note) -> None:
        if (job := self._awaiting(note.peer, note.micro_batch, note.attempt)) is not None:
            self._fail(job)

    def _fail(self, job: Job) -> None:
        """The hop that has our output does not bring it any further, or the gradient cannot be had from it."""
        assert job.peer is not None
        peer = job.peer
        self._router.failed(peer, (job.micro_batch, job.attempt), self._now_s)
        self._give_up_on(job)
        self._avoid(job, peer)

    def _give_up_on(self, job: Job) -> None:
        """Nothing that comes from there counts any more."""
        if job.peer is not None and job.phase in ("away", "gradient"):
            self._withdraw(job)
            self._emit(Note("cancel", job.peer, job.micro_batch, self.span.last + 1, job.attempt))
            job.phase, job.fetch, job.peer = "away", None, None

    def _withdraw(self, job: Job) -> None:
        """The router need not wait for it."""
        if job.peer is not None and job.phase in ("away", "gradient"):
            self._router.withdrawn(job.peer, (job.micro_batch, job.attempt))

    def _avoid(self, job: Job, peer: str) -> None:
        job.phase, job.fetch, job.peer = "away", None, None
        job.avoid.add(peer)
        job.wait_until_s = self._now_s

    def _send_waiting(self) -> None:
        """What has no next hop yet, or not any more. Where nobody takes it now, it is tried again later."""
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

    def _use_room(self, peer: str) -> None:
        """A place is held for us there."""
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
        """To another replica; where there is none, to the same one again: if it has it still, that costs nothing."""
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
