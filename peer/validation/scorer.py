"""Scorer: turns a member's contribution to a committed round into a validator's score of it.

No network and no session: what it gets is a verdict, the anchor before it, and a contribution that was checked against
its root."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.peer.recipes import Recipe
from shoal.peer.training.data import Order, run_order
from shoal.peer.validation.scoring import (
    Indices,
    LossMeter,
    Sketches,
    deviation,
    effect_of,
    is_empty,
    is_same_loss,
    same_bytes_as,
    tolerance,
)
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.norm_claims import total_norm
from shoal.swarm.protocol.amendments import amended
from shoal.swarm.protocol.messages import CoordinatorToPeerWork
from shoal.swarm.protocol.rounds import PlanMember, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.work_scores import BAD, Finding, WorkScore
from shoal.swarm.sample_ranges import from_wire

_SAMPLES = 128
"""Samples of either kind by which a contribution is scored."""


class Scorer:
    """Scores contributions of one run. ``model``: whose parameters are overwritten; ``layout``: of its vector."""

    def __init__(self, run: RunFile, recipe: Recipe, device: torch.device, rng: random.Random) -> None:
        """``rng``: a validator's own, which nobody else knows."""
        # In float32 whatever the run's precision: one contribution may change a loss by little.
        self.model = recipe.build_model(run.run.seed).float().to(device)
        data = recipe.training_data()
        self.data_length = len(data)
        self._run, self._rng = run, rng
        self._meter = LossMeter(self.model, recipe.loss, data)
        self.layout = self._meter.vector.layout
        self._order = run_order(run, data, recipe.tokens_per_sample)
        self._sketches = Sketches(rng.getrandbits(62))

    def score(
        self, verdict: Verdict, planned: PlanMember, work: CoordinatorToPeerWork, anchor: Tensor, contribution: Tensor
    ) -> WorkScore:
        """Score a contribution, (n,) float32, as a validator reports it. ``anchor``: the one before the round."""
        plan = verdict.plan
        assert plan is not None
        bare = bare_score(verdict, planned.peer)
        others = [total_norm(one.norms) for one in plan.members if one.peer != planned.peer]
        if is_empty(float(contribution.norm()), others):
            return bare.model_copy(update={"finding": "empty"})
        leased = np.concatenate([self._order.indices(start, stop) for start, stop in from_wire(work.ranges)])
        share = planned.weight / sum(one.weight for one in plan.members)
        twin = same_bytes_as(planned, plan)
        if self._run.algorithm == "virtual_batch" and not twin:
            return self._score_gradient(bare, work, anchor, contribution, leased, share)
        copied = twin or self._sketches.copied_from(verdict.round, planned.peer, contribution)
        step = contribution * (planned.factor * share * self._outer_lr(verdict))
        seed = self._rng.getrandbits(62)
        on_random = self._meter.gain(anchor, step, random_samples(seed, self._order, leased))
        on_leased = self._meter.gain(anchor, step, self._some_of(leased))
        finding: Finding = "copied" if copied else effect_of(on_random, on_leased)
        bare, is_true = self._with_first_loss(bare, work, anchor)
        if finding not in BAD and not is_true:
            finding = "wrong loss"
        effects = {"finding": finding, "on_random": on_random, "on_leased": on_leased, "seed": seed}
        return bare.model_copy(update={**effects, "copied_from": copied})

    def _with_first_loss(self, bare: WorkScore, work: CoordinatorToPeerWork, anchor: Tensor) -> tuple[WorkScore, bool]:
        """Return the score with the loss of the first batch, if the member has named one, and whether that is true."""
        first = work.first
        if first is None:
            return bare, True
        start, stop = first.samples.start, first.samples.stop
        if not 0 < stop - start <= self._run.inner.batch_samples:
            return bare.model_copy(update={"claimed_loss": first.loss}), False  # no batch of the run's
        measured, chance = self._meter.loss_at(anchor, self._order.indices(start, stop), _SAMPLES)
        told = {"claimed_loss": first.loss, "loss": measured if abs(measured) < 1e30 else None}
        return bare.model_copy(update=told), is_same_loss(first.loss, measured, chance, self._run.inner.precision)

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
        grid = LeafGrid(values.numel(), CodecMap(self._run.format_map([(one.name, one.shape) for one in self.layout])))
        decoded = torch.empty_like(values)
        for leaf in range(grid.leaves):
            start, stop = grid.bounds(leaf)
            codec = grid.codec(leaf)
            codec.decode(codec.encode(values[start:stop]), stop - start, decoded[start:stop])
        return deviation(decoded, values)

    def _outer_lr(self, verdict: Verdict) -> float:
        """Factor with which the outer optimizer's first step applies the mean of that round."""
        outer = amended(self._run, verdict.amended).outer
        return outer.lr if outer.optimizer in ("sgd", "nesterov") else 1.0

    def _some_of(self, indices: Indices) -> Indices:
        return indices if len(indices) <= _SAMPLES else np.array(self._rng.sample(list(indices), _SAMPLES))


def random_samples(seed: int, order: Order, leased: Indices) -> Indices:
    """Return samples of the data in this order that are not ``leased``, or any where all are."""
    drawn = order.random(np.random.default_rng(seed), 4 * _SAMPLES)
    others = drawn[~np.isin(drawn, leased)]
    return (others if len(others) >= 2 else drawn)[:_SAMPLES]


def bare_score(verdict: Verdict, peer: str) -> WorkScore:
    """Return a score that has found nothing yet."""
    return WorkScore(round=verdict.round, chain=verdict.chain, peer=peer, finding="unclear")
