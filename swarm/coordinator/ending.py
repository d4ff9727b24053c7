"""How a round of one scope closes, is planned and ends: what can be said at a moment, and what follows from it. Pure.

Whoever has one scope does both at once (``machine.py``); the stages of a pipeline wait for each other in between
(``barrier.py``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator.bandwidth import Bandwidths, sent_at_least
from shoal.swarm.coordinator.divergence import WayBack, say_way_back
from shoal.swarm.coordinator.grouping import Rules, as_expected, plan_round
from shoal.swarm.coordinator.influence import bounded, usual_loss, weighted_median
from shoal.swarm.coordinator.lease_ledger import epochs_covered
from shoal.swarm.coordinator.membership import counting
from shoal.swarm.coordinator.rollback import Outage, Return, say_outlook, say_return
from shoal.swarm.coordinator.round_rules import Judgement, closing_moment, judge, left_out, lost_work, weighted_mean
from shoal.swarm.coordinator.state import RunState
from shoal.swarm.coordinator.trust import Punctuality, accusations_of, recorded_work
from shoal.swarm.deadlines import Delays
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady, RoundPlan, Verdict
from shoal.swarm.protocol.pins import FIRST_STATE_OUTLOOK
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.verdict_chain import chain_hash, signed_bytes
from shoal.swarm.sample_ranges import from_wire, merge, to_wire

Sign = Callable[[bytes], bytes]

_FEWEST_WITNESSES = 3
"""Members with a record, so that of each of them two others tell how fast its link is."""


class Ending(RunState):
    """A scope's rounds, as far as moments and what members say decide on them."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, now_s, epoch)
        self._sign = sign
        self._ready_delays = Delays(self.deadlines.ready_s)
        self._report_delays = Delays(self.deadlines.ready_s)
        self._bandwidths = Bandwidths()
        self._punctuality = Punctuality()
        self._outage = Outage(self.deadlines)
        self._outlook: Return | None = None

    def excuse_own_silence(self, now_s: float) -> float:
        stood_s = super().excuse_own_silence(now_s)
        self.round.closes_s += stood_s
        self.round.progress_s += stood_s
        self.round.reported_s += stood_s
        self._outage.excuse(stood_s)
        self.lease_clock.excuse(stood_s)
        return stood_s

    # Going back -----------------------------------------------------------------------------------------

    def look_for_holders(self, now_s: float) -> Return | None:
        """Where to go back to: nobody holds the newest state, and it is not worth waiting for anybody any more. A round
        that closes or is averaged ends by itself first."""
        self._outlook = None
        if not self._is_without_state() or self.opinion().bad_version is not None:  # who says so has let go of it
            self._outage.end()
            return None
        self._outlook = self._outage.look(now_s, self.history, self.agreed_digest, self.membership.members)
        is_due = self._outlook is not None and self._outlook.is_due and self.round.phase in ("waiting", "training")
        return self._outlook if is_due else None

    def go_back_to(
        self, version: int, keepers: tuple[str, ...], judgement: Judgement, diverged: WayBack | None = None
    ) -> f.VerdictGiven:
        """To an earlier version of the anchor, by a round that ends with this judgement. ``diverged``: why, unless the
        newest state is lost."""
        made = self.history.rounds[version]
        went_back = f.WentBack(
            from_version=self.anchor_version,
            digest=made.digest,
            vouched_round=made.round,
            keepers=keepers,
            diverged=diverged is not None,
            bad_version=diverged.bad_version if diverged else 0,
            suspects=diverged.suspects if diverged else (),
        )
        self._outage.end()
        self._outlook = None
        return self.verdict_of(judgement, went_back)

    def look_at_divergence(self) -> f.VerdictGiven | None:
        """The end of the round, in whatever phase it is, if the run has diverged and can go back."""
        back = self.way_back()
        if back is None:
            return None
        reason = Judgement(reason=say_way_back(back, self.history, self.membership.members))
        return self.go_back_to(back.version, back.keepers, reason, back)

    def say_return(self, back: Return) -> str:
        """The reason of the verdict with which the run goes back."""
        return say_return(back, self.history, len(self.membership.trainers()))

    def say_outlook(self) -> str:
        """What the run waits for while nobody holds its newest state, else empty."""
        if not self._is_without_state() or self.has_ended:
            return ""
        if not self.anchor_version:
            return self.run.start.outlook if self.run.start is not None else FIRST_STATE_OUTLOOK
        return say_outlook(self.anchor_version, self.agreed_digest, self._outlook, self.membership.members)

    def _is_without_state(self) -> bool:
        """Members are here, and none of them holds the run's newest state. The first one is whatever they make, unless
        the run file says what it is."""
        is_made = self.anchor_version == 0 and not self.is_beginning_written
        trainers = self.membership.trainers()
        # One newcomer that only says to hold it would keep everybody waiting for ever.
        return bool(not is_made and trainers and self.synced().keys().isdisjoint(counting(trainers, trainers)))

    # Closing --------------------------------------------------------------------------------------------

    def closing_moment(self, now_s: float) -> float | None:
        """The moment to announce; None while it is too early to tell."""
        return closing_moment(self.round.opened_s, self.goal(), self.works(), now_s, self.deadlines)

    def close(self, moment_s: float) -> None:
        self.record(f.RoundClosing(round=self.round.number))
        self.round.closes_s = moment_s

    def reopen(self) -> None:
        self.record(f.RoundReopened(round=self.round.number))

    def is_gathered(self, now_s: float) -> bool:
        """Whoever holds no samples brings none: nobody waits for them. Once half of those who do are ready, the others
        get as long as it has been taking; one that takes longer brings its work to the next round."""
        return now_s >= self.round.closes_s + self._worth_waiting_s(self.awaited())

    def awaited(self) -> list[str]:
        """Whose work the plan waits for; not that of members that were waited for in vain again and again."""
        ready, working, unheard = self.round.ready, self.working(), self.unheard()
        held = [
            one
            for one in self.leases.held
            if one not in ready and (one in working or one in unheard) and not self.is_left_out(one)
        ]
        if self.goal().exact:
            return held
        return [one for one in held if self._punctuality.is_awaited(one, self.round.number)]

    def _worth_waiting_s(self, awaited: Collection[str]) -> float:
        if self.round.ready and not awaited:
            return 0.0
        # Most of those with a record, where any has one, or newcomers could keep everybody waiting.
        recorded = self.membership.recorded().keys() & {*self.round.ready, *awaited}
        ready = len(recorded.intersection(self.round.ready)) if recorded else len(self.round.ready)
        late = len(recorded.intersection(awaited)) if recorded else len(awaited)
        # A batch that has to be whole is worth all the patience: without the straggler it begins anew.
        prompt = ready > late and not self.goal().exact
        return self._ready_delays.wait_s if prompt else self.deadlines.ready_s

    def can_reopen(self, now_s: float) -> bool:
        """Whether there is time left for samples that a complete batch lacks."""
        return now_s < self.round.opened_s + self.goal().max_s and not self.is_late(now_s)

    def proposal(self) -> f.RoundPlanned | None:
        """The plan for whoever is ready; None when nobody has anything to contribute."""
        ready = {peer: one for peer, one in self.round.ready.items() if not self.is_left_out(peer)}
        self.round.expected = as_expected(self.round.expected, ready)
        plan = self.round.expected or self._plan_of(ready)
        if plan is None:
            return None
        members = self.membership.members
        plan = bounded(plan, self.run, self.history.rounds, members)
        peers = [member.peer for member in plan.members]
        losses = [(ready[peer].loss, ready[peer].weight_tokens) for peer in counting(members, peers)]
        known = [(loss, weight) for loss, weight in losses if loss is not None]
        ranges = tuple(to_wire(merge(from_wire(ready[peer].ranges))) for peer in peers)
        median_loss = weighted_median(known) if known else None
        return f.RoundPlanned(plan=plan, ranges=ranges, loss=weighted_mean(known), median_loss=median_loss)

    def _plan_of(self, ready: Mapping[str, PeerToCoordinatorRoundReady]) -> RoundPlan | None:
        self._measure()
        number, trainers, run = self.round.number, self.membership.trainers(), self.run
        rules = Rules(run.averaging.group_size, run.run.seed, run.max_chunk_values)
        plan = plan_round(number, self.anchor_version, self.elements, ready, trainers, rules)
        return self.accusations.into(plan) if plan else None

    def _measure(self) -> None:
        """Make up our mind about everybody's link."""
        trainers = self.membership.trainers()
        claims_bps = {peer: one.claimed_bps for peer, one in trainers.items()}
        believed = self._bandwidths.believed(claims_bps, counting(trainers, trainers))
        for peer, bps in believed.items():
            trainers[peer].bandwidth_bps = bps

    def _learn_bandwidths(self, plan: RoundPlan) -> None:
        shapes = [(spec.name, spec.shape) for spec in self.model.layout] if self.model else []
        reports, took_s = self.round.reports, self.round.reported_s - self.round.ready_s
        counted = counting(self.membership.members, reports)
        witnesses = {peer: reports[peer] for peer in counted} if len(counted) >= _FEWEST_WITNESSES else reports
        self._bandwidths.learn(plan, witnesses, sent_at_least(plan, reports, self.run.format_map(shapes), took_s))

    def expect(self) -> None:
        """Say ahead what the plan will be, if all who work for the round are ready: of a flat group only, as the plan
        of a grid is large, and of no batch that has to be whole, as nobody knows ahead when it is."""
        ready = {
            peer: PeerToCoordinatorRoundReady(
                round=self.round.number,
                anchor_version=self.anchor_version,
                state_digest=member.state_digest,
                weight_tokens=1,
                ranges=(),
                loss=None,
            )
            for peer, member in self.synced().items()
            if peer in self.leases.held and member.state_digest is not None and not self.is_left_out(peer)
        }
        if not self.goal().exact and 1 < len(ready) <= self.run.averaging.group_size:
            self.round.expected = self._plan_of(ready)

    def free_kept_samples(self, plan: RoundPlan | None) -> None:
        """A batch that has to be complete lacks samples: members that keep some and bring nothing usable lose them."""
        fine = {peer for peer, one in self.round.ready.items() if not one.weight_tokens}
        fine |= {member.peer for member in plan.members} if plan else set()
        for peer in [one for one in self.leases.held if one not in fine]:
            self.record(f.MemberLost(peer=peer, reason=f.KEPT_SAMPLES))

    # Ending ---------------------------------------------------------------------------------------------

    def judgement(self, now_s: float) -> Judgement | None:
        """How the round ends by what members report; None while it is worth waiting for more."""
        assert self.round.plan is not None
        live = self.averaging()
        return judge(
            self.round.plan,
            self.round.reports,
            live,
            overdue=now_s > self.round.progress_s + self.deadlines.report_s,
            enough=now_s > self.round.reported_s + self._report_delays.wait_s,
            whole=self.goal().exact,
            work=recorded_work(self.membership.members, live),
        )

    def verdict_of(self, judgement: Judgement, went_back: f.WentBack | None = None) -> f.VerdictGiven:
        """As it is before it is signed. ``went_back`` only with a judgement that aborts the round; the version is the
        one of its vouched round."""
        work = recorded_work(self.membership.members, self.round.reports)
        plan, lost = self.round.plan, lost_work(self.round, judgement.digests, work)
        weights = {member.peer: member.weight_tokens for member in plan.members} if plan else {}
        tokens = sum(weight for peer, weight in weights.items() if peer not in lost) if judgement.committed else 0
        version, total = self.anchor_version + judgement.committed, self.tokens_committed + tokens
        if went_back is not None:
            version, total = self.history.before(went_back.vouched_round)
        unsigned = Verdict(
            round=self.round.number,
            committed=judgement.committed,
            reason=judgement.reason[:2000],
            anchor_version=version,
            plan=plan,
            digests=judgement.digests,
            tokens=tokens,
            tokens_total=total,
            loss=self.round.loss if judgement.committed else None,
            ended_s=round(max(0.0, self.now_s + self.unix_offset_s), 3),
            sent_bytes=self.sent_bytes.take(),
            run_hash=self.run.hash,
            previous_chain=self.chain,
            chain=bytes(32),
            signature=b"",
        )
        return f.VerdictGiven(
            verdict=unsigned,
            elapsed_s=self.elapsed_s(self.now_s),
            lost=lost,
            failed=judgement.failed,
            carrying=self._carrying(judgement),
            missing=judgement.missing,
            accusations=accusations_of(self.round.number, judgement.accused_by),
            went_back=went_back,
        )

    def _carrying(self, judgement: Judgement) -> tuple[str, ...]:
        """Members that keep something of what they offered: of a void part all, else those that some chunk lacks."""
        plan = self.round.plan
        if plan is None or not judgement.committed:
            return ()
        void = None in judgement.digests
        work = recorded_work(self.membership.members, self.round.reports)
        peers = [one.peer for one in plan.members] if void else left_out(self.round, judgement.digests, work)
        return tuple(peer for peer in peers if peer not in self.round.orphans)

    def give_verdict(self, unsigned: f.VerdictGiven) -> None:
        """Sign it: the round has ended."""
        if self.round.plan is not None:
            self._learn_bandwidths(self.round.plan)
        chain = chain_hash(unsigned.verdict)
        signed = unsigned.verdict.model_copy(update={"chain": chain, "signature": self._sign(signed_bytes(chain))})
        self.end_round(unsigned.model_copy(update={"verdict": signed}))

    def end_round(self, fact: f.VerdictGiven) -> None:
        covered, before = self._covered(), len(self.history.rounds)
        self.record(fact)
        self._tell_covered(covered)
        if len(self.history.rounds) > before:
            newest = self.history.rounds[-1]
            usual = usual_loss(self.history.rounds[:-1], newest.loss)
            if usual is not None and newest.loss is not None:
                self.record(f.LossRose(round=newest.round, loss=newest.loss, usual=usual))
        for peer in fact.missing:
            if self.goal().exact and self.is_left_out(peer) and peer in self.leases.held and not self.has_ended:
                self.record(f.MemberLost(peer=peer, reason="left out for a while"))  # the next batch has to be whole

    def _covered(self) -> int:
        return epochs_covered(self.leases, self.model.samples) if self.model and self.model.samples else 0

    def _tell_covered(self, first: int) -> None:
        """Which epochs this verdict has completed, ``first`` having been covered before."""
        stop = self._covered()
        if stop > first:
            samples = self.model.samples if self.model else None
            assert samples is not None
            lost, undone = self.again.within(first * samples, stop * samples)
            self.record(f.EpochsCovered(first=first, stop=stop, samples=samples, lost=lost, undone=undone))
