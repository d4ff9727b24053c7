"""Offer of a member to a round, outcome of the round for it, and residual that it keeps for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import SampleRange


@dataclass(frozen=True)
class RoundOffer:
    """Contribution and claims that a member brings to a round.

    ``contribution``: (n,) float32 on the CPU; the averager may change it. ``norms``: of
    its claimed ranges (``norms.norms_of``, ``norm_claims.ranges``); who made it has looked whether they are finite."""

    round: int
    anchor_version: int
    state_digest: bytes
    contribution: Tensor
    norms: Sequence[float]
    weight_tokens: int
    ranges: tuple[SampleRange, ...]
    loss: float | None


@dataclass(frozen=True)
class Committed:
    """Apply ``mean`` (n,) float32. ``included``: our samples count as trained on; else they are in our next offer."""

    mean: Tensor
    verdict: Verdict
    included: bool


@dataclass(frozen=True)
class Aborted:
    """The round was aborted or reopened and changed nothing: keep the local work and continue training."""

    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Resync:
    """We missed something: drop the local work, join afresh and fetch the state. ``is_unusable``: what was offered was
    at fault, as it cannot be packed."""

    reason: str
    is_unusable: bool = False


Outcome = Committed | Aborted | Resync


@dataclass(frozen=True)
class CarriedResidual:
    """Residual that a member takes into its next round. ``residual``: (n,) float32;
    ``weight_tokens``: of the contributions that it stems from, 0 for none."""

    residual: Tensor
    weight_tokens: int
