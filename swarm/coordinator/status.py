"""The run at a glance, for people: what ``shoal status`` shows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.swarm.coordinator.divergence import warning_of
from shoal.swarm.coordinator.lease_ledger import coverage_of
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus

if TYPE_CHECKING:
    from shoal.swarm.coordinator.state import RunState


def status_of(state: RunState, now_s: float, outlook: str) -> CoordinatorToPeerStatus:
    """As of ``now_s`` on the coordinator's clock. ``outlook``: what it waits for."""
    samples = state.model.samples if state.model else None
    closing = state.round.phase == "closing"
    return CoordinatorToPeerStatus(
        run=state.run.run.name,
        run_hash=state.run.hash,
        round=state.round.number,
        phase=state.round.phase,
        closes_in_s=max(0.0, state.round.closes_s - now_s) if closing else None,
        anchor_version=state.anchor_version,
        rounds_committed=state.rounds_committed,
        rounds_aborted=state.rounds_aborted,
        rounds_undone=state.rounds_undone,
        tokens_committed=state.tokens_committed,
        tokens_in_round=state.tokens_in_round(),
        loss=state.loss,
        chain=state.chain,
        state_digest=state.state_digest(),
        elapsed_s=state.elapsed_s(now_s),
        outlook=outlook,
        warning=warning_of(state.history),
        coverage=coverage_of(state.leases, samples) if samples else (),
        members=state.membership.status(state.anchor_version, state.state_digest(), state.round.number),
    )
