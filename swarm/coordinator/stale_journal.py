"""Refusal to go on from a journal that lacks a verdict which a member knows: an older copy, or a lost end.

Whoever goes on from there would end rounds a second time. The proof is a verdict of this run with the host's own
signature, so nobody else can make one up. The verdict of the round that is open here can be taken over, if what it
committed is known; else the coordinator has to stop, and to be started from a newer copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import check_verdict

if TYPE_CHECKING:
    from shoal.swarm.coordinator.round_scope import RoundScope


def check_ours(verdict: Verdict, run_hash: bytes, host_key: bytes) -> None:
    """Raises ``WireError`` when this host has not given it, or in another run."""
    check_verdict(verdict, host_key)
    if verdict.run_hash != run_hash:
        raise WireError("this verdict was given in another run")


def is_known(state: RoundScope, verdict: Verdict) -> bool:
    """Whether its round has ended here, too. A member of an abandoned history starts afresh by itself."""
    return verdict.round < state.round.number


def taken_over(state: RoundScope, verdict: Verdict, now_s: float) -> VerdictGiven | None:
    """The event that makes it ours; None when too much is missing.

    Which samples it commits only the plan's event says, so that has to be here; and nobody's may be lost, as the
    verdict does not say whose. An aborted one commits none: leases are as they were, and a lease that is not known here
    is of a member that has to start afresh."""
    if verdict.round != state.round.number or verdict.previous_chain != state.chain:
        return None
    if verdict.anchor_version != state.anchor_version + verdict.committed:
        return None
    if verdict.committed:
        plan = state.round.plan
        if plan is None or verdict.plan != plan or verdict.tokens != sum(one.weight_tokens for one in plan.members):
            return None
    return VerdictGiven(verdict=verdict, elapsed_s=state.elapsed_s(now_s), lost=())
