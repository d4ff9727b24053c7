"""Validator: a member that follows the run, contributes nothing, and scores what others contribute.

After each committed round it draws some members by a chance that nobody else knows, fetches what they have
contributed, and reports a signed score of each. Members whose last score was bad are scored in every round."""

from __future__ import annotations

import logging
import random
import secrets
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import zeros
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.recipes import Recipe
from shoal.peer.session import Readiness, Session
from shoal.peer.training.data import DataAbout, run_order
from shoal.peer.training.parameters import ParameterVector
from shoal.peer.validation.scoring import (
    Indices,
    LossMeter,
    Sketches,
    deviation,
    draw,
    effect_of,
    is_empty,
    same_bytes_as,
    tolerance,
)
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.norm_claims import total_norm
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.messages import CoordinatorToPeerWork
from shoal.swarm.protocol.rounds import PlanMember, Verdict
from shoal.swarm.protocol.work_scores import BAD, WorkScore
from shoal.swarm.sample_ranges import from_wire

log = logging.getLogger(__name__)

_SAMPLES = 128
"""Samples of either kind by which a contribution is scored."""

_ATTEMPTS = 3
"""Attempts to get a contribution before it counts as withheld, and only when the next round is committed. A member that
always says that it is busy withholds it, too."""

_ATTEMPT_SHARE = 0.25
"""Longest attempt, as a share of a round's time: a member that shows its contribution slowly on purpose takes a
validator no more from the others, and so many attempts fit into one round."""


class FollowedAnchors:
    """Local work of a validator: none. Keeps the newest anchor and the one before, (n,) float32 each."""

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector
        self.before: Tensor | None = None
        self._newest: Tensor | None = None

    def step(self, samples: int, lr_factor: float) -> None:
        """Do nothing: a validator has no samples."""

    def contribution(self, anchor: Tensor) -> RangeReader:
        """Return zeros, which are offered with no weight."""
        return TensorReader(zeros(self._vector.elements))

    def reset_optimizer(self) -> None:
        """Do nothing: there is no inner optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        """Forget the anchor before: it may be another run's past."""
        self.before, self._newest = None, anchor.clone()

    def continue_from(self, anchor: Tensor) -> None:
        """Keep ``anchor``, and the one before it."""
        assert self._newest is not None, "restart_from() comes first"
        room = self.before if self.before is not None else torch.empty_like(anchor)
        self.before, self._newest = self._newest, room.copy_(anchor)


@dataclass
class _Task:
    """A member's contribution that is to be scored."""

    verdict: Verdict
    planned: PlanMember
    attempts: int = 0


class Validator:
    """Follows a run in a session and scores contributions, until the run ends."""

    def __init__(self, connection: RunConnection, session: Session, recipe: Recipe, device: torch.device) -> None:
        run = session.run_file
        # In float32 whatever the run's precision: one contribution may change a loss by little.
        model = recipe.build_model(run.run.seed).float().to(device)
        data = recipe.training_data()
        self._session, self._run = session, run
        self._network, self._member = connection.network, connection.members.run
        self._emit = connection.emit
        self._meter = LossMeter(model, recipe.loss, data)
        self._layout = self._meter.vector.layout
        self._data_length = len(data)
        self._order = run_order(run, len(data), recipe.tokens_per_sample)
        self._rng = random.SystemRandom()
        self._sketches = Sketches(secrets.randbits(62))
        self._tasks: deque[_Task] = deque()
        self._doubted: set[str] = set()
        self._ended_s = 0.0
        """Unix time at which the last round ended that members were drawn of."""
        self._attempt_s = run.round.patience_s
        self._anchors: FollowedAnchors

        def follow(vector: ParameterVector) -> FollowedAnchors:
            self._anchors = FollowedAnchors(vector)
            return self._anchors

        about = DataAbout(recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample, len(data))
        setup = TrainingSetup(model, None, about, recipe.config(), make_work=follow, on_committed=self._draw)
        session.start(setup)

    def run(self) -> None:
        """Score contributions until the run ends or the session is stopped. Raises as ``Session.settle``."""
        while (readiness := self._session.settle()) is not Readiness.OVER:
            if readiness is Readiness.NOT_YET:
                continue
            if not self._tasks:
                self._session.follow()
                continue
            with suppress(Interrupted):
                self._score_next(self._tasks.popleft())

    def _draw(self, verdict: Verdict) -> None:
        """Draw members of a round that was just committed; what is left of the round before is scored no more."""
        plan = verdict.plan
        assert plan is not None
        for task in self._tasks:
            if task.attempts >= _ATTEMPTS and self._member.client.is_member(task.planned.peer):
                withheld = _bare_score(task.verdict, task.planned.peer).model_copy(update={"finding": "withheld"})
                with suppress(Interrupted):
                    self._report(withheld)
        lasted_s = min(verdict.ended_s - self._ended_s, self._run.round.max_s)
        self._attempt_s = max(_ATTEMPT_SHARE * lasted_s, self._run.round.patience_s)
        self._ended_s = verdict.ended_s
        by_peer = {one.peer: one for one in plan.members}
        chosen = draw(list(by_peer), self._doubted, self._run.audit.work_share, self._rng)
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
        fetching = self._member.contribution_of(verdict.round, task.planned, self._layout, self._attempt_s)
        try:
            contribution = self._network.call(fetching, interruptible=True)
        except LinkError as error:
            log.debug("round %d: %s did not show its contribution: %s", verdict.round, peer, error)
            task.attempts += 1
            self._tasks.append(task)
            self._session.follow()
            return
        self._report(self._score(task, work, anchor, contribution))

    def _report(self, score: WorkScore) -> None:
        (self._doubted.add if score.finding in BAD else self._doubted.discard)(score.peer)
        with suppress(LinkError):
            self._network.call(self._member.report_score(score), interruptible=True)
        gains = {"random": score.on_random, "leased": score.on_leased}
        about = {f"gain_{name}": gain.mean for name, gain in gains.items() if gain is not None}
        self._emit("scored", round=score.round, peer=score.peer, finding=score.finding, **about)

    def _score(self, task: _Task, work: CoordinatorToPeerWork, anchor: Tensor, contribution: Tensor) -> WorkScore:
        """Score a contribution that is here."""
        verdict, planned, plan = task.verdict, task.planned, task.verdict.plan
        assert plan is not None
        bare = _bare_score(verdict, planned.peer)
        others = [total_norm(one.norms) for one in plan.members if one.peer != planned.peer]
        if is_empty(float(contribution.norm()), others):
            return bare.model_copy(update={"finding": "empty"})
        leased = np.concatenate([self._order.indices(start, stop) for start, stop in from_wire(work.ranges)])
        share = planned.weight_tokens / sum(one.weight_tokens for one in plan.members)
        twin = same_bytes_as(planned, plan)
        if self._run.algorithm == "virtual_batch" and not twin:
            return self._score_gradient(bare, work, anchor, contribution, leased, share)
        copied = twin or self._sketches.copied_from(verdict.round, planned.peer, contribution)
        step = contribution * (planned.factor * share * self._outer_lr)
        seed = secrets.randbits(62)
        on_random = self._meter.gain(anchor, step, random_samples(seed, self._data_length, leased))
        on_leased = self._meter.gain(anchor, step, self._some_of(leased))
        finding = "copied" if copied else effect_of(on_random, on_leased)
        measured = {"finding": finding, "on_random": on_random, "on_leased": on_leased, "seed": seed}
        return bare.model_copy(update={**measured, "copied_from": copied})

    def _score_gradient(
        self,
        bare: WorkScore,
        work: CoordinatorToPeerWork,
        anchor: Tensor,
        contribution: Tensor,
        leased: Indices,
        share: float,
    ) -> WorkScore:
        """Score a gradient by computing it again."""
        computed = self._meter.gradient(anchor, leased, self._run.inner.batch_samples)
        apart = deviation(contribution, computed)
        allowed = tolerance(self._run.inner.precision, self._codec_loss(computed), share)
        if work.carries:
            return bare.model_copy(update={"deviation": apart})
        return bare.model_copy(
            update={"finding": "helps" if apart <= allowed else "wrong gradient", "deviation": apart}
        )

    def _codec_loss(self, values: Tensor) -> float:
        """Return what encoding a contribution loses, relative to its norm."""
        grid = LeafGrid(values.numel(), CodecMap(self._run.format_map([(one.name, one.shape) for one in self._layout])))
        decoded = torch.empty_like(values)
        for leaf in range(grid.leaves):
            start, stop = grid.bounds(leaf)
            codec = grid.codec(leaf)
            codec.decode(codec.encode(values[start:stop]), stop - start, decoded[start:stop])
        return deviation(decoded, values)

    @property
    def _outer_lr(self) -> float:
        """Factor with which the outer optimizer's first step applies a mean."""
        outer = self._run.outer
        return 1.0 if outer.optimizer == "adamw" else outer.lr

    def _some_of(self, indices: Indices) -> Indices:
        return indices if len(indices) <= _SAMPLES else np.array(self._rng.sample(list(indices), _SAMPLES))


def random_samples(seed: int, length: int, leased: Indices) -> Indices:
    """Return samples of data of this length that are not ``leased``, or any where all are."""
    drawn = np.random.default_rng(seed).integers(0, length, 4 * _SAMPLES)
    others = drawn[~np.isin(drawn, leased)]
    return (others if len(others) >= 2 else drawn)[:_SAMPLES]


def _bare_score(verdict: Verdict, peer: str) -> WorkScore:
    return WorkScore(round=verdict.round, chain=verdict.chain, peer=peer, finding="unclear")
