"""Bound on how far one contribution may move a round's mean, and suspects when that was too far.

A plan bounds ``weight * norm``: what a contribution adds to the weighted sum. Norms grow with local work, so they are
compared per token: ``rho`` is the usual norm of a contribution of one token, and ``rho * weight ** power`` that of one
of ``weight`` tokens. So nobody is bounded for being fast, and a light contribution may be no longer than light ones
are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any

from shoal.swarm.averaging.norm_claims import total_norm
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.rollback import CommittedRound
from shoal.swarm.coordinator.trust import (
    median_weights,
    uncounted_tokens,
    weighted_median,
)
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan
from shoal.swarm.protocol.run_file import RunFile

SLACK = 4.0
"""A contribution may be so many times as long as is usual for its weight. Of honest ones, of a small gpt with speeds of
1 : 4 and 1 : 20, data of their own, five seeds and learning rates, 60 rounds with a warm-up each, the longest was 1.4
times the usual; the rest is for new optimizers, whose first steps are large, and for other models."""

_POWER_OF_STEPS = 0.6
"""Local steps: between the square root (a random walk) and linear (a straight line). Fitted to the same runs within
each round: 0.61 to 0.74; from 0.5 to 0.7 no honest contribution was above 1.9 times the usual, with 1.0 they were at
4.3."""

_POWER_OF_GRADIENTS = -0.25
"""Mean gradients: noise falls with the square root of the samples, the gradient itself does not fall. In between, one
of a twentieth of the samples is at most 2.1 times the usual."""

ROUND_SLACK = 1.5
"""A contribution of local steps may be so many times as long as is usual for its weight in this round: nothing lags
behind here, and no honest one of the runs above was longer. So two of eight never outweigh the others."""

_FEWEST = 3
"""Members that claim a norm, from which on there is a usual one in a round."""

_EMPTY = 0.02
"""Part of the usual norm for its weight below which a contribution is no work."""

REMEMBERED_ROUNDS = 32
_RISE, _FIRST_RISE = 1.1, 2.0
"""From round to round; the second while fewer rounds than that are remembered, as a warm-up of the learning rate begins
with next to nothing. Later a linear warm-up rises by less than a tenth in half the remembered rounds, and the median of
those lags by a factor of two at most, which the slack has room for: rho need not know the schedule."""

_NEAR = 0.9
"""Part of the bound from which a contribution is suspected after a divergence."""

_LOSS_RISE = 2.0
"""Factor on the usual loss from which it is worth a warning."""


def bounded(plan: RoundPlan, run: RunFile, past: Sequence[CommittedRound], members: Mapping[str, Member]) -> RoundPlan:
    """Return the plan with its ``rho``, its kind of mean (``averaging.robust``), and each member's factor if the run
    bounds norms."""
    power = power_of(run)
    carrying = [
        one.model_copy(
            update={
                "carried_tokens": min(members[one.peer].carried_tokens, one.weight_tokens),
                "last_tokens": members[one.peer].last_tokens,
            }
        )
        for one in plan.members
    ]
    level = level_of(carrying, members, power)
    rho = next_rho(past, level)
    robust = run.averaging.robust
    is_bounded = robust != "none" and not run.averaging.secure  # masked contributions have no norms
    if is_bounded and power > 0:
        usual = usual_norm(carrying, rho, level)
        useless = {one.peer for one in carrying if is_unusual(one, usual, power)}
        uncounted = uncounted_tokens(members, {one.peer: one.weight_tokens for one in carrying}, useless)
        carrying = [one.model_copy(update={"uncounted": uncounted.get(one.peer, 0)}) for one in carrying]
    if is_bounded:
        factors = factors_of(carrying, rho, level, power)
        carrying = [one.model_copy(update={"factor": factor}) for one, factor in zip(carrying, factors, strict=True)]
    if robust == "clip":
        carrying = [one.model_copy(update={"usual_norm": norm_bound(one, 1.0, power) / SLACK}) for one in carrying]
    update: dict[str, Any] = {"members": tuple(carrying), "rho": rho}
    if run.collective is not None:
        update["mean"] = "gather"
    elif robust in ("clip", "trimmed"):
        update["mean"] = robust
    return plan.model_copy(update=update)


def power_of(run: RunFile) -> float:
    """Return the exponent by which norms grow with weight under the run's algorithm."""
    return _POWER_OF_GRADIENTS if run.algorithm == "virtual_batch" else _POWER_OF_STEPS


def level_of(planned: Sequence[PlanMember], members: Mapping[str, Member], power: float) -> float:
    """Return the usual norm at one token: the median over the planned members by credit; 0 where they claim nothing."""
    weights = median_weights(members, {one.peer: one.weight_tokens for one in planned})
    counted = [(one, total_norm(one.norms)) for one in planned if one.peer in weights]
    return weighted_median([(norm / one.weight_tokens**power, weights[one.peer]) for one, norm in counted if norm > 0])


def next_rho(past: Sequence[CommittedRound], level: float) -> float:
    """Return the ``rho`` of a round at this level after the committed ones; 0 while nobody has claimed a norm."""
    known = [one for one in past[-REMEMBERED_ROUNDS:] if one.rho > 0]
    if not known or not level:
        return known[-1].rho if known else level
    levels = [one.level for one in known[1 - REMEMBERED_ROUNDS :] if one.level > 0]
    usual, before = median([*levels, level]), known[-1].rho
    if len(known) < REMEMBERED_ROUNDS:
        # The low median: a first round that claims next to nothing bounds others only while it is half of all rounds.
        return min(max(usual, level), _FIRST_RISE * max(before, median_low(levels or [0.0])))
    return min(usual, _RISE * before)


def norm_bound(member: PlanMember, rho: float, power: float) -> float:
    """Return the bound on the norm of a member's contribution; infinite for a ``rho`` of 0.

    A member that does less than in its last committed round brings what the encoding lost then, scaled to the new
    weight: weight times norm may be as large as it was allowed to be then.

    Work that earlier rounds left out comes on top, up to as much again: leaving it out on purpose gains at most a
    factor of two."""
    if not rho:
        return math.inf
    weight, last = float(member.weight_tokens), float(member.last_tokens)
    usual = math.pow(weight, power)
    if last > weight:
        usual = max(usual, last / weight * math.pow(last, power))
    return SLACK * rho * usual * (1 + min(member.carried_tokens / weight, 1.0))


def factor_of(member: PlanMember, rho: float, power: float) -> float:
    """Return the factor that keeps a contribution within its bound."""
    norm, bound = total_norm(member.norms), norm_bound(member, rho, power)
    return 1.0 if norm <= bound else bound / norm


def factors_of(planned: Sequence[PlanMember], rho: float, level: float, power: float) -> list[float]:
    """Return the factors of a round's members, in their order.

    Each keeps its contribution within the bound of the last rounds (``rho``), and that of local steps within the one of
    this round (``level``), too, which is narrower."""
    factors = [factor_of(one, rho, power) for one in planned]
    if _claiming(planned) < _FEWEST or power < 0:
        return factors
    here = [factor_of(one, level * ROUND_SLACK / SLACK, power) for one in planned]
    return list(map(min, factors, here))


def _claiming(planned: Sequence[PlanMember]) -> int:
    return sum(total_norm(one.norms) > 0 for one in planned)


def usual_norm(planned: Sequence[PlanMember], rho: float, level: float) -> float:
    """Return the usual norm at one token by which it is told what is unusual: that of this round may have fallen."""
    return min(rho, level) if _claiming(planned) >= _FEWEST else rho


def is_unusual(member: PlanMember, usual: float, power: float) -> bool:
    """Whether a member's claimed norm is above its bound, even if the run does not enforce that, or next to nothing.

    The latter is for its weight alone: who did more in an earlier round may be longer now, and need not be."""
    norm, weight = total_norm(member.norms), float(member.weight_tokens)
    return norm > norm_bound(member, usual, power) or (
        bool(member.norms) and norm < _EMPTY * usual * math.pow(weight, power)
    )


def nears_bound(member: PlanMember, rho: float, power: float) -> bool:
    """Whether a contribution is near its bound or above, where honest ones do not get."""
    return total_norm(member.norms) > _NEAR * norm_bound(member, rho, power)


def suspects_of(plan: RoundPlan, members: Mapping[str, Member], power: float) -> tuple[str, ...]:
    """Return the suspects in case this round turns out to be bad.

    That is, members near their bound, without credit while others have one, or that contribute for the first time
    while others have before. ``members``: as before the round is counted."""
    peers = [one.peer for one in plan.members]
    credited = any(members[peer].has_credit for peer in peers)
    older = any(members[peer].rounds_committed for peer in peers)

    def is_suspect(one: PlanMember) -> bool:
        member = members[one.peer]
        is_new = (credited and not member.has_credit) or (older and not member.rounds_committed)
        return is_new or nears_bound(one, plan.rho, power)

    return tuple(one.peer for one in plan.members if is_suspect(one))


def usual_tokens(past: Sequence[CommittedRound]) -> int:
    """Return the usual size of a round."""
    return median_low([one.tokens for one in past[-REMEMBERED_ROUNDS:]] or [0])


def usual_loss(past: Sequence[CommittedRound], loss: float | None) -> float | None:
    """Return the usual loss if this one is far above it and still rising; else None."""
    losses = [one.loss for one in past[-REMEMBERED_ROUNDS:] if one.loss is not None]
    if loss is None or len(losses) < 3:
        return None
    usual = median(losses)
    return usual if loss > losses[-1] and loss > usual + (_LOSS_RISE - 1) * abs(usual) else None
