"""Scoring of one contribution: what it does to the loss, whether it is anybody's work at all, and whose.

A contribution cannot be computed again where it depends on a private optimizer, so it is applied alone, scaled as in
the round, and the loss is compared before and after on the member's own samples and on others (Gauntlet, the validators
of Templar). The same samples before and after: their differences cancel out, and chance is told from an effect by the
spread over groups of samples. A gradient is computed again instead.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.peer.training.data import Dataset, take_batch
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan
from shoal.swarm.protocol.work_scores import Finding, Gain

Indices = NDArray[np.int64]
LossFunction = Callable[[nn.Module, Tensor], Tensor]

GROUPS = 8
"""Groups into which the samples of a measurement are cut."""

_BEYOND_CHANCE = 4.0
"""Standard errors beyond which a gain is no chance: that of nothing is below or above once in 400 times each."""

_BY_CHANCE, _RANGES = 5, 5.0
"""Measurements of a loss that chance in the layers moves, and how many of their ranges another may be off: three of ten
thousand honest ones are further. By two measurements, which may be close by chance, five of a hundred would be."""

_ENDLESS = 1e29
"""Loss from which a loss is no number: a score has room for little more."""

_EMPTY = 1e-3
"""Share of the usual norm below which a contribution is no work: one of a twentieth of the work has far more."""

_SAME = 0.98
"""Cosine from which a contribution is one of an earlier round. Those of one round may be as alike, where members do
much work of the same kind."""

_SKETCH = 2**12
"""Values of a sketch, from which cosines are known to within about 0.016."""

_SKETCHES = 256
"""Sketches that are remembered, the newest ones."""

_PIECE = 2**20

FIRST_LOOKS = 3
"""Scores of each member that do not wait for the draw. One alone is often unclear, above all in a learning rate's
warm-up; whoever begins to lie later is found by the share."""


class LossMeter:
    """Loss of a model at an anchor and beside it, on samples of the run's data."""

    def __init__(self, model: nn.Module, loss: LossFunction, data: Dataset) -> None:
        """``model``: in float32, whose parameters are overwritten; ``loss``: mean over a batch, nats a token."""
        self.vector = ParameterVector(model)
        self._model, self._loss, self._data = model, loss, data
        self._device = next(model.parameters()).device

    def gain(self, anchor: Tensor, step: Tensor, indices: Indices) -> Gain:
        """Return by how much ``anchor - step``, both (n,) float32, has a lower loss than ``anchor``.

        ``indices``: of the samples, (k,), k >= 2."""
        groups = np.array_split(indices, min(GROUPS, len(indices)))
        before = self._losses(anchor, groups)
        return gain_of(before, self._losses(anchor - step, groups))

    @torch.no_grad()
    def _losses(self, values: Tensor, groups: Sequence[Indices]) -> list[float]:
        self.vector.write(values)
        was_training = self._model.training
        self._model.eval()
        batches = (take_batch(self._data, group).to(self._device) for group in groups)
        losses = [float(self._loss(self._model, batch)) for batch in batches]
        self._model.train(was_training)
        return losses

    def loss_at(self, anchor: Tensor, indices: Indices, batch: int) -> tuple[float, float]:
        """Return the mean loss of the samples at ``anchor`` as one who trains measures it, and how far chance in the
        model's layers (dropout) moves it: the range of some measurements. ``batch``: samples at once; buffers stay as
        they are."""
        self.vector.write(anchor)
        buffers = {name: one.clone() for name, one in self._model.named_buffers()}
        losses = [self._training_loss(indices, batch) for _ in range(2)]
        if losses[0] != losses[1]:
            losses += [self._training_loss(indices, batch) for _ in range(_BY_CHANCE - 2)]
        for name, buffer in self._model.named_buffers():
            buffer.copy_(buffers[name])
        return math.fsum(losses) / len(losses), max(losses) - min(losses)

    @torch.no_grad()
    def _training_loss(self, indices: Indices, batch: int) -> float:
        total = 0.0
        for start in range(0, len(indices), batch):
            part = indices[start : start + batch]
            total += float(self._loss(self._model, take_batch(self._data, part).to(self._device))) * len(part)
        return total / len(indices)

    def gradient(self, anchor: Tensor, indices: Indices, batch: int) -> Tensor:
        """Return the mean gradient at ``anchor`` of the samples, (n,) float32, in batches of ``batch``."""
        self.vector.write(anchor)
        for start in range(0, len(indices), batch):
            part = indices[start : start + batch]
            loss = self._loss(self._model, take_batch(self._data, part).to(self._device))
            (loss * (len(part) / len(indices))).backward()  # type: ignore[no-untyped-call]
        parts = [
            torch.zeros(one.numel()) if one.grad is None else one.grad.detach().float().cpu().reshape(-1)
            for one in self.vector.parameters
        ]
        for one in self.vector.parameters:
            one.grad = None
        return torch.cat(parts)


def gain_of(before: Sequence[float], after: Sequence[float]) -> Gain:
    """Return the gain by the losses of groups of samples before and after. A loss that is no number is an endless
    one; where it was none before, nobody's contribution can be told from chance."""
    if not all(abs(one) < _ENDLESS for one in before):
        return Gain(mean=0.0, error=_ENDLESS)
    if not all(abs(one) < _ENDLESS for one in after):
        return Gain(mean=-_ENDLESS, error=0.0)
    gains = np.asarray(before, dtype=np.float64) - np.asarray(after, dtype=np.float64)
    error = float(gains.std(ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else _ENDLESS
    return Gain(mean=float(gains.mean()), error=error)


def effect_of(on_random: Gain, on_leased: Gain) -> Finding:
    """Return whether a contribution helps, harms, or neither beyond chance.

    What was learnt from few samples may raise the loss on others, late in training quite often. It lowers that on those
    samples, and so counts as unclear: such work is to be averaged."""
    if abs(on_random.mean) <= _BEYOND_CHANCE * on_random.error or not on_random.mean:
        return "unclear"
    if on_random.mean > 0:
        return "helps"
    return "unclear" if on_leased.mean > 0 else "harms"


def same_bytes_as(planned: PlanMember, plan: RoundPlan) -> str:
    """Return which other member of a round has committed to the very same contribution, empty for none."""
    return next((one.peer for one in plan.members if one.peer != planned.peer and one.root == planned.root), "")


def is_empty(norm: float, others: Sequence[float]) -> bool:
    """Whether a contribution of this norm is next to nothing beside those that others claim."""
    return not norm or (bool(others) and norm < _EMPTY * float(np.median(others)))


@dataclass(frozen=True)
class _Sketch:
    round: int
    peer: str
    values: Tensor


@dataclass
class Sketches:
    """Sketches of the contributions seen, by which copies are recognised: random sums of their values (count sketch).

    ``seed``: the validator's secret, or somebody could make a copy with another sketch."""

    seed: int
    _kept: deque[_Sketch] = field(default_factory=lambda: deque(maxlen=_SKETCHES))

    def copied_from(self, round_number: int, peer: str, contribution: Tensor) -> str:
        """Return which other member had the same contribution in an earlier round, empty for none; and remember it.

        ``contribution``: (n,) float32. Nobody can copy within a round, as all roots are known before anything is sent.
        """
        values = self._sketch(contribution)
        others = (one for one in self._kept if one.peer != peer and one.round < round_number)
        found = next((one.peer for one in others if _cosine(one.values, values) > _SAME), "")
        self._kept.append(_Sketch(round_number, peer, values))
        return found

    def _sketch(self, contribution: Tensor) -> Tensor:
        sketch = torch.zeros(_SKETCH)
        for piece, start in enumerate(range(0, contribution.numel(), _PIECE)):
            part = contribution[start : start + _PIECE]
            draws = torch.Generator().manual_seed((self.seed + piece) % 2**63)
            places = torch.randint(0, 2 * _SKETCH, (part.numel(),), generator=draws)
            sketch.index_add_(0, places % _SKETCH, part * (1.0 - 2.0 * (places >= _SKETCH)))
        return sketch


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = float(one.norm()) * float(other.norm())
    return float(one.dot(other)) / lengths if lengths else 0.0


def deviation(claimed: Tensor, computed: Tensor) -> float:
    """Return how far a gradient is from the one computed again, relative to that, both (n,) float32.

    Endless for a claim that is no number; 0 where the one computed again is none, as on an anchor that has diverged."""
    length = float(computed.norm())
    if not 0.0 < length < math.inf:
        return 0.0
    apart = float((claimed - computed).norm()) / length
    return apart if apart < _ENDLESS else _ENDLESS


_PRECISION = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.1}
"""How far gradients may be apart that two devices compute in the run's precision, relative to their norm."""


def tolerance(precision: str, codec_loss: float, share: float) -> float:
    """Return the most that an honest gradient may deviate from the one computed again.

    ``codec_loss``: what encoding that one loses, relative to it. A contribution carries as much from the round before,
    and its owner's part of what encoding the mean has lost, which is divided by the member's ``share`` of the mean."""
    return _PRECISION.get(precision, 0.1) + codec_loss * (2.0 + 1.0 / share)


_LOSS_PRECISION = {"float32": 0.01, "bfloat16": 0.03, "float16": 0.03}
"""How far losses may be apart that two devices compute in the run's precision, relative to the loss, or to one nat."""


def is_same_loss(claimed: float, measured: float, chance: float, precision: str) -> bool:
    """Whether a claimed loss may be the measured one. ``chance``: the range of measurements, as of ``loss_at``.

    Where none can be measured, as the anchor has diverged, any may."""
    if not abs(measured) < _ENDLESS:
        return True
    allowed = _LOSS_PRECISION.get(precision, 0.03) * max(abs(measured), 1.0) + _RANGES * chance
    return abs(claimed - measured) <= allowed


def draw(
    members: Sequence[str], doubted: Collection[str], looks: Mapping[str, int], share: float, rng: random.Random
) -> list[str]:
    """Return members to score, in three parts, each in random order: all ``doubted`` ones, those that had fewer than
    ``FIRST_LOOKS`` scores, then ``share`` of all on average.

    Without the second part a run of few members would look at a newcomer for the first time when it has moved the
    anchor for dozens of rounds. ``looks``: scores by member, none of those that this validator does not know."""
    first = [peer for peer in members if peer in doubted]
    new = [peer for peer in members if peer not in doubted and looks.get(peer, 0) < FIRST_LOOKS]
    expected = share * len(members)
    count = int(expected) + (rng.random() < expected - int(expected))
    drawn = rng.sample(list(members), min(count, len(members)))
    begun = [*rng.sample(first, len(first)), *rng.sample(new, len(new))]
    return [*begun, *(peer for peer in drawn if peer not in begun)]
