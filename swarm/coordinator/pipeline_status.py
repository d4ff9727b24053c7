"""A pipeline run at a glance, for people: what ``shoal status`` shows of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.swarm.coordinator.coverage import coverage_of
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus, MemberStatus, StageStatus

if TYPE_CHECKING:
    from shoal.swarm.coordinator.pipeline_spans import Spans

_MOST = 1e18
"""What a rate in a message is at most."""


def status_of(run: Spans, now_s: float) -> CoordinatorToPeerStatus:
    """As of ``now_s`` on the coordinator's clock. What all stages have in common is told as the first one has it. The
    model as a whole has no digest: its stages have theirs."""
    first = run.stages[0] if run.stages else None

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
        loss=first.loss if first else None,
        chain=first.chain if first else bytes(32),
        state_digest=None,
        elapsed_s=first.elapsed_s(now_s) if first else 0.0,
        outlook=run.say_outlook(),
        coverage=coverage_of(first.leases, samples) if first and samples else (),
        members=_members_of(run),
        stages=stages_of(run),
    )


def _members_of(run: Spans) -> tuple[MemberStatus, ...]:
    """Each as fast as it is in its fastest stage, with what it has committed in all of them. What it does is told as
    in the first stage that it is in: its rounds are those of its stages."""
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
        known = [stage.membership.members[one.peer] for stage in mine if one.peer in stage.membership.members]
        inside = [member.activity for member in known if member.alive]
        update = {
            "activity": inside[0] if inside else one.activity,
            "stages": run.spans.get(one.peer),
            "synced": bool(mine) and len(working) == len(mine),
            "tokens_per_s": 0.0 if run.phase == "waiting" else max((one.tokens_per_s for one in working), default=0.0),
            "tokens_committed": committed[one.peer],
            "share": committed[one.peer] / total if total else 0.0,
        }
        told.append(one.model_copy(update=update))
    return tuple(told)


def stages_of(run: Spans) -> tuple[StageStatus, ...]:
    """In their order."""
    capacities = [sum(_capacity(run, stage, peer) for peer in stage.working()) for stage in run.stages]
    least = min(capacities, default=0.0)
    return tuple(
        StageStatus(
            first_layer=run.boundaries[stage.stage],
            stop_layer=run.boundaries[stage.stage + 1],
            parameters_bytes=run.parameters_bytes(stage.stage),
            replicas=tuple(stage.working()),
            coming=tuple(peer for peer in run.holders(stage.stage) if peer not in stage.working()),
            tokens_per_s=_rate(run, stage),
            capacity_tokens_per_s=min(capacity, _MOST),
            tokens_in_round=stage.tokens_in_round(),
            queue=stage.queue(),
            state_digest=stage.state_digest(),
            outlook=run.say_stage_outlook(stage)[:2000],
            is_bottleneck=capacity == least < max(capacities),
        )
        for stage, capacity in zip(run.stages, capacities, strict=True)
    )


def _rate(run: Spans, stage: StageMachine) -> float:
    """What the replicas have told last is of no moment in which one waits for other stages."""
    return 0.0 if run.phase == "waiting" else min(sum(one.tokens_per_s for one in stage.working().values()), _MOST)


def _capacity(run: Spans, stage: StageMachine, peer: str) -> float:
    """Tokens a second that the peer could do in a stage if others kept it busy: as fast as its whole span."""
    shown, span = run.capabilities.get(peer), run.spans.get(peer)
    if shown is None or span is None or stage.model is None:
        return 0.0
    assert run.run.pipeline is not None
    seconds = sum(shown.layer_s[run.boundaries[span[0]] : run.boundaries[span[1] + 1]])
    return run.run.pipeline.micro_batch * stage.model.tokens_per_sample / max(seconds, 1e-9)
