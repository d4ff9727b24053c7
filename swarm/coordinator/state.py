"""What the facts make of a run: all of the coordinator's state, how each fact changes it, and views of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator import snapshot
from shoal.swarm.coordinator.admission import Admission
from shoal.swarm.coordinator.divergence import Opinion, Setback, WayBack, opinion, way_back
from shoal.swarm.coordinator.influence import exceeds, level_of, power_of, suspects_of
from shoal.swarm.coordinator.lease_ledger import Again, LeaseLedger
from shoal.swarm.coordinator.membership import Member, counting
from shoal.swarm.coordinator.rollback import CommittedRound, History
from shoal.swarm.coordinator.round_rules import Goal, Round, Work, is_over
from shoal.swarm.coordinator.tally import Tally
from shoal.swarm.coordinator.trust import Accusations, LeaseClock, newcomers_tokens, pace_after, pace_limit
from shoal.swarm.protocol.messages import DivergenceWord, RunView, TensorSpec, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.verdict_chain import genesis
from shoal.swarm.sample_ranges import count, from_wire, merge, subtract

_MAX_COUNT = 2**62
_LEASED_ROUNDS = 64
"""What one member can hold at most, in rounds' worth of samples (or batches, where those are larger)."""


class RunState(Admission):
    """A scope with rounds: one run, or one stage of a run."""

    def __init__(self, run: RunFile, now_s: float, epoch: int) -> None:
        """``epoch`` grows from start to start."""
        super().__init__(run, now_s, epoch)
        self.leases = LeaseLedger()
        self.again = Again()
        self.answered: dict[str, f.LeaseGranted] = {}
        self.accusations = Accusations()
        self.lease_clock = LeaseClock()
        self.round = Round(0, opened_s=now_s)
        self.agreed_digest: bytes | None = None
        self.chain = genesis(run.hash)
        self.verdict: Verdict | None = None
        self.history = History()
        self.setback = Setback()
        self.rounds_aborted = self.rounds_undone = 0
        self.tokens_committed = self.tokens_undone = 0
        self.loss: float | None = None
        self.started_s = now_s
        self.elapsed_before_s = 0.0
        self._tally = Tally()

    @property
    def has_ended(self) -> bool:
        return self.round.phase == "ended"

    @property
    def round_number(self) -> int:
        return self.round.number

    @property
    def moment(self) -> tuple[int, str, int]:
        """What members have to hear of at once when it changes."""
        return self.round.number, self.round.phase, 0

    @property
    def is_beginning_written(self) -> bool:
        """Whether the run file says what the run begins with."""
        return self.run.start is not None or bool(self.run.pins and self.run.pins.state)

    def written_beginning(self, layout: tuple[TensorSpec, ...]) -> bytes | None:
        """The digest of version 0 of the state as it follows from the run file, whatever members say; else None."""
        if self.run.start is not None:
            return self.run.start.state_digest(layout)
        return bytes.fromhex(self.run.pins.state) if self.run.pins and self.run.pins.state else None

    # Facts ----------------------------------------------------------------------------------------------

    def snapshot(self) -> f.RunSnapshot | None:
        """What stands for all facts so far; None while a round is about to end, and while facts are to be taken."""
        return None if self._facts or self.round.phase in ("closing", "averaging") else snapshot.take(self)

    def _apply(self, fact: f.Fact) -> None:
        match fact:
            case f.RunSnapshot():
                snapshot.restore(self, fact)
            case f.ModelDescribed():
                super()._apply(fact)
                if self.anchor_version == 0:
                    self.agreed_digest = self.written_beginning(fact.model.layout) or self.agreed_digest
            case f.StateAgreed():
                assert fact.anchor_version == self.anchor_version
                self.agreed_digest = fact.digest
            case f.MemberLost():
                if fact.reason == f.KEPT_SAMPLES:
                    self._leave_out([fact.peer])
                super()._apply(fact)
                self._lose_work(fact.peer)
            case f.LeaseGranted():
                self.leases.grant(fact.peer, from_wire(fact.ranges))
                self.answered[fact.peer] = fact
            case f.RoundClosing():
                self.round.phase = "closing"
                self.round.closes_s = self.now_s
            case f.RoundReopened():
                self.round.phase = "training" if self.membership.trainers() else "waiting"
                self.round.ready.clear()
                self.round.expected = None
            case f.RoundPlanned():
                self._begin_averaging(fact)
            case f.VerdictGiven():
                self._end_round(fact)
            case f.LossRose():
                pass  # for people
            case f.EpochsCovered():
                self.again.forget(fact.stop * fact.samples)
            case _:
                super()._apply(fact)

    def _lose_work(self, peer: str) -> None:
        self.answered.pop(peer, None)
        self.lease_clock.lose(peer)
        averaged = self.round.ranges.get(peer)
        if averaged is not None:
            self.round.orphans.add(peer)  # the verdict decides on these samples
        self.leases.give_back(peer, keep=averaged)
        self.round.ready.pop(peer, None)
        self.round.reports.pop(peer, None)
        if self.round.plan is None:
            self.round.expected = None  # it may be back before the plan, with other work

    def left_traces(self, peer: str) -> bool:
        return super().left_traces(peer) or peer in self.round.ranges

    def _begin_averaging(self, fact: f.RoundPlanned) -> None:
        self.round.phase = "averaging"
        self.round.plan = fact.plan
        self.round.loss, self.round.median_loss = fact.loss, fact.median_loss
        self.round.progress_s = self.round.reported_s = self.now_s
        peers = [member.peer for member in fact.plan.members]
        self.round.moves_left = dict.fromkeys(peers, -(-fact.plan.parts[-1].stop // fact.plan.chunk_elements))
        self.round.ranges = {peer: from_wire(one) for peer, one in zip(peers, fact.ranges, strict=True)}
        self.agreed_digest = fact.plan.state_digest

    def _end_round(self, fact: f.VerdictGiven) -> None:
        verdict = fact.verdict
        assert verdict.round == self.round.number, "one verdict a round"
        assert verdict.previous_chain == self.chain, "an unbroken chain"
        # By the verdicts' own times: a verdict that is taken over from a member says the same as the one that was lost.
        lasted_s = verdict.ended_s - self.verdict.ended_s if self.verdict else 0.0
        self.verdict, self.chain = verdict, verdict.chain
        took_s = max(0.0, fact.elapsed_s - self.elapsed_before_s)
        self.elapsed_before_s, self.started_s = fact.elapsed_s, self.now_s
        committed = {one.peer for one in verdict.plan.members} if verdict.committed and verdict.plan else set()
        for peer, member in self.membership.trainers().items():
            member.enter_round(peer in committed)
        for peer in fact.failed:
            self.membership.members[peer].fail()
        if verdict.committed:
            self._learn_paces(verdict, lasted_s)
            self._commit(verdict, fact.lost, took_s)
            self._carry(verdict, fact.carrying)
            self._forgive(committed.difference(fact.lost, fact.missing))
        else:
            self.rounds_aborted += 1
        for peer in self.round.orphans:  # who is back already keeps what it was given since
            since = subtract(self.leases.held.get(peer, []), self.round.ranges[peer])
            self.leases.give_back(peer, keep=since)
        self._leave_out(fact.missing)
        self.accusations.take(fact.accusations, verdict.round)
        self.lease_clock.end_round(committed.difference(fact.lost), self.round.opened_s)
        if fact.went_back is not None:
            self._go_back(verdict, fact.went_back)
        self.setback = self.setback.passed(self.anchor_version)
        phase, closed_s = self.round.phase, self.round.closes_s
        ahead = self.run.averaging.overlap and phase in ("closing", "averaging")
        self.round = Round(verdict.round + 1, opened_s=min(closed_s, self.now_s) if ahead else self.now_s)
        if phase != "waiting" and self.membership.trainers():
            self.round.phase = "training"
        if is_over(self.run.run, self.tokens_committed, self.rounds_committed, self.elapsed_s(self.now_s)):
            self.round.phase = "ended"

    def _learn_paces(self, verdict: Verdict, lasted_s: float) -> None:
        """Of a run's first round nobody knows how long it took."""
        assert verdict.plan is not None
        members, recorded = self.membership.members, self.membership.recorded()
        lasted_s = min(lasted_s, self.run.round.max_s)
        paces = {
            one.peer: pace_after(members[one.peer], one.weight_tokens, lasted_s, recorded)
            for one in verdict.plan.members
            if lasted_s > 0.0
        }
        for peer, pace_tps in paces.items():
            members[peer].pace_tps = pace_tps

    def _forgive(self, delivered: Iterable[str]) -> None:
        for peer in delivered:
            self.membership.members[peer].deliver()

    def _leave_out(self, missing: Iterable[str]) -> None:
        """What others wait for in vain again and again, they wait for no more for a while. These members keep what they
        hold and get no more: whoever had a bad link brings its work later, and none of it is lost."""
        for peer in missing:
            self.membership.members[peer].miss(self.round.number)

    def is_left_out(self, peer: str) -> bool:
        """Whether its work does not count in this round, as it has not delivered what it had to."""
        return self.round.number < self.membership.members[peer].out_until

    def counts(self, peer: str) -> bool:
        """Whether what it says of itself steers others: it has a record, or nobody has."""
        recorded = self.membership.recorded()
        return not recorded or peer in recorded

    def _commit(self, verdict: Verdict, lost: tuple[str, ...], took_s: float) -> None:
        plan = verdict.plan
        assert plan is not None
        self.anchor_version = verdict.anchor_version
        self.agreed_digest = None
        self.tokens_committed += verdict.tokens
        self.loss = verdict.loss if verdict.loss is not None else self.loss
        ranges = {one.peer: self.round.ranges[one.peer] for one in plan.members}
        members, power = self.membership.members, power_of(self.run)
        level = level_of(plan.members, counting(members, (one.peer for one in plan.members)), power)
        suspects = tuple(peer for peer in suspects_of(plan, members, power) if peer not in lost)
        self.again.lose([one for peer in lost for one in ranges.pop(peer)])
        for planned in plan.members:
            if planned.peer in ranges:
                self.leases.commit(planned.peer, ranges[planned.peer])
                member = self.membership.members[planned.peer]
                member.tokens_committed += planned.weight_tokens
                member.rounds_committed += 1
                member.worked_version = plan.anchor_version
                member.clipped_rounds += exceeds(planned, plan.rho, power)
                member.worked_s = self.now_s
        # No round's own work takes longer; the rest is time without anybody.
        took_s = min(took_s, self.run.round.max_s)
        merged = tuple(merge(one for mine in ranges.values() for one in mine))
        about = level, plan.rho, self.round.median_loss, suspects
        done = CommittedRound(verdict.round, plan.state_digest, verdict.tokens, took_s, merged, *about)
        self.history.rounds.append(done)
        assert len(self.history.rounds) == self.anchor_version
        self.membership.advance(self.anchor_version)

    def _carry(self, verdict: Verdict, carrying: tuple[str, ...]) -> None:
        """What of their work the mean lacks comes again with what they bring next."""
        for planned in verdict.plan.members if verdict.plan else ():
            member = self.membership.members[planned.peer]
            left_out = planned.weight_tokens if planned.peer in carrying else 0
            member.carried_tokens = min(member.carried_tokens + left_out, _MAX_COUNT) if left_out else 0

    def is_suspended(self, peer: str) -> bool:
        """Whether its work does not count now, as it is suspected of having spoilt earlier rounds."""
        return self.round.number < self.membership.members[peer].suspended_until

    def _go_back(self, verdict: Verdict, to: f.WentBack) -> None:
        """Whoever did the work that is undone keeps the credit for it: it was not at fault. Suspects are left out for a
        while."""
        if to.diverged:
            self.setback = self.setback.again(to.bad_version, bool(to.suspects))
        for peer in to.suspects:
            self.membership.members[peer].suspend(verdict.round)
            self.leases.give_back(peer)
        rounds, tokens, ranges = self.history.undo(verdict.anchor_version)
        self.anchor_version, self.agreed_digest = verdict.anchor_version, to.digest
        self.tokens_committed -= tokens
        assert self.tokens_committed == verdict.tokens_total
        self.rounds_undone += rounds
        self.tokens_undone += tokens
        self.leases.uncommit(ranges)
        self.again.undo(ranges)
        self.answered.clear()
        self.membership.go_back(self.anchor_version)

    @property
    def rounds_committed(self) -> int:
        """Those behind the anchor. What was undone has to be done again before the run has its rounds."""
        return len(self.history.rounds)

    # What others see ------------------------------------------------------------------------------------

    def view(self, peer: str, now_s: float, roster_version: int = -1, verdict_chain: bytes | None = None) -> RunView:
        """What this member has to know; roster and verdict only when it does not have these."""
        member = self.membership.members.get(peer)
        newest = self.verdict.chain if self.verdict else None
        closing = self.round.phase == "closing"
        roster, delta = self.membership.roster_news(roster_version)
        return RunView(
            epoch=self.epoch,
            sequence=self.announcements,
            round=self.round.number,
            anchor_version=self.anchor_version,
            phase=self.round.phase,
            closes_in_s=max(0.0, self.round.closes_s - now_s) if closing else None,
            plan=self.round.plan,
            expected=self.round.expected if closing else None,
            as_expected=self.round.plan is not None and self.round.expected is not None,
            divergence=self.word_on_divergence(peer) if member is not None and member.diverged else "",
            verdict=self.verdict if verdict_chain != newest else None,
            verdict_chain=newest,
            state_digest=self.state_digest(),
            tokens_committed=self.tokens_committed,
            tokens_in_round=self.tokens_in_round(),
            members=len(self.membership.trainers()),
            must_resync=member is not None and self._must_resync(member),
            roster_version=self.membership.roster_version,
            roster=roster,
            roster_delta=delta,
        )

    def believers(self) -> dict[str, Member]:
        """Live trainers whose word on whether the run has diverged is heard."""
        return {peer: one for peer, one in self.membership.trainers().items() if not self.is_suspended(peer)}

    def opinion(self) -> Opinion:
        """What those say together."""
        if all(one.diverged is None for one in self.membership.trainers().values()):
            return Opinion()
        return opinion(self.believers(), self.history, self.state_digest(), ahead=self.run.averaging.overlap)

    def way_back(self) -> WayBack | None:
        """From the version that the members with most of the work cannot go on from; None without such a version, and
        where there is nothing to go back to, or that has been tried often enough."""
        bad = self.opinion().bad_version
        if bad is None:
            return None
        return way_back(bad, self.setback, self.history, self.believers(), self.membership.members)

    def word_on_divergence(self, peer: str) -> DivergenceWord:
        """The answer to a member that says that its work has diverged."""
        opinion = self.opinion()
        if peer not in opinion.claims:  # also of a suspect: the others' word has to do for it
            return "go on"
        if opinion.bad_version is not None:
            return "hopeless" if self.way_back() is None else ""
        return "at fault" if peer in opinion.at_fault else ""

    def state_digest(self) -> bytes | None:
        """Of the current anchor version's state: agreed, or what most of its holders say."""
        return self.agreed_digest or self.membership.common_digest(self.anchor_version)

    def elapsed_s(self, now_s: float) -> float:
        """How long the run has been going, without the time that the coordinator was away."""
        return max(0.0, self.elapsed_before_s + now_s - self.started_s)

    def _must_resync(self, member: Member) -> bool:
        """It holds another state than this version's, or a version that the run has gone back behind."""
        version = member.anchor_version
        other = self.agreed_digest is not None and member.state_digest not in (None, self.agreed_digest)
        return version is not None and (version > self.anchor_version or (version == self.anchor_version and other))

    def synced(self) -> Mapping[str, Member]:
        return self.membership.synced(self.anchor_version, self.agreed_digest)

    def working(self) -> Mapping[str, Member]:
        """Live trainers whose work counts in this round: with ``overlap`` also those who do not hold its anchor yet,
        as they take over the last verdict at their next step."""
        if not self.run.averaging.overlap or self.anchor_version == 0:
            return self.synced()
        return {**self.membership.synced(self.anchor_version - 1, None), **self.synced()}

    def leased_tokens(self, peer: str) -> int:
        """What this member's leases amount to: the most that it can have done."""
        return count(self.leases.held.get(peer, [])) * (self.model.tokens_per_sample if self.model else 0)

    def works(self) -> list[Work]:
        return [
            Work(one.tokens_done, one.tokens_per_s, one.step_s, one.heard_s, self.leased_tokens(peer))
            for peer, one in self.working().items()
            if not self.is_left_out(peer)
        ]

    def tokens_in_round(self) -> int:
        """Done and not committed, what is done for the next round already included."""
        trainers = self.membership.trainers()
        return self._tally.take(
            self.round.number,
            self.now_s,
            len(trainers),
            lambda: min(
                sum(
                    min(one.tokens_done + one.tokens_ahead, self.leased_tokens(peer)) for peer, one in trainers.items()
                ),
                _MAX_COUNT,
            ),
        )

    def unheard(self) -> set[str]:
        """Members with samples that have not told their state yet, as we restarted only just now."""
        members = self.membership.members
        return {peer for peer in self.leases.held if members[peer].alive and members[peer].anchor_version is None}

    def lease_limit(self, peer: str) -> int:
        """The most samples that this member gets now; may be negative."""
        batch, goal = self.run.inner.batch_samples, self.goal_samples()
        believed = self._believed_limit(peer)
        if not self.goal().exact:
            limit = min(believed, _LEASED_ROUNDS * max(batch, goal) - self._held(peer))
            return limit - limit % batch if believed < _MAX_COUNT else limit
        # Guided self-scheduling (Polychronopoulos & Kuck 1987): ever smaller, so that all finish together.
        left = max(0, goal - self.leases.outstanding())
        return min(left, believed, max(batch, -(-left // (2 * len(self.synced())))))

    def _held(self, peer: str) -> int:
        return count(self.leases.held.get(peer, []))

    def _believed_limit(self, peer: str) -> int:
        """The most samples that it gets now for what it was seen to commit; no limit while nobody has a record. A
        batch is always possible, or nobody could ever show anything."""
        member, recorded = self.membership.members[peer], self.membership.recorded()
        assert self.model is not None
        per_sample, batch, held = self.model.tokens_per_sample, self.run.inner.batch_samples, self._held(peer)
        limit_tps = pace_limit(member, recorded)
        if not recorded:
            return _MAX_COUNT
        self.lease_clock.begin(peer, self.now_s, held * per_sample, limit_tps)
        if member.has_record:
            # A lease lasts for a while; where rounds are short, that is no reason to hold several rounds' worth.
            ahead_s = min(self.deadlines.lease_s, self.run.round.max_s / 2)
            worked_s = self.lease_clock.worked_s(peer, self.now_s) + ahead_s
            return max(batch, int(min(limit_tps * worked_s / per_sample, _MAX_COUNT))) - held
        worked_s = self.lease_clock.worked_s(peer, self.now_s, self.round.opened_s)
        alone = max(batch, int(min(limit_tps * worked_s / per_sample, _MAX_COUNT))) - held
        return min(alone, self._newcomers_limit(peer))

    def _newcomers_limit(self, peer: str) -> int:
        """What is left for this member of what all without a record may hold."""
        assert self.model is not None
        goal, recorded, batch = self.goal(), self.membership.recorded(), self.run.inner.batch_samples
        open_s = self.now_s - self.round.opened_s
        if goal.exact and (recorded.keys().isdisjoint(self.working()) or open_s > goal.max_s / 2):
            return _MAX_COUNT  # those with a record do not fill the batch
        tokens = newcomers_tokens(recorded.values(), goal.tokens, None if goal.exact else open_s)
        most = int(min(tokens / self.model.tokens_per_sample, _MAX_COUNT))
        each = max(batch, most // max(1, len(self.working().keys() - recorded.keys())))
        held = {holder: count(ranges) for holder, ranges in self.leases.held.items() if holder not in recorded}
        # What one keeps above its own part, from when it was alone, is not taken from the others'.
        together = sum(min(one, each) for one in held.values())
        return min(max(batch, most) - together, each - held.get(peer, 0))

    def averaging(self) -> set[str]:
        """The plan's members that are still here, and never left."""
        return {peer for peer in self.round.ranges if peer not in self.round.orphans}

    def is_complete(self) -> bool:
        """Whether nobody is left to be heard in this phase."""
        if self.round.phase == "averaging":
            return self.averaging() <= self.round.reports.keys()
        return self.leases.held.keys() <= self.round.ready.keys()

    def goal(self) -> Goal:
        """Of this round; the last one of a run that is limited in time closes with the run."""
        max_s = self.run.round.max_s
        if self.run.run.max_s is not None:
            left_s = self.run.run.max_s - self.elapsed_s(self.round.opened_s)
            max_s = min(max_s, max(left_s, 0.0))
        return Goal(self.run.round.tokens, max_s, exact=self.run.algorithm == "virtual_batch")

    def goal_samples(self) -> int:
        assert self.model is not None
        return -(-self.run.round.tokens // self.model.tokens_per_sample)

    def is_late(self, now_s: float) -> bool:
        return self.run.run.max_s is not None and self.elapsed_s(now_s) >= self.run.run.max_s
