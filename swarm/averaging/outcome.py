"""Offer of a member to a round, outcome of the round for that member, and the residual that it carries on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.compression.range_reader import RangeReader
from shoal.swarm.averaging.results import RoundMean
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import FirstBatch, SampleRange


@dataclass(frozen=True)
class RoundOffer:
    """Contribution of a member to a round, and what it claims about it.

    ``contribution``: its values stay the same until the round's outcome is known."""

    round: int
    anchor_version: int
    state_digest: bytes
    contribution: RangeReader
    weight_tokens: int
    ranges: tuple[SampleRange, ...]
    loss: float | None
    first: FirstBatch | None = None


@dataclass(frozen=True)
class Committed:
    """The round was committed: apply ``mean``.

    ``included``: our samples count as trained on; otherwise the averager adds our contribution to the next offer."""

    mean: RoundMean
    verdict: Verdict
    included: bool


@dataclass(frozen=True)
class Aborted:
    """The round was aborted or reopened: keep the local work and continue training.

    ``is_spent``: the work had left masked, so somebody may know a sum with it. It is lost: begin anew from the anchor,
    with other samples."""

    reason: str
    verdict: Verdict | None = None
    is_spent: bool = False


@dataclass(frozen=True)
class Resync:
    """This member has fallen out of step: drop the local work, join again and fetch the state.

    ``is_unusable``: because our offer is infinite or not a number."""

    reason: str
    is_unusable: bool = False


RoundOutcome = Committed | Aborted | Resync


@dataclass(frozen=True)
class CarriedResidual:
    """Residual that a member takes into its next round.

    ``residual``: (n,) float32 or bfloat16; ``weight_tokens``: the weight that it counts with, 0 if there is none."""

    residual: Tensor
    weight_tokens: int
