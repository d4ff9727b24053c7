"""Barrier where the rounds of one or more scopes meet: they close, are planned and end together.

A plain run is a barrier over one scope. The stages of a pipeline are scopes of one barrier: a round is committed in all
of them or in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.round_rules import Judgement
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.round_timing import timing_of
from shoal.swarm.costs import cost_of, price_of
from shoal.swarm.protocol.rounds import PlanMember, Verdict
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.protocol.verdict_chain import tied_together
from shoal.swarm.sample_ranges import count, from_wire

_OVER = "the run's time was over"
_MAX_MISSED = 3
"""Rounds aborted in a row without the work of the same peer, until it loses its place."""


@dataclass
class Barrier:
    """``all_or_none``: the rule of a pipeline. A round needs exactly the batch in every scope, and is committed only
    with the work of all members in it. Without it (one scope) a round takes what there is.

    ``is_staffed``: whether every scope had a member with its newest state at the last tick; ``left_out``: by peer, how
    many rounds were aborted without its work since the last committed one. Neither is journaled."""

    scopes: Sequence[RoundScope]
    all_or_none: bool
    is_staffed: bool = False
    left_out: Counter[str] = field(default_factory=Counter)

    def evict_persistent_stragglers(self) -> list[str]:
        """Remove and return peers whose contribution was missing from three aborted rounds in a row.

        Their bytes are no numbers, or come too late: that costs everybody each round."""
        stragglers = sorted(peer for peer, times in self.left_out.items() if times >= _MAX_MISSED)
        for peer in stragglers:
            del self.left_out[peer]
        return stragglers

    def tick(self, now_s: float) -> bool:
        """Do whatever time decides; all scopes are in the same round. Returns whether that round has ended."""
        if not self.all_or_none and self._leave_divergence():
            return True
        phases = {scope.round.phase for scope in self.scopes}
        if phases == {"ended"}:
            return False
        for scope in self.scopes:
            scope.agree(now_s)  # who decided may have left
        if self._roll_back(now_s):
            return True
        if "averaging" in phases:
            assert phases == {"averaging"}, "planned together"
            return self._judge(now_s)
        if "closing" in phases:
            assert phases == {"closing"}, "closed together"
            return self._plan(now_s)
        return self._train(now_s)

    def _leave_divergence(self) -> bool:
        """End the round, in whatever phase it is, if the run has diverged and can go back."""
        ends = [end for scope in self.scopes if (end := scope.look_at_divergence()) is not None]
        if ends:
            self._end(ends)
        return bool(ends)

    def _roll_back(self, now_s: float) -> bool:
        """Go back where a scope's newest state is lost, or a mean was wrong; all other scopes go back with it."""
        backs = [scope.look_for_holders(now_s) or scope.look_behind_wrong_mean(now_s) for scope in self.scopes]
        due = [(back.version, scope, back) for scope, back in zip(self.scopes, backs, strict=True) if back is not None]
        if not due:
            return False
        version, lost, back = min(due, key=lambda one: one[0])
        judgement = Judgement(reason=f"{lost.label}{lost.say_rollback(back)}")
        keepers = [one.keepers if one is not None and one.version == version else () for one in backs]
        self._end([scope.go_back_to(version, of, judgement) for scope, of in zip(self.scopes, keepers, strict=True)])
        return True

    def _train(self, now_s: float) -> bool:
        """Announce the closing when it is due. In a pipeline, time counts while every stage has a replica."""
        for scope in self.scopes:
            if scope.round.phase == "training" and not scope.membership.trainers():
                scope.round.phase = "waiting"
                scope.log.announcements += 1
        was_staffed = self.is_staffed
        self.is_staffed = all(scope.round.phase == "training" and scope.working() for scope in self.scopes)
        if not self.is_staffed:
            # Members that still take over the last verdict (overlap) bring their work first.
            is_idle = not all(scope.working() for scope in self.scopes)
            return is_idle and self._is_late(now_s) and self._abort(_OVER)
        if not was_staffed and self.all_or_none:
            for scope in self.scopes:
                scope.round.opened_s = now_s
        moments = [moment for scope in self.scopes if (moment := scope.closing_moment(now_s)) is not None]
        if len(moments) == len(self.scopes):
            for scope in self.scopes:
                scope.close(max(moments))
        return False

    def _is_late(self, now_s: float) -> bool:
        return any(scope.is_late(now_s) for scope in self.scopes)

    def _plan(self, now_s: float) -> bool:
        """Plan the averaging of whatever is ready.

        A batch that has to be exact goes on while there is time for what it lacks; after that a plain run averages what
        there is, and a pipeline nothing."""
        if not all(scope.membership.trainers() for scope in self.scopes):
            return self._reopen()
        if not all(scope.is_gathered(now_s) for scope in self.scopes):
            return False
        if not all(scope.agree(now_s) for scope in self.scopes):
            return self._reopen() if any(scope.cannot_agree(now_s) for scope in self.scopes) else False
        both = [(scope, scope.proposal()) for scope in self.scopes]
        short = [(scope, proposal) for scope, proposal in both if scope.lacks_samples(proposal)]
        for scope, proposal in short:
            scope.free_kept_samples(proposal.plan if proposal else None)
        if short and all(scope.can_reopen(now_s) for scope in self.scopes):
            return self._reopen()
        if short and self.all_or_none:
            return self._abort(_OVER if self._is_late(now_s) else _say_short(*short[0]))
        if any(scope.has_too_few(proposal) for scope, proposal in both):
            return self._abort(_OVER) if self._is_late(now_s) else self._reopen()
        if any(proposal is None for _, proposal in both):
            return self._abort("nobody had anything to contribute")
        for scope, proposal in both:
            assert proposal is not None
            scope.begin_averaging(proposal)
        return False

    def _reopen(self) -> bool:
        for scope in self.scopes:
            scope.record(ev.RoundReopened(round=scope.round.number))
        return False

    def _judge(self, now_s: float) -> bool:
        """Commit the round when all scopes can; with ``all_or_none``, abort it when one cannot."""
        for scope in self.scopes:
            if (failure := scope.advance_secure(now_s)) is not None:
                assert scope.round.plan is not None
                silent = [scope.round.plan.members[one].peer for one in failure.missing]
                return self._abort(failure.reason, missing=tuple(one for one in silent if one in scope.averaging()))
        judged = [(scope, scope.judgement(now_s)) for scope in self.scopes]
        for scope, judgement in judged if self.all_or_none else ():
            if judgement is None:
                continue
            if not judgement.committed:
                return self._abort(f"{scope.label}{judgement.reason}", {scope.number: judgement.failed})
            # The missing would bring their work to the next round: later than it counts in the other stages.
            if missing := scope.left_out_of(judgement):
                self.left_out.update(missing)
                return self._abort(f"{scope.label}the work of {len(missing)} replicas is not in the mean")
        if any(judgement is None for _, judgement in judged):
            return False
        self.left_out.clear()
        self._end([scope.verdict_of(judgement) for scope, judgement in judged if judgement is not None])
        return True

    def _abort(
        self, reason: str, failed: Mapping[int, tuple[str, ...]] | None = None, missing: tuple[str, ...] = ()
    ) -> bool:
        """End the round without a mean. ``failed``: by number of the scope, members that did not deliver; ``missing``:
        of a single scope, those that were waited for in vain."""
        ends = [
            Judgement(reason=reason, failed=(failed or {}).get(scope.number, ()), missing=missing)
            for scope in self.scopes
        ]
        self._end([scope.verdict_of(end) for scope, end in zip(self.scopes, ends, strict=True)])
        return True

    def _end(self, unsigned: Sequence[ev.VerdictGiven]) -> None:
        """Give all scopes their verdicts. Those of a pipeline cover each other, and have the last stage's loss."""
        verdicts = [event.verdict for event in unsigned]
        timing = self._note_timing(unsigned)
        if self.all_or_none:
            loss = verdicts[-1].loss
            verdicts = tied_together([verdict.model_copy(update={"loss": loss}) for verdict in verdicts])
        for scope, event, verdict in zip(self.scopes, unsigned, verdicts, strict=True):
            scope.give_verdict(event.model_copy(update={"verdict": verdict}))
        self.scopes[0].timings.add(timing.model_copy(update=self._costs()))

    def _costs(self) -> dict[str, float | None]:
        """Return what the round that has just ended has cost, and its energy."""
        first = self.scopes[0]
        assert first.timed is not None, "all rounds end together, and are timed in the first scope"
        working = {
            peer for scope in self.scopes for peer, one in scope.membership.members.items() if one.tokens_committed
        }
        known = first.timed.members.items()
        counted = [one for peer, one in known if peer in working or one.entry.role == "validator"]
        prices = first.run.cost.prices
        costs = [cost for one in counted if (cost := cost_of(price_of(one.device, prices), one.round_s)) is not None]
        metered = [one.round_energy_j for one in counted if one.told_energy_j is not None]
        return {"cost": sum(costs) if costs else None, "energy_j": sum(metered) if metered else None}

    def _note_timing(self, unsigned: Sequence[ev.VerdictGiven]) -> RoundTiming:
        """Return where the time of the round went, and note which of the work was of use."""
        first, timings = unsigned[0], self.scopes[0].timings
        failed = [{*event.failed, *event.missing} for event in unsigned]
        seen = [scope.seen(of) for scope, of in zip(self.scopes, failed, strict=True)]
        timing = timing_of(first.verdict.round, first.verdict.committed, seen)
        lost = sum(one.weight_tokens for one in _planned(first.verdict) if one.peer in first.lost)
        if first.went_back is not None:
            undone = self.scopes[0].tokens_committed - first.verdict.tokens_total
            timings.committed(-undone)
            timings.wasted(undone)
        elif first.verdict.committed:
            timings.committed(first.verdict.tokens)
            timings.wasted(lost)
        elif self.all_or_none:
            timings.wasted(min(scope.tokens_in_round() for scope in self.scopes))  # the batch is done anew
        return timing


def _planned(verdict: Verdict) -> Sequence[PlanMember]:
    return verdict.plan.members if verdict.plan is not None else ()


def _say_short(scope: RoundScope, proposal: ev.RoundPlanned | None) -> str:
    brought = sum(count(from_wire(ranges)) for ranges in proposal.ranges) if proposal else 0
    wanted, max_s = scope.goal_samples(), scope.goal().max_s
    return f"{scope.label.rstrip(': ')} brought {brought} of the batch's {wanted} samples in {max_s:.0f} s"
