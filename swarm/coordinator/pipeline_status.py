"""A pipeline run at a glance, for people: what ``shoal status`` shows of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.swarm.coordinator.coverage import coverage_of
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.messages import CoordinatorToPeerStatus, MemberStatus, StageStatus

if TYPE_CHECKING:
    from shoal.swarm.coordinator.pipeline_spans import Spans


def status_of(run: Spans, now_s: float) -> CoordinatorToPeerStatus:
    """As of ``now_s`` on the coordinator's clock. What all stages have in common is told as the first one has it; the
    loss is the last one's."""
    first, last = (run.stages[0], run.stages[-1]) if run.stages else (None, None)

    def common(read: Callable[[StageMachine], int]) -> int:
        return read(first) if first else 0

    samples = first.model.samples if first and first.model else None
    return CoordinatorToPeerStatus(
        run=run.run.run.name,
        run_hash=run.run.hash,
        round=run.round_number,
        phase=run.phase,
        closes_in_s=max(0.0, first.round.closes_s - now_s) if first and run.phase == "closing" else None,
        anchor_version=run.anchor_version,
        rounds_committed=common(lambda stage: stage.rounds_committed),
        rounds_aborted=common(lambda stage: stage.rounds_aborted),
        rounds_undone=common(lambda stage: stage.rounds_undone),
        tokens_committed=common(lambda stage: stage.tokens_committed),
        tokens_in_round=min((stage.tokens_in_round() for stage in run.stages), default=0),
        loss=last.loss if last else None,
        chain=first.chain if first else bytes(32),
        state_digest=None,
        elapsed_s=first.elapsed_s(now_s) if first else 0.0,
        outlook=run.say_outlook(),
        coverage=coverage_of(first.leases, samples) if first and samples else (),
        members=_members_of(run),
        stages=stages_of(run),
    )


def _members_of(run: Spans) -> tuple[MemberStatus, ...]:
    """Each as fast as it is in its fastest stage, with what it has committed in all of them."""
    committed = {
        peer: sum(
            stage.membership.members[peer].tokens_committed for stage in run.stages if peer in stage.membership.members
        )
        for peer in run.membership.members
    }
    total = sum(committed.values())
    told = []
    for one in run.membership.status(0, None):
        mine = [stage for stage in run.stages if run.holds(one.peer, stage.stage)]
        working = [stage.working()[one.peer] for stage in mine if one.peer in stage.working()]
        update = {
            "synced": bool(mine) and len(working) == len(mine),
            "tokens_per_s": max((member.tokens_per_s for member in working), default=0.0),
            "tokens_committed": committed[one.peer],
            "share": committed[one.peer] / total if total else 0.0,
        }
        told.append(one.model_copy(update=update))
    return tuple(told)


def stages_of(run: Spans) -> tuple[StageStatus, ...]:
    """In their order."""
    rates = [sum(one.tokens_per_s for one in stage.working().values()) for stage in run.stages]
    return tuple(
        StageStatus(
            first_layer=run.boundaries[stage.stage],
            stop_layer=run.boundaries[stage.stage + 1],
            parameters_bytes=run.parameters_bytes(stage.stage),
            replicas=tuple(stage.working()),
            tokens_per_s=min(rate, 1e18),
            queue=stage.queue(),
            is_bottleneck=rate == min(rates),
        )
        for stage, rate in zip(run.stages, rates, strict=True)
    )
