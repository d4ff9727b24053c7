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
from shoal.swarm.protocol.verdict_chain import tied_together
from shoal.swarm.sample_ranges import count, from_wire

_OVER = "the run's time was over"
_TOO_OFTEN = 3
"""Rounds in a row that are aborted as the work of the same peer is not in the mean."""


@dataclass
class Barrier:
    """``all_or_none``: the rule of a pipeline. A round needs exactly the batch in every scope, and is committed only
    with everybody's work in it. Else (one scope) a round takes what there is.

    ``is_staffed``: whether every scope had a member with its newest state a moment ago; ``left_out``: by peer, how many
    rounds were aborted without its work since the last committed one. Not journaled."""

    all_or_none: bool = True
    is_staffed: bool = False
    left_out: Counter[str] = field(default_factory=Counter)

    def evict_persistent_stragglers(self) -> list[str]:
        """Remove and return peers whose contribution was missing from three aborted rounds in a row.

        Their bytes are no numbers, or come too late: that costs everybody each round."""
        stragglers = sorted(peer for peer, times in self.left_out.items() if times >= _TOO_OFTEN)
        for peer in stragglers:
            del self.left_out[peer]
        return stragglers

    def tick(self, scopes: Sequence[RoundScope], now_s: float) -> bool:
        """Do whatever time decides; all scopes are in the same round. Returns whether that round has ended."""
        if not self.all_or_none:
            ends = [event for scope in scopes if (event := scope.look_at_divergence()) is not None]
            if ends:
                self._end(ends, scopes)
                return True
        phases = {scope.round.phase for scope in scopes}
        if phases == {"ended"}:
            return False
        if self._go_back(scopes, now_s):
            return True
        if "averaging" in phases:
            assert phases == {"averaging"}, "planned together"
            return self._judge(scopes, now_s)
        if "closing" in phases:
            assert phases == {"closing"}, "closed together"
            return self._plan(scopes, now_s)
        return self._train(scopes, now_s)

    def _go_back(self, scopes: Sequence[RoundScope], now_s: float) -> bool:
        """A scope whose newest state is lost takes all others back with it."""
        backs = [scope.look_for_holders(now_s) for scope in scopes]
        due = [(back.version, scope, back) for scope, back in zip(scopes, backs, strict=True) if back is not None]
        if not due:
            return False
        version, lost, back = min(due, key=lambda one: one[0])
        judgement = Judgement(reason=f"{lost.label}{lost.say_return(back)}")
        keepers = [one.keepers if one is not None and one.version == version else () for one in backs]
        ends = [scope.go_back_to(version, of, judgement) for scope, of in zip(scopes, keepers, strict=True)]
        self._end(ends, scopes)
        return True

    def _train(self, scopes: Sequence[RoundScope], now_s: float) -> bool:
        """Of a pipeline, time counts for the round while every stage has somebody."""
        for scope in scopes:
            if scope.round.phase == "training" and not scope.membership.trainers():
                scope.round.phase = "waiting"
                scope.announcements += 1
        was_staffed = self.is_staffed
        self.is_staffed = all(scope.round.phase == "training" and scope.working() for scope in scopes)
        if not self.is_staffed:
            is_late = any(scope.is_late(now_s) for scope in scopes)
            return is_late and self._abort(scopes, _OVER)
        if not was_staffed and self.all_or_none:
            for scope in scopes:
                scope.round.opened_s = now_s
        moments = [moment for scope in scopes if (moment := scope.closing_moment(now_s)) is not None]
        if len(moments) == len(scopes):
            for scope in scopes:
                scope.close(max(moments))
        return False

    def _plan(self, scopes: Sequence[RoundScope], now_s: float) -> bool:
        """Plan the averaging of whatever is ready. A batch that has to be exact goes on while there is time for what it
        lacks; after that a plain run averages what there is, and a pipeline nothing."""
        if not all(scope.membership.trainers() for scope in scopes):
            return self._reopen(scopes)
        if not all(scope.is_gathered(now_s) for scope in scopes):
            return False
        both = [(scope, scope.proposal()) for scope in scopes]
        short = [(scope, proposal) for scope, proposal in both if scope.lacks_samples(proposal)]
        for scope, proposal in short:
            scope.free_kept_samples(proposal.plan if proposal else None)
        if short and all(scope.can_reopen(now_s) for scope in scopes):
            return self._reopen(scopes)
        if short and self.all_or_none:
            is_late = any(scope.is_late(now_s) for scope in scopes)
            return self._abort(scopes, _OVER if is_late else _say_short(*short[0]))
        if any(proposal is None for _, proposal in both):
            return self._abort(scopes, "nobody had anything to contribute")
        for scope, proposal in both:
            assert proposal is not None
            scope.begin_averaging(proposal)
        return False

    @staticmethod
    def _reopen(scopes: Sequence[RoundScope]) -> bool:
        for scope in scopes:
            scope.reopen()
        return False

    def _judge(self, scopes: Sequence[RoundScope], now_s: float) -> bool:
        """Committed when all scopes are; of a pipeline, one that cannot be committed is the end of all."""
        judged = [(scope, scope.judgement(now_s)) for scope in scopes]
        for scope, judgement in judged if self.all_or_none else ():
            if judgement is None:
                continue
            if not judgement.committed:
                return self._abort(scopes, f"{scope.label}{judgement.reason}", {scope.label: judgement.failed})
            # Whoever lives would bring it to the next round: later than it counts in the other stages.
            if missing := scope.left_out_of(judgement):
                self.left_out.update(missing)
                reason = f"{scope.label}the work of {len(missing)} replicas is not in the mean"
                return self._abort(scopes, reason)
        if any(judgement is None for _, judgement in judged):
            return False
        self.left_out.clear()
        self._end([scope.verdict_of(judgement) for scope, judgement in judged if judgement is not None], scopes)
        return True

    def _abort(
        self, scopes: Sequence[RoundScope], reason: str, failed: Mapping[str, tuple[str, ...]] | None = None
    ) -> bool:
        """End the round without a mean. ``failed``: by label of the scope, who did not deliver."""
        ends = [Judgement(reason=reason, failed=(failed or {}).get(scope.label, ())) for scope in scopes]
        self._end([scope.verdict_of(end) for scope, end in zip(scopes, ends, strict=True)], scopes)
        return True

    def _end(self, unsigned: Sequence[ev.VerdictGiven], scopes: Sequence[RoundScope]) -> None:
        """Give all scopes their verdicts. Those of a pipeline cover each other, and have the last stage's loss."""
        verdicts = [event.verdict for event in unsigned]
        if self.all_or_none:
            loss = verdicts[-1].loss  # only the last stage has one; it is the round's
            verdicts = tied_together([verdict.model_copy(update={"loss": loss}) for verdict in verdicts])
        for scope, event, verdict in zip(scopes, unsigned, verdicts, strict=True):
            scope.give_verdict(event.model_copy(update={"verdict": verdict}))


def _say_short(scope: RoundScope, proposal: ev.RoundPlanned | None) -> str:
    brought = sum(count(from_wire(ranges)) for ranges in proposal.ranges) if proposal else 0
    wanted, max_s = scope.goal_samples(), scope.goal().max_s
    return f"{scope.label.rstrip(': ')} brought {brought} of the batch's {wanted} samples in {max_s:.0f} s"
