"""One run's coordinator as a pure state machine: events and moments in, facts and views out.

Every decision is a fact: it is applied to the state at once and collected for the journal, which ``service.py``
writes before it tells anybody. Replaying the facts after a restart gives the same state again.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.swarm.coordinator import facts as f
from shoal.swarm.coordinator.admission import Admission
from shoal.swarm.coordinator.bandwidth import Bandwidths
from shoal.swarm.coordinator.coverage import epochs_covered
from shoal.swarm.coordinator.grouping import plan_round
from shoal.swarm.coordinator.leases import Ranges, count, from_wire, is_tidy, merge, to_wire
from shoal.swarm.coordinator.outdated import is_known, taken_over
from shoal.swarm.coordinator.rollback import Outage, Return, say_outlook, say_return
from shoal.swarm.coordinator.rounds import Judgement, closing_moment, judge, lost_work, weighted_mean
from shoal.swarm.coordinator.status import status_of
from shoal.swarm.deadlines import Delays
from shoal.swarm.errors import StaleWork, WireError
from shoal.swarm.messages import (
    CoordinatorToPeerStatus,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    RoundPlan,
    Verdict,
)
from shoal.swarm.run_file import RunFile
from shoal.swarm.verdicts import chain_hash, signed_bytes

Sign = Callable[[bytes], bytes]


class RunMachine(Admission):
    """The decisions on work and rounds. Methods named for events may raise a typed error for whoever caused it."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, now_s, epoch)
        self._sign = sign
        self._ticked_s = now_s
        self._ready_delays = Delays(self.deadlines.ready_s)
        self._report_delays = Delays(self.deadlines.ready_s)
        self._bandwidths = Bandwidths()
        self._outage = Outage(self.deadlines)
        self._outlook: Return | None = None

    # Events ---------------------------------------------------------------------------------------------

    def heartbeat(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, now_s: float) -> None:
        self.now_s = now_s
        moved = self.membership.hear(peer, heartbeat, self.round.number, now_s)
        if not self.membership.is_observer(peer):
            process = self.membership.members[peer].entry.certificate.curve_key
            self.sent_bytes.hear(peer, process, heartbeat.bytes_sent)
        if moved and self.round.moves_left and peer in self.round.ranges and peer not in self.round.reports:
            self.round.moves_left -= 1
            self.round.progress_s = now_s
        if moved:
            self._outage.saw_progress(now_s, self.membership.members[peer], self.history)
        if self.anchor_version == 0 and (self.agreed_digest is None or not (self.synced() or self.unheard())):
            # The first to be here says what the run starts from; if nobody has that any more, somebody else does.
            digest = self.membership.common_digest(0)
            if digest is not None:
                self.record(f.StateAgreed(anchor_version=0, digest=digest))
        if self.round.phase == "waiting" and self.synced():
            self.round.phase = "training"
            self.round.opened_s = now_s
            self.announcements += 1

    def request_lease(self, peer: str, ask: PeerToCoordinatorRequestLease, now_s: float) -> Ranges:
        """Samples for this peer; none when the round has all it needs or has been closed. With ``overlap``, whoever
        has done its part of a round that closes is given samples for the next one.

        The same request again gets the same answer: the first one was lost, with the connection or with us."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        before = self.answered.get(peer)
        if before is not None and (before.round, before.tokens_done) == (ask.round, ask.tokens_done):
            ranges = from_wire(before.ranges)
            if self.leases.holds(peer, ranges):
                return ranges
        if ask.round == self.round.number:
            member.tokens_done = ask.tokens_done
            is_open = self.round.phase in ("training", "waiting") or self._has_time_left(peer)
        elif ask.round == self.round.number + 1:
            member.tokens_ahead = ask.tokens_done
            is_open = self.run.averaging.overlap and (self.round.phase == "averaging" or peer in self.round.ready)
        else:
            return []
        if not is_open or peer not in self.working() or self.model is None:
            return []
        samples = min(ask.samples, self.lease_limit(peer))
        if samples <= 0:
            return []
        ranges = self.leases.choose(samples)
        self.record(f.LeaseGranted(peer=peer, round=ask.round, tokens_done=ask.tokens_done, ranges=to_wire(ranges)))
        return ranges

    def _has_time_left(self, peer: str) -> bool:
        """Whether it can still do something for a round whose closing is announced: where rounds are short, that is
        most of their time."""
        in_time = self.round.phase == "closing" and self.now_s < self.round.closes_s
        return in_time and peer not in self.round.ready and not self.goal().exact

    def ready(self, peer: str, ready: PeerToCoordinatorRoundReady, now_s: float) -> None:
        """A contribution is waiting. Raises ``StaleWork`` when its samples are not this peer's (any more)."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        if ready.round != self.round.number or self.round.phase != "closing" or not member.is_trainer:
            return  # also when the round goes on: its samples would not be all that this peer has done by the end
        ranges = from_wire(ready.ranges)
        if not is_tidy(ranges):
            raise WireError("the sample ranges of a contribution must not be empty or overlap")
        if not self.leases.holds(peer, ranges) or ready.anchor_version != self.anchor_version:
            raise StaleWork("these samples were given to others while this peer was silent; start from the anchor")
        if self.agreed_digest not in (None, ready.state_digest):
            raise StaleWork("this peer's state is not the run's; start from the anchor")
        if self.model is None or count(ranges) * self.model.tokens_per_sample != ready.weight_tokens:
            raise WireError("the weight of a contribution must be the tokens of its samples")
        member.tokens_done = ready.weight_tokens
        if peer not in self.round.ready:
            self._ready_delays.saw(now_s - self.round.closes_s)
        self.round.ready[peer] = ready

    def report(self, peer: str, report: PeerToCoordinatorRoundReport, now_s: float) -> None:
        self.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        plan = self.round.plan
        if plan is None or report.round != self.round.number or peer not in self.averaging():
            return
        if len(report.digests) != len(plan.parts) or any(
            one >= len(plan.members)
            for one in (*report.dropped, *report.failed, *(one.member for one in report.deliveries))
        ):
            raise WireError("the report does not fit the plan of its round")
        if peer not in self.round.reports:  # saying it again, or otherwise, holds off no verdict
            self._report_delays.saw(now_s - self.round.reported_s if self.round.reports else 0.0)
            self.round.progress_s = self.round.reported_s = now_s
        self.round.reports[peer] = report

    def take_over(self, verdict: Verdict, now_s: float) -> bool:
        """A verdict that this host has given (``outdated.check_ours``). False: our journal is too old to go on."""
        self.now_s = now_s
        if is_known(self, verdict):
            return True
        fact = taken_over(self, verdict, now_s)
        if fact is not None:
            covered = self._covered()
            self.record(fact)
            self._tell_covered(covered)
        return fact is not None

    def tick(self, now_s: float) -> None:
        """Whatever time decides: silence, closing, planning, verdict."""
        self.now_s = now_s
        self._excuse_own_silence(now_s)
        for peer in self.membership.silent(now_s, self.deadlines.dead_s):
            self.record(f.MemberLost(peer=peer, reason="silent"))
        self._look_for_holders(now_s)
        match self.round.phase:
            case "waiting" | "training" if self.is_late(now_s) and not self.working():
                self._give_verdict(Judgement(reason="the run's time was over"), now_s)
            case "training":
                self._tick_training(now_s)
            case "closing":
                self._tick_closing(now_s)
            case "averaging":
                self._tick_averaging(now_s)

    def _excuse_own_silence(self, now_s: float) -> None:
        """When we stood still (a suspended machine, a slow disk), nobody else was late."""
        stood_s, self._ticked_s = now_s - self._ticked_s, now_s
        if stood_s > self.deadlines.heartbeat_s:
            self.membership.excuse(stood_s, now_s)
            self.round.closes_s += stood_s
            self.round.progress_s += stood_s
            self.round.reported_s += stood_s
            self._outage.excuse(stood_s)

    def _look_for_holders(self, now_s: float) -> None:
        """Go back when nobody holds the newest state, and it is not worth waiting for anybody any more. A round that
        closes or is averaged ends by itself first."""
        self._outlook = None
        if not self._is_without_state():
            self._outage.end()
            return
        self._outlook = self._outage.look(now_s, self.history, self.agreed_digest, self.membership.members)
        if self._outlook is not None and self._outlook.is_due and self.round.phase in ("waiting", "training"):
            self._go_back_to(self._outlook, now_s)

    def _go_back_to(self, back: Return, now_s: float) -> None:
        made = self.history.rounds[back.version]
        went_back = f.WentBack(
            from_version=self.anchor_version, digest=made.digest, vouched_round=made.round, keepers=back.keepers
        )
        reason = say_return(back, self.history, len(self.membership.trainers()))
        self._outage.end()
        self._outlook = None
        self._give_verdict(Judgement(reason=reason), now_s, went_back)

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        outlook = ""
        if self._is_without_state() and self.round.phase != "ended":
            version, members = self.anchor_version, self.membership.members
            outlook = say_outlook(version, self.agreed_digest, self._outlook, members)
        return status_of(self, now_s, outlook)

    def _is_without_state(self) -> bool:
        """Members are here, and none of them holds the run's newest state. The first one they make themselves."""
        return bool(self.anchor_version and self.membership.trainers() and not self.synced())

    def _tick_training(self, now_s: float) -> None:
        works = self.works()
        if not works:
            if not self.membership.trainers():
                self.round.phase = "waiting"
                self.announcements += 1
            return
        moment = closing_moment(self.round.opened_s, self.goal(), works, now_s, self.deadlines)
        if moment is not None:
            self.record(f.RoundClosing(round=self.round.number))
            self.round.closes_s = moment

    def _tick_closing(self, now_s: float) -> None:
        """Whoever holds no samples brings none: nobody waits for them. Once half of those who do are ready, the others
        get as long as it has been taking; one that takes longer brings its work to the next round."""
        ready, working, unheard = self.round.ready, self.working(), self.unheard()
        awaited = [one for one in self.leases.held if one not in ready and (one in working or one in unheard)]
        if not self.membership.trainers():
            self.record(f.RoundReopened(round=self.round.number))
        elif now_s >= self.round.closes_s + self._worth_waiting_s(len(awaited)):
            self._plan(now_s)

    def _worth_waiting_s(self, awaited: int) -> float:
        ready = len(self.round.ready)
        if ready and not awaited:
            return 0.0
        # A batch that has to be whole is worth all the patience: without the straggler it begins anew.
        prompt = ready > awaited and not self.goal().exact
        return self._ready_delays.wait_s if prompt else self.deadlines.ready_s

    def _plan(self, now_s: float) -> None:
        ready = self.round.ready
        goal = self.goal()
        elements = sum(spec.elements for spec in self.model.layout) if self.model else 0
        self._measure()
        number, trainers, run = self.round.number, self.membership.trainers(), self.run
        size, seed = run.averaging.group_size, run.run.seed
        plan = plan_round(number, self.anchor_version, elements, ready, trainers, size, seed)
        if goal.exact and (sum(one.weight_tokens for one in plan.members) if plan else 0) < goal.tokens:
            self._free_kept_samples(plan)
            if now_s < self.round.opened_s + goal.max_s and not self.is_late(now_s):
                self.record(f.RoundReopened(round=self.round.number))
                return
        if plan is None:
            self._give_verdict(Judgement(reason="nobody had anything to contribute"), now_s)
            return
        peers = [member.peer for member in plan.members]
        losses = [(ready[peer].loss, ready[peer].weight_tokens) for peer in peers]
        loss = weighted_mean([(loss, weight) for loss, weight in losses if loss is not None])
        ranges = tuple(to_wire(merge(from_wire(ready[peer].ranges))) for peer in peers)
        self.record(f.RoundPlanned(plan=plan, ranges=ranges, loss=loss))

    def _measure(self) -> None:
        """Make up our mind about everybody's link."""
        trainers = self.membership.trainers()
        believed = self._bandwidths.believed({peer: one.claimed_bps for peer, one in trainers.items()})
        for peer, bps in believed.items():
            trainers[peer].bandwidth_bps = bps

    def _free_kept_samples(self, plan: RoundPlan | None) -> None:
        """A batch that has to be complete lacks samples: members that keep some and bring nothing usable lose them."""
        fine = {peer for peer, one in self.round.ready.items() if not one.weight_tokens}
        fine |= {member.peer for member in plan.members} if plan else set()
        for peer in [one for one in self.leases.held if one not in fine]:
            self.record(f.MemberLost(peer=peer, reason="kept samples from the others"))

    def _tick_averaging(self, now_s: float) -> None:
        assert self.round.plan is not None
        overdue = now_s > self.round.progress_s + self.deadlines.report_s
        enough = now_s > self.round.reported_s + self._report_delays.wait_s
        judgement = judge(
            self.round.plan,
            self.round.reports,
            self.averaging(),
            overdue=overdue,
            enough=enough,
            whole=self.goal().exact,
        )
        if judgement is not None:
            self._give_verdict(judgement, now_s)

    def _give_verdict(self, judgement: Judgement, now_s: float, went_back: f.WentBack | None = None) -> None:
        """``went_back`` only with a judgement that aborts the round; the version is the one of its vouched round."""
        plan, lost = self.round.plan, lost_work(self.round, judgement.digests)
        if plan is not None:
            self._bandwidths.learn(plan, self.round.reports)
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
            ended_s=round(max(0.0, now_s + self.unix_offset_s), 3),
            sent_bytes=self.sent_bytes.take(),
            run_hash=self.run.hash,
            previous_chain=self.chain,
            chain=bytes(32),
            signature=b"",
        )
        chain = chain_hash(unsigned)
        signed = unsigned.model_copy(update={"chain": chain, "signature": self._sign(signed_bytes(chain))})
        elapsed_s = self.elapsed_s(now_s)
        covered = self._covered()
        self.record(
            f.VerdictGiven(verdict=signed, elapsed_s=elapsed_s, lost=lost, failed=judgement.failed, went_back=went_back)
        )
        self._tell_covered(covered)

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
