"""Validator: a member that follows the run, contributes nothing, scores what others contribute, and evaluates the
model on held-out data.

After each committed round it draws some members by a chance that nobody else knows, fetches what they have
contributed, and reports a signed score of each. Members whose last score was bad are scored in every round, and those
that it does not know are scored first."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import zeros
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.recipes import Recipe
from shoal.peer.session import Readiness, Session
from shoal.peer.training.data import DataAbout
from shoal.peer.training.parameters import ParameterVector
from shoal.peer.validation.model_evaluator import ModelEvaluator
from shoal.peer.validation.scorer import Scorer, bare_score
from shoal.peer.validation.scoring import draw
from shoal.swarm.averaging.committed_contribution import PartialContribution
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.errors import LinkError, NotAdmitted, StaleWork
from shoal.swarm.protocol.amendments import amended
from shoal.swarm.protocol.evaluations import Evaluation
from shoal.swarm.protocol.rounds import PlanMember, Verdict
from shoal.swarm.protocol.work_scores import BAD, WorkScore

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Attempts to get a contribution before it counts as withheld, and only when the next round is committed. A member that
always says that it is busy withholds it, too."""

_PATIENCES = 2.0
"""Longest time for which the last evaluation is offered, in patiences of the run."""

_ATTEMPT_SHARE = 0.25
"""Longest attempt, as a share of a round's time: a member that shows its contribution slowly on purpose takes a
validator no more from the others, and so many attempts fit into one round."""


class FollowedAnchors:
    """Local work of a validator: none. Keeps the newest anchor and the one before, (n,) float32 each."""

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector
        self.before: Tensor | None = None
        self.newest: Tensor | None = None

    def step(self, samples: int, lr_factor: float) -> None:
        """Do nothing: a validator has no samples."""

    def contribution(self, anchor: Tensor) -> RangeReader:
        """Return zeros, which are offered with no weight."""
        return TensorReader(zeros(self._vector.elements))

    def reset_optimizer(self) -> None:
        """Do nothing: there is no inner optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        """Forget the anchor before: it may be another run's past."""
        self.before, self.newest = None, anchor.clone()

    def continue_from(self, anchor: Tensor) -> None:
        """Keep ``anchor``, and the one before it."""
        assert self.newest is not None, "restart_from() comes first"
        room = self.before if self.before is not None else torch.empty_like(anchor)
        self.before, self.newest = self.newest, room.copy_(anchor)


@dataclass
class _Task:
    """A member's contribution that is to be scored. ``partial``: what has come of it."""

    verdict: Verdict
    planned: PlanMember
    attempts: int = 0
    partial: PartialContribution | None = None


class Validator:
    """Follows a run in a session, scores contributions and evaluates the model, until the run ends."""

    def __init__(self, connection: RunConnection, session: Session, recipe: Recipe, device: torch.device) -> None:
        run = session.run_file
        self._rng = random.SystemRandom()
        self._scorer = Scorer(run, recipe, device, self._rng)
        self._evaluator = ModelEvaluator(run, recipe, device)
        self._evaluation: Evaluation | None = None
        """Evaluation that is still to be reported."""
        self._evaluated: int | None = None
        """Version that was evaluated last."""
        self._session, self._run = session, run
        self._network, self._member = connection.network, connection.members.run
        self._emit = connection.emit
        self._tasks: deque[_Task] = deque()
        self._doubted: set[str] = set()
        self._looks = Counter[str]()
        self._ended_s = 0.0
        """Unix time at which the last round ended that members were drawn of."""
        self._attempt_s = run.round.patience_s
        self._anchors: FollowedAnchors

        def follow(vector: ParameterVector) -> FollowedAnchors:
            self._anchors = FollowedAnchors(vector)
            return self._anchors

        length = self._scorer.data_length
        about = DataAbout(recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample, length)
        setup = TrainingSetup(
            self._scorer.model, None, about, recipe.config(), make_work=follow, on_committed=self._draw
        )
        session.start(setup)

    def run(self) -> None:
        """Score and evaluate until the run ends or the session is stopped. Raises as ``Session.settle``, and what the
        recipe's evaluation raises."""
        with self._evaluator:
            self._follow()
            if self._session.view.phase == "ended":
                self._evaluate_end()

    def _follow(self) -> None:
        while (readiness := self._session.settle()) is not Readiness.OVER:
            self._evaluate()
            if readiness is Readiness.NOT_YET:
                continue
            if not self._tasks:
                self._session.follow()
                continue
            with suppress(Interrupted):
                self._score_next(self._tasks.popleft())

    # The model ----------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Report an evaluation that is done, and begin one of the newest version if that is due.

        The first version that is seen is due, too: whoever comes late says at once how good the model is."""
        self._evaluation = self._evaluator.result() or self._evaluation
        if self._evaluation is not None:
            self._report_evaluation(self._evaluation)
        version, every = self._session.anchor[0], self._run.evaluation.every_rounds
        is_due = self._evaluated is None or (version != self._evaluated and version % every == 0)
        if is_due and self._evaluator.is_idle and self._evaluation is None:
            self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        version, digest = self._session.anchor[0], self._session.state_digest
        assert self._anchors.newest is not None, "settled"
        self._evaluated = version
        self._evaluator.begin(version, digest, self._anchors.newest)

    def _evaluate_end(self) -> None:
        """Evaluate the version with which the run has ended, unless the session is stopped meanwhile.

        Where members left before they could say which state that is, the evaluation is of no use: it is given up."""
        until_s = math.inf
        with suppress(Interrupted):
            while not (self._session.is_stopping or self._member.client.coordinator_is_away):
                if self._evaluator.is_idle and self._evaluated == self._session.anchor[0]:
                    until_s = min(until_s, time.monotonic() + _PATIENCES * self._run.round.patience_s)
                if time.monotonic() > until_s:
                    return
                self._evaluation = self._evaluator.result() or self._evaluation
                if self._evaluation is not None:
                    self._report_evaluation(self._evaluation)
                elif self._evaluator.is_idle and self._evaluated == self._session.anchor[0]:
                    return
                elif self._evaluator.is_idle:
                    self._begin_evaluation()
                self._session.wait_for_change()

    def _report_evaluation(self, evaluation: Evaluation) -> None:
        """Report an evaluation; it is kept for another try where the coordinator cannot take it now."""
        try:
            self._network.call(self._member.report_evaluation(evaluation), interruptible=True)
        except (StaleWork, NotAdmitted) as error:
            log.warning("the evaluation of version %d does not count: %s", evaluation.version, error)
        except LinkError as error:
            log.debug("the evaluation of version %d is reported later: %s", evaluation.version, error)
            return
        except Interrupted:
            return
        else:
            self._emit(
                "evaluation",
                version=evaluation.version,
                loss=evaluation.loss,
                samples=evaluation.samples,
                accuracy=evaluation.accuracy,
                seconds=evaluation.took_s,
            )
        self._evaluation = None

    # Contributions ------------------------------------------------------------------------------------------

    def _draw(self, outcome: Committed) -> None:
        """Draw members of a round that was just committed; what is left of the round before is scored no more."""
        verdict, plan = outcome.verdict, outcome.verdict.plan
        assert plan is not None
        for task in self._tasks:
            if task.attempts >= _ATTEMPTS and self._member.client.is_member(task.planned.peer):
                withheld = bare_score(task.verdict, task.planned.peer).model_copy(update={"finding": "withheld"})
                with suppress(Interrupted):
                    self._report(withheld)
        lasted_s = min(verdict.ended_s - self._ended_s, amended(self._run, verdict.amended).round.max_s)
        self._attempt_s = max(_ATTEMPT_SHARE * lasted_s, self._run.round.patience_s)
        self._ended_s = verdict.ended_s
        by_peer = {one.peer: one for one in plan.members}
        share = self._run.audit.work_share
        # Without a share nobody scores, and so members keep no contribution for it.
        chosen = draw(list(by_peer), self._doubted, self._looks, share, self._rng) if share else []
        self._tasks = deque(_Task(verdict, by_peer[peer]) for peer in chosen)

    def _score_next(self, task: _Task) -> None:
        verdict, peer = task.verdict, task.planned.peer
        anchor = self._anchors.before
        if anchor is None:
            return
        try:
            work = self._network.call(self._member.samples_of(verdict.round, peer), interruptible=True)
        except LinkError as error:
            log.warning("round %d cannot be scored: %s", verdict.round, error)
            self._tasks.clear()
            return
        self._doubted.update(work.doubted)
        if not work.ranges:
            return
        partial = task.partial or self._member.begin_contribution(self._scorer.layout)
        fetching = self._member.contribution_of(verdict.round, task.planned, partial, self._attempt_s)
        try:
            contribution = self._network.call(fetching, interruptible=True)
        except LinkError as error:
            log.debug("round %d: %s did not show its contribution: %s", verdict.round, peer, error)
            task.attempts += 1
            # Memory for one that has not come whole: with several slow members each begins anew now and then.
            if partial.leaves and all(other.partial is None for other in self._tasks):
                task.partial = partial
            self._tasks.append(task)
            self._session.follow()
            return
        task.partial = None
        self._report(self._scorer.score(verdict, task.planned, work, anchor, contribution))

    def _report(self, score: WorkScore) -> None:
        (self._doubted.add if score.finding in BAD else self._doubted.discard)(score.peer)
        self._looks[score.peer] += 1
        with suppress(LinkError):
            self._network.call(self._member.report_score(score), interruptible=True)
        gains = {"random": score.on_random, "leased": score.on_leased}
        about = {f"gain_{name}": gain.mean for name, gain in gains.items() if gain is not None}
        self._emit("scored", round=score.round, peer=score.peer, finding=score.finding, **about)
