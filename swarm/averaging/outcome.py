"""Offer of a member to a round, outcome of the round for that member, and the residual that it carries on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import SampleRange


@dataclass(frozen=True)
class RoundOffer:
    """Contribution of a member to a round, and what it claims about it.

    ``contribution``: (n,) float32 on the CPU; the averager may overwrite it. ``norms``: norms of its claimed ranges
    (``norms.norms_of``, ``norm_claims.ranges``), known to be finite."""

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
    """The round was committed: apply ``mean``, (n,) float32.

    ``included``: our samples count as trained on; otherwise the averager adds our contribution to the next offer."""

    mean: Tensor
    verdict: Verdict
    included: bool


@dataclass(frozen=True)
class Aborted:
    """The round was aborted or reopened: keep the local work and continue training."""

    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Resync:
    """This member has fallen out of step: drop the local work, join again and fetch the state.

    ``is_unusable``: because our offer cannot be encoded."""

    reason: str
    is_unusable: bool = False


RoundOutcome = Committed | Aborted | Resync


@dataclass(frozen=True)
class CarriedResidual:
    """Residual that a member takes into its next round.

    ``residual``: (n,) float32; ``weight_tokens``: the weight that it counts with, 0 if there is none yet."""

    residual: Tensor
    weight_tokens: int
