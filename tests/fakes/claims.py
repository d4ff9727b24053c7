"""Claims of norms, for members of plans that no coordinator has made."""

from collections.abc import Sequence

from torch import Tensor

from shoal.compression.norms import norms_of
from shoal.swarm.averaging.norm_claims import pack, ranges
from shoal.swarm.protocol.rounds import RoundPlan


def honest(values: Tensor) -> bytes:
    """Return the honest claim of a contribution, ``(n,) float32``."""
    return pack(norms_of(values, ranges(values.numel())))


def generous(elements: int) -> bytes:
    """Return the largest possible claim of every range."""
    return pack([3.39e38] * len(ranges(elements)))


def claiming(plan: RoundPlan, claims: Sequence[bytes], factors: Sequence[float] | None = None) -> RoundPlan:
    """Return the plan with these claims. ``factors``: the members' factors in it."""
    factors = factors or [1.0] * len(claims)
    members = [
        member.model_copy(update={"norms": claim, "factor": factor})
        for member, claim, factor in zip(plan.members, claims, factors, strict=True)
    ]
    return plan.model_copy(update={"members": tuple(members)})
