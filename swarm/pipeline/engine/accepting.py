"""What a pipeline's peer does with the offers of others: every micro-batch is under way here once at most."""

from __future__ import annotations

from shoal.swarm.pipeline.engine.effects import Answer, Effect, Fetch, Note, Offer
from shoal.swarm.pipeline.engine.hops import Hops


class Accepting(Hops):
    """Activations from the stage before, gradients from the one behind."""

    def _take_activation(self, offer: Offer) -> tuple[Answer, list[Effect]]:
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

    def _place(self, offer: Offer) -> tuple[Answer, list[Effect]]:
        """A new attempt. What we have of its micro-batch, by whatever way, serves it, too."""
        micro_batch, sender, now_s = offer.micro_batch, offer.sender, self._now_s
        handback = self._handbacks.find(micro_batch, offer.stage)
        if handback is not None:
            return "accepted", [self._handbacks.offer(handback, sender, offer.attempt, now_s)]
        job = self._jobs.get(micro_batch)
        if job is not None and job.from_stage == offer.stage:
            job.upstreams[sender] = offer
            fetch = job.fetch if job.phase == "input" else None
            if fetch is not None and fetch.peer == sender and fetch.number != offer.number:
                return "accepted", [self._fetch_input(job, offer)]  # it began anew, and keeps it elsewhere now
            return "accepted", []
        if job is not None:
            return "busy", []  # it came in by another stage; when that one is done, not when there is room
        is_full = self._free_places() <= self._rooms.held(now_s, besides=sender)
        # Who has samples of its own to drive is there for others only when they have nobody else.
        has_own = self._driving.has_more and not self._rooms.is_called(sender)
        if is_full or has_own:
            self._rooms.refused(sender)
            return "busy", []
        self._rooms.leave(sender)
        job = self._new_job(micro_batch, offer.stage)
        job.upstreams[sender] = offer
        return "accepted", [self._fetch_input(job, offer)]

    def _take_gradient(self, offer: Offer) -> tuple[Answer, list[Effect]]:
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

    def _cancelled(self, note: Note) -> None:
        self._emit(*self._handbacks.settled(note.peer, note.micro_batch, note.attempt))
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
