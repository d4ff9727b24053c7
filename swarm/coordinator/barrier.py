"""Where the stages of a pipeline wait for each other: their rounds close, are planned and end together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator.round_rules import Judgement, left_out
from shoal.swarm.coordinator.stage_scope import StageMachine
from shoal.swarm.coordinator.trust import recorded_work
from shoal.swarm.protocol.verdict_chain import tied_together
from shoal.swarm.sample_ranges import count, from_wire, merge

_OVER = "the run's time was over"
_TOO_OFTEN = 3
"""Rounds in a row that are aborted as the work of the same peer is not in the mean."""


@dataclass
class Barrier:
    """``is_staffed``: whether every stage had a replica with the run's newest state a moment ago; ``left_out``: by
    peer, how many rounds were aborted without its work since the last committed one. Not journaled."""

    is_staffed: bool = False
    left_out: Counter[str] = field(default_factory=Counter)

    def take_hopeless(self) -> list[str]:
        """Whose work is never in a mean: its bytes are no numbers, or come too late. It costs everybody each round."""
        hopeless = sorted(peer for peer, times in self.left_out.items() if times >= _TOO_OFTEN)
        for peer in hopeless:
            del self.left_out[peer]
        return hopeless

    def tick(self, stages: Sequence[StageMachine], now_s: float) -> bool:
        """Whatever time decides; of stages that are all in the same round. Returns whether it has ended."""
        phases = {stage.round.phase for stage in stages}
        if phases == {"ended"}:
            return False
        if self._go_back(stages, now_s):
            return True
        if "averaging" in phases:
            assert phases == {"averaging"}, "planned together"
            return self._judge(stages, now_s)
        if "closing" in phases:
            assert phases == {"closing"}, "closed together"
            return self._plan(stages, now_s)
        return self._train(stages, now_s)

    def _go_back(self, stages: Sequence[StageMachine], now_s: float) -> bool:
        """A stage whose newest state is lost takes all others back with it."""
        due = [(back.version, stage, back) for stage in stages if (back := stage.look_for_holders(now_s)) is not None]
        if not due:
            return False
        version, lost, back = min(due, key=lambda one: one[0])
        judgement = Judgement(reason=f"stage {lost.stage}: {lost.say_return(back)}")
        keepers = {stage.stage: back.keepers for at, stage, back in due if at == version}
        _end([stage.go_back_to(version, keepers.get(stage.stage, ()), judgement) for stage in stages], stages)
        return True

    def _train(self, stages: Sequence[StageMachine], now_s: float) -> bool:
        """Time counts for the round while every stage has somebody."""
        for stage in stages:
            if stage.round.phase == "training" and not stage.membership.trainers():
                stage.round.phase = "waiting"
                stage.announcements += 1
        was_staffed = self.is_staffed
        self.is_staffed = all(stage.round.phase == "training" and stage.working() for stage in stages)
        if not self.is_staffed:
            is_late = any(stage.is_late(now_s) for stage in stages)
            return is_late and _abort(stages, _OVER)
        if not was_staffed:
            for stage in stages:
                stage.round.opened_s = now_s
        moments = [moment for stage in stages if (moment := stage.closing_moment(now_s)) is not None]
        if len(moments) == len(stages):
            for stage in stages:
                stage.close(max(moments))
        return False

    def _plan(self, stages: Sequence[StageMachine], now_s: float) -> bool:
        """All stages with exactly the batch, or none."""
        if not all(stage.membership.trainers() for stage in stages):
            return self._reopen(stages)
        if not all(stage.is_gathered(now_s) for stage in stages):
            return False
        proposals = [stage.proposal() for stage in stages]
        both = list(zip(stages, proposals, strict=True))
        short = [(stage, plan) for stage, plan in both if plan is None or not _is_whole(stage, plan)]
        for stage, proposal in short:
            stage.free_kept_samples(proposal.plan if proposal else None)
        if short and all(stage.can_reopen(now_s) for stage in stages):
            return self._reopen(stages)
        if short:
            is_late = any(stage.is_late(now_s) for stage in stages)
            return _abort(stages, _OVER if is_late else _say_short(*short[0]))
        for stage, proposal in both:
            assert proposal is not None
            stage.record(proposal)
        return False

    @staticmethod
    def _reopen(stages: Sequence[StageMachine]) -> bool:
        for stage in stages:
            stage.reopen()
        return False

    def _judge(self, stages: Sequence[StageMachine], now_s: float) -> bool:
        """Committed when all are; one that cannot be is the end of all."""
        judged = [(stage, stage.judgement(now_s)) for stage in stages]
        for stage, judgement in judged:
            if judgement is None:
                continue
            if not judgement.committed:
                return _abort(stages, f"stage {stage.stage}: {judgement.reason}", {stage.stage: judgement.failed})
            # Whoever lives would bring it to the next round: later than it counts in the other stages.
            work = recorded_work(stage.membership.members, stage.round.reports)
            if missing := left_out(stage.round, judgement.digests, work):
                self.left_out.update(missing)
                return _abort(stages, f"stage {stage.stage}: the work of {len(missing)} replicas is not in the mean")
        if any(judgement is None for _, judgement in judged):
            return False
        self.left_out.clear()
        _end([stage.verdict_of(judgement) for stage, judgement in judged if judgement is not None], stages)
        return True


def _is_whole(stage: StageMachine, proposal: f.RoundPlanned) -> bool:
    batch = stage.batch()
    return batch is not None and merge(one for ranges in proposal.ranges for one in from_wire(ranges)) == batch.ranges


def _say_short(stage: StageMachine, proposal: f.RoundPlanned | None) -> str:
    brought = sum(count(from_wire(ranges)) for ranges in proposal.ranges) if proposal else 0
    wanted, max_s = stage.goal_samples(), stage.goal().max_s
    return f"stage {stage.stage} brought {brought} of the batch's {wanted} samples in {max_s:.0f} s"


def _abort(stages: Sequence[StageMachine], reason: str, failed: dict[int, tuple[str, ...]] | None = None) -> bool:
    """``failed``: in which stage who did not deliver."""
    ends = [Judgement(reason=reason, failed=(failed or {}).get(stage.stage, ())) for stage in stages]
    _end([stage.verdict_of(end) for stage, end in zip(stages, ends, strict=True)], stages)
    return True


def _end(unsigned: Sequence[f.VerdictGiven], stages: Sequence[StageMachine]) -> None:
    loss = unsigned[-1].verdict.loss  # only the last stage has one; it is the round's
    verdicts = tied_together([fact.verdict.model_copy(update={"loss": loss}) for fact in unsigned])
    for stage, fact, verdict in zip(stages, unsigned, verdicts, strict=True):
        stage.give_verdict(fact.model_copy(update={"verdict": verdict}))
