"""Detection of a stale journal: an older copy, or one whose end is lost, so that a member knows a verdict it lacks.

A coordinator that went on from it would end rounds a second time. The proof is a verdict of this run with the host's
own signature, which nobody else can make. If it ends the round that is open here, and it is known what it committed, it
is taken over; otherwise the coordinator has to stop, and to be started again from a newer copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.errors import DamagedRecords, WireError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import check_verdict

if TYPE_CHECKING:
    from shoal.swarm.coordinator.round_scope import RoundScope


def check_ours(verdict: Verdict, run_hash: bytes, host_key: bytes) -> None:
    """Raise ``WireError`` unless this host has given the verdict, and in this run."""
    check_verdict(verdict, host_key)
    if verdict.run_hash != run_hash:
        raise WireError("this verdict was given in another run")


def stale_journal_error(location: str, shown_round: int, open_round: int) -> DamagedRecords:
    """Make the error with which a coordinator stops. ``location``: of the journal; ``open_round``: the first round
    without a verdict in it; ``shown_round``: the one whose verdict a member has shown."""
    return DamagedRecords(
        f"{location}: this is an outdated copy: a member has the verdict of round {shown_round}, signed by this host, "
        f"and the journal ends before round {open_round}. Start again from the newest copy: the folder of the machine "
        "that hosted the run last, or its backup (shoal host RUN.toml --state BACKUP). Members wait for it"
    )


def is_known(state: RoundScope, verdict: Verdict) -> bool:
    """Return whether the verdict's round has ended here, too. A member with another history starts afresh by itself."""
    return verdict.round < state.round.number


def taken_over(state: RoundScope, verdict: Verdict, now_s: float) -> VerdictGiven | None:
    """Return the event that adopts the verdict; None if the journal lacks too much.

    For a committed round the journal has to have the plan's event, as only that says which samples it commits, and no
    member's samples may be lost, as the verdict does not say whose. An aborted round commits no samples: leases stay as
    they were, and a member with a lease that is not known here has to start afresh."""
    if verdict.round != state.round.number or verdict.previous_chain != state.chain or verdict.epoch > state.log.epoch:
        return None
    if verdict.anchor_version != state.anchor_version + verdict.committed:
        return None
    if verdict.committed:
        plan = state.round.plan
        if plan is None or verdict.plan != plan or verdict.tokens != sum(one.weight_tokens for one in plan.members):
            return None
    return VerdictGiven(verdict=verdict, elapsed_s=state.elapsed_s(now_s), lost=())
