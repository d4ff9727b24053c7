"""Scope with rounds: the members, the leases and the open round of one vector that is averaged.

A plain run is a barrier over one such scope (``run.py``), a pipeline one over a scope for each stage
(``pipeline_run.py``). Every decision is an event (``record``) that is applied to the state at once; replaying the
events gives the same state again. Moments are seconds on the coordinator's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from shoal.compression.formats import FormatMap
from shoal.swarm.averaging.norm_claims import claim_bytes
from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.admission import Admission, Standing
from shoal.swarm.coordinator.agreement import StateClaims
from shoal.swarm.coordinator.amendments import RunSettings
from shoal.swarm.coordinator.bandwidth import Bandwidths, sent_at_least
from shoal.swarm.coordinator.critical_path import MemberSeen, ScopeSeen, links_seen
from shoal.swarm.coordinator.divergence import (
    CombinedClaims,
    DivergenceRollback,
    Setback,
    combine_claims,
    divergence_rollback,
    say_divergence_rollback,
    warning_of,
)
from shoal.swarm.coordinator.evaluation_book import EvaluationBook, stop_reason
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.influence import (
    bounded,
    is_unusual,
    level_of,
    nears_bound,
    power_of,
    suspects_of,
    usual_loss,
    usual_norm,
    usual_tokens,
)
from shoal.swarm.coordinator.lease_ledger import LeaseLedger, RetrainedSamples, coverage_of, epochs_covered
from shoal.swarm.coordinator.leasing import Leasing
from shoal.swarm.coordinator.loss_trend import Trend, trend_of
from shoal.swarm.coordinator.membership import Member, Membership
from shoal.swarm.coordinator.model_check import adds_to, check_model
from shoal.swarm.coordinator.reachability import say_apart
from shoal.swarm.coordinator.rollback import (
    CommittedRound,
    History,
    Outage,
    PossibleRollback,
    say_outlook,
    say_rollback,
)
from shoal.swarm.coordinator.round_plan import (
    CHUNK_ELEMENTS,
    PlanRules,
    as_expected,
    as_secure,
    draw_secure,
    plan_round,
)
from shoal.swarm.coordinator.round_rules import (
    Goal,
    Judgement,
    Round,
    Work,
    closing_moment,
    expected_closing_s,
    is_over,
    judge,
    left_out,
    lost_work,
    makers_of,
    weighted_mean,
)
from shoal.swarm.coordinator.round_timing import TimingHistory
from shoal.swarm.coordinator.stage import Stage
from shoal.swarm.coordinator.stale_journal import is_known, taken_over
from shoal.swarm.coordinator.trust import (
    Accusations,
    Punctuality,
    accusations_of,
    counting,
    credit_of,
    earn_credit,
    median_weights,
    pace_after,
    weighted_median,
    work_after,
)
from shoal.swarm.coordinator.work_review import WorkReview
from shoal.swarm.coordinator.wrong_means import (
    believed_versions,
    is_pending,
    rollback_behind,
    say_rollback_behind,
    version_of,
)
from shoal.swarm.costs import run_costs
from shoal.swarm.deadlines import Deadlines, Delays
from shoal.swarm.errors import NotAdmitted, StaleWork, WireError
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerSecureBoard,
    CoordinatorToPeerStatus,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorSecureStep,
)
from shoal.swarm.protocol.pins import FIRST_STATE_OUTLOOK, PinnedLayer
from shoal.swarm.protocol.progress import RunProgress, progress_of
from shoal.swarm.protocol.rounds import RoundPlan, RunView, StateAgreement, Verdict, VerdictOnPlan, scale_block
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.secure import MOST_MEMBERS
from shoal.swarm.protocol.statements import PlanStatement, RoundName
from shoal.swarm.protocol.statements import plan_digest as digest_of_plan
from shoal.swarm.protocol.types import MAX_RATE, DivergenceWord, Record, TensorSpec
from shoal.swarm.protocol.verdict_chain import agreement_bytes, chain_hash, genesis, signed_bytes
from shoal.swarm.sample_ranges import count, from_wire, is_tidy, merge, subtract, to_wire
from shoal.swarm.secure.board import SecureBoard, SecureFailure

Sign = Callable[[bytes], bytes]

_FEWEST_WITNESSES = 3
"""Fewest members with credit whose reports alone are believed: of each, two others tell how fast its link is."""

_MAX_COUNT = 2**62
EXACT_MEMBERS = 64
"""Number of members up to which the sum is never cached."""

COUNTED_S = 0.25
"""Largest age of a cached sum in larger swarms."""

_MOST_OUTLOOK = 2000
_MOST_VIEWS = 64
_LATEST_ROUNDS = 8
"""Rounds from which the speed of a run is told: enough to be steady, few enough to follow joins."""

_MOST_EARLY_S = 5.0
"""Longest time for which the closing moment of a larger swarm's round is not looked for."""


@dataclass
class CachedSum:
    """A sum over all members, cached for a moment within one round, as every view has it."""

    count: int = 0
    counted_s: float = -math.inf
    round: int = -1

    def take(self, round_number: int, now_s: float, members: int, count: Callable[[], int]) -> int:
        """Return ``count()``, or its last result if that is fresh and of this round."""
        is_fresh = round_number == self.round and self.counted_s <= now_s < self.counted_s + COUNTED_S
        if members <= EXACT_MEMBERS or not is_fresh:
            self.count, self.counted_s, self.round = count(), now_s, round_number
        return self.count


@dataclass
class KnownWalls:
    """Reasons why members cannot take part; kept for a moment in larger swarms, as finding them takes a look at all
    members, and they change with each that joins."""

    _walls: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    _made_s: float = field(default=-math.inf, compare=False)

    def take(self, now_s: float, many: bool, look: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
        """Return ``look()``, or what it returned a moment ago if there are many members."""
        if not many or not self._made_s <= now_s < self._made_s + COUNTED_S:
            self._walls, self._made_s = look(), now_s
        return self._walls


@dataclass
class MadeViews:
    """Views of the newest state: members that have to be told the same get the same object, which is packed once."""

    _made: dict[tuple[object, ...], RunView] = field(default_factory=dict, compare=False, repr=False)
    _sequence: int = field(default=-1, compare=False)

    def make(self, sequence: int, **fields: Any) -> RunView:
        """Return a view with these fields. What is no plain value is told apart by identity, which costs nothing."""
        if sequence != self._sequence or len(self._made) >= _MOST_VIEWS:
            self._made.clear()
            self._sequence = sequence
        of = tuple([id(one) if isinstance(one, Record | tuple) else one for one in fields.values()])
        view = self._made.get(of)
        if view is None:
            view = self._made[of] = RunView.model_construct(sequence=sequence, **fields)
        return view


@dataclass
class ToldOutlook:
    """Words for what a run waits for, as every member's view has it: kept for a moment, and told only once it lasts.

    After each round it takes members some moments to say that they hold the new state, which is nothing to tell."""

    words: str = ""
    made_s: float = -math.inf
    since_s: float | None = None

    def take(self, now_s: float, say: Callable[[], str], quiet_s: float) -> str:
        """Return ``say()``, or what it said a moment ago, once there was something to say for ``quiet_s``."""
        if not self.made_s <= now_s < self.made_s + COUNTED_S:
            self.words, self.made_s = say()[:_MOST_OUTLOOK], now_s
            self.since_s = None if not self.words else now_s if self.since_s is None else self.since_s
        return self.words if self.since_s is not None and now_s - self.since_s >= quiet_s else ""


class RoundScope:
    """Scope in which one vector is averaged round by round: a plain run, or one stage of a pipeline.

    Holds its parts: ``membership`` and ``admission``, the ``leases`` of samples and who is granted them (``leasing``),
    the open ``round``, the committed ``history`` and what trust is based on. ``stage``: what a stage of a pipeline has
    beside, else None. State changes by events alone (``record``, ``apply``), but for heartbeats and moments."""

    def __init__(
        self,
        run: RunFile,
        sign: Sign,
        log: EventLog,
        stage: int | None = None,
        layers: Sequence[PinnedLayer] = (),
        settings: RunSettings | None = None,
    ) -> None:
        """``stage``: the number of the stage that this scope is, whose ``layers`` the run file may pin; ``settings``:
        those of the whole run."""
        self.settings = settings or RunSettings(run)
        self.log = log
        self.round = Round(0, opened_s=log.now_s, began_s=log.now_s)
        self.timings = TimingHistory()
        """Of the run; of a pipeline shared by its stages."""
        self.deadlines = Deadlines(run.round.patience_s)
        self.stage = None if stage is None else Stage(self, stage, layers)
        self.membership = Membership(roster_version=log.epoch)
        self.timed = self.membership if stage is None else None
        """Members whose time is counted round by round; of a pipeline by its first stage."""
        self.admission = Admission(run, log, self)
        self.model: PeerToCoordinatorDescribeModel | None = None
        self.elements = 0
        """Number of the model's parameters, as layouts are long."""
        self.anchor_version = 0
        self.agreed_digest: bytes | None = None
        self.agreement: StateAgreement | None = None
        self.took_part: frozenset[str] = frozenset()
        """Members of the plan that made this version, whose reports decide on its digest."""
        self._claims = StateClaims()
        self.leases = LeaseLedger()
        self.leasing = Leasing(self)
        self.retrained = RetrainedSamples()
        self.accusations = Accusations()
        self.review = WorkReview(self)
        self.chain = genesis(run.hash, self.number)
        self.verdict: Verdict | None = None
        self.history = History()
        self.setback = Setback()
        self.evaluations = EvaluationBook()
        self.stopping = ""
        """Why the open round is the run's last one, or was, beside the limits of the run file."""
        self.noticed = ""
        """Kind of the trend that was noticed last."""
        self.disproved: ev.MeanDisproved | None = None
        """Mean behind which the run is about to go back."""
        self.together: Sequence[RoundScope] = (self,)
        """Scopes that go back together: this one, or all stages of a pipeline."""
        self.rounds_aborted = self.rounds_undone = 0
        self.tokens_committed = self.tokens_undone = 0
        self.loss: float | None = None
        self.started_s = log.now_s
        self.elapsed_before_s = 0.0
        self._tokens_in_round = CachedSum()
        self._sign = sign
        self._run_hash = run.hash
        """Of the run as it began; working it out takes a while."""
        self._stated: tuple[RoundPlan, PlanStatement, bytes] | None = None
        self._without_plan: VerdictOnPlan | None = None
        """The newest verdict that members with its plan were told."""
        self._ready_delays = Delays(self.deadlines.ready_s)
        self._report_delays = Delays(self.deadlines.ready_s)
        self._bandwidths = Bandwidths()
        self._punctuality = Punctuality()
        self._outage = Outage(self.deadlines)
        self._outlook: PossibleRollback | None = None
        self._told_outlook = ToldOutlook()
        self._views = MadeViews()
        self._walls = KnownWalls()
        self.wants_last_state = False
        """Whether the host is about to fetch the last state when the run has ended."""
        self._asked_for_kept_s: float | None = None
        self._too_early: tuple[tuple[int, float], float] = (-1, 0.0), 0.0
        """A round, by its number and opening, and the moment before which it is not worth adding up when it closes."""

    @property
    def run(self) -> RunFile:
        """The run file as it is in the open round."""
        return self.settings.at(self.round.number)

    @property
    def number(self) -> int:
        """Number of the scope in messages and in the journal: 0 for a run, s + 1 for stage s."""
        return 0 if self.stage is None else self.stage.number + 1

    @property
    def name_of_round(self) -> RoundName:
        """Name of the open round in what is signed about it."""
        return RoundName(self._run_hash, None if self.stage is None else self.stage.number, self.round.number)

    @property
    def label(self) -> str:
        """Beginning of reasons, where they have to say which stage they are about."""
        return "" if self.stage is None else f"stage {self.stage.number}: "

    @property
    def has_ended(self) -> bool:
        return self.round.phase == "ended"

    @property
    def round_number(self) -> int:
        return self.round.number

    @property
    def urgent_state(self) -> tuple[int, str, int]:
        """State whose changes are sent to the members at once, without waiting for their heartbeats."""
        return self.round.number, self.round.phase, self._secure_stage

    @property
    def _secure_stage(self) -> int:
        return int(self.round.board.stage) if self.round.board is not None else 0

    @property
    def is_beginning_written(self) -> bool:
        """Whether the run file determines version 0 of the state."""
        return self.run.start is not None or bool(self.run.pins and self.run.pins.state)

    def written_beginning(self, layout: tuple[TensorSpec, ...]) -> bytes | None:
        """Return the digest of version 0 of the state that follows from the run file; None where members decide it."""
        if self.run.start is not None:
            return self.run.start.state_digest(layout)
        return bytes.fromhex(self.run.pins.state) if self.run.pins and self.run.pins.state else None

    # Events ---------------------------------------------------------------------------------------------

    def record(self, event: ev.JournalEvent) -> None:
        """Decide: the event changes the state, and goes to the journal."""
        self.log.record(self, event)

    def apply(self, event: ev.JournalEvent) -> None:
        """Change the state as a new event says, or one from the journal."""
        match event:
            case ev.RunSnapshot():
                self._restore(event)
            case ev.CoordinatorStarted():
                self.membership.roster_version = max(self.membership.roster_version, self.log.epoch)
                self.membership.skip_time(event.at_s)
                if self.round.board is not None:
                    self.round.board.forget()
            case ev.MemberJoined():
                self.membership.join(event, self.log.now_s, self.anchor_version)
                self.admission.access_list.apply(event)
            case ev.MemberMoved():
                self.membership.move(event)
            case ev.ModelDescribed():
                self.model, self.elements = event.model, event.model.elements
                if self.anchor_version == 0:
                    self.agreed_digest = self.written_beginning(event.model.layout) or self.agreed_digest
            case ev.StateAgreed():
                assert event.agreement.anchor_version == self.anchor_version
                self.agreed_digest, self.agreement = event.agreement.digest, event.agreement
                self._claims = StateClaims()
            case ev.MemberLost():
                if event.reason == ev.KEPT_SAMPLES:
                    self._leave_out([event.peer])
                self._note_loss(event.peer)
                self.membership.lose(event)
                for peer in self.membership.forget_strangers(self._left_traces):
                    self.admission.sent_bytes.forget(peer)
                    self._punctuality.forget(peer)
                self._lose_work(event.peer)
            case ev.LeaseGranted():
                self.leases.grant(event.peer, from_wire(event.ranges))
                self.leasing.answered[event.peer] = event
            case ev.SamplesClaimed():
                self.leases.grant(event.peer, from_wire(event.ranges))
            case ev.SamplesReleased():
                self.leases.give_back(
                    event.peer, subtract(self.leases.held.get(event.peer, []), from_wire(event.ranges))
                )
                self.round.ready.pop(event.peer, None)  # what it had offered is another contribution now
            case ev.SamplesDriven():
                assert self.stage is not None
                self.stage.micro_batches.take(event.peer, from_wire(event.ranges), from_wire(event.done))
            case ev.RoundClosing():
                self.round.phase = "closing"
                self.round.closes_s = self.log.now_s
            case ev.RoundReopened():
                self.round.phase = "training" if self.membership.trainers() else "waiting"
                self.round.ready.clear()
                self.round.expected = None
            case ev.RoundPlanned():
                self._begin_averaging(event)
            case ev.VerdictGiven():
                self._end_round(event)
            case ev.RunAmended():
                self.settings.add(event.amendments, event.round)
            case _ if isinstance(event, ev.AccessEvent):
                self.admission.access_list.apply(event)
                if isinstance(event, ev.PeerBanned | ev.MemberExpelled):
                    self.membership.forfeit_credit(event)
                elif isinstance(event, ev.PeerAllowed) and event.peer in self.membership.members:
                    self.membership.note_work(event.peer, ev.WorkStanding())
            case ev.LossRose() | ev.FigureTaken() | ev.AccessRecorded():
                pass  # for people
            case ev.WorkScored():
                score = event.signed.score
                before = self.membership.members[score.peer].work
                self.membership.note_work(score.peer, work_after(before, event.by, score))
            case ev.ModelEvaluated():
                self.evaluations.take(event)
            case ev.TrendNoticed():
                self.noticed = event.kind
            case ev.StopDecided():
                self.stopping = event.reason
            case ev.MeanDisproved():
                self.disproved = event
            case ev.EpochsCovered():
                self.retrained.forget(event.stop * event.samples)
            case _:
                raise AssertionError(f"no rule for {type(event).__name__}")

    def _lose_work(self, peer: str) -> None:
        self.leasing.lose(peer)
        averaged = self.round.ranges.get(peer)
        if averaged is not None:
            self.round.orphans.add(peer)  # the verdict decides on its samples
        self.leases.give_back(peer, keep=averaged)
        self.round.ready.pop(peer, None)
        self.round.reports.pop(peer, None)
        if self.stage is not None:
            self.stage.micro_batches.lose(peer)
        if self.round.plan is None:
            self.round.expected = None  # it may rejoin before the plan, with other work

    def _note_loss(self, peer: str) -> None:
        """Note that the others go on without a member, whose work is lost unless the round has it already."""
        member, current = self.membership.members[peer], self.round
        if current.phase == "closing" and peer in self.leases.held:
            current.readied_s[peer] = self.log.now_s
        elif current.phase == "averaging" and peer in current.ranges and peer not in current.reports:
            current.reports_s[peer] = self.log.now_s
        done = member.tokens_ahead if peer in current.ranges else member.tokens_done + member.tokens_ahead
        self.timings.wasted(min(done, self.leased_tokens(peer)))

    def _left_traces(self, peer: str) -> bool:
        """Whether the run would be another one without this member."""
        one = self.membership.members[peer]
        return bool(one.rounds_committed or one.tokens_committed or one.failures) or peer in self.round.ranges

    def standing(self, peer: str) -> Standing:
        """Return the reasons to keep a member."""
        member = self.membership.members.get(peer)
        if member is None:
            return Standing(False, 0)
        has_credit = member.has_credit or self.review.is_validator(peer)
        return Standing(has_credit, member.rounds_committed, self.membership.credit_shares().get(peer, 0.0))

    def _begin_averaging(self, event: ev.RoundPlanned) -> None:
        self.round.phase = "averaging"
        self.round.plan = event.plan
        self.round.loss, self.round.median_loss = event.loss, event.median_loss
        self.round.progress_s = self.round.reported_s = self.round.planned_s = self.log.now_s
        peers = [member.peer for member in event.plan.members]
        self.round.moves_left = dict.fromkeys(peers, -(-event.plan.parts[-1].stop // event.plan.chunk_elements))
        self.round.ranges = {peer: from_wire(one) for peer, one in zip(peers, event.ranges, strict=True)}
        if event.plan.secure is not None:
            about, patience_s = self.plan_statement(event.plan), self.deadlines.patience_s
            self.round.board = SecureBoard(event.plan, about, patience_s, self.log.now_s)

    def _end_round(self, event: ev.VerdictGiven) -> None:
        verdict = event.verdict
        assert verdict.round == self.round.number, "one verdict a round"
        assert verdict.previous_chain == self.chain, "an unbroken chain"
        self.settings.adopt(verdict)
        # By the verdicts' own times, so that a verdict taken over from a member gives the same paces.
        lasted_s = verdict.ended_s - self.verdict.ended_s if self.verdict else 0.0
        if self.timed is not None:
            self.timed.end_round(verdict.ended_s, event.energy_j)
        self.verdict, self.chain = verdict, verdict.chain
        took_s = max(0.0, event.elapsed_s - self.elapsed_before_s)
        self.elapsed_before_s, self.started_s = event.elapsed_s, self.log.now_s
        committed = {one.peer for one in verdict.plan.members} if verdict.committed and verdict.plan else set()
        for peer, member in self.membership.trainers().items():
            member.enter_round(peer in committed)
        for peer in event.failed:
            self.membership.members[peer].fail()
        if verdict.committed:
            self._learn_paces(verdict, lasted_s)
            self._commit(event, took_s)
            self._carry(verdict, event.carrying)
            for peer in committed.difference(event.lost, event.missing):
                self.membership.members[peer].deliver()
        else:
            self.rounds_aborted += 1
            for peer, ranges in self.round.ranges.items() if verdict.spent else ():
                self.leases.commit(peer, ranges)  # nobody trains on them again
        for peer in self.round.orphans:  # one that has rejoined keeps what it was leased since
            since = subtract(self.leases.held.get(peer, []), self.round.ranges[peer])
            self.leases.give_back(peer, keep=since)
        self._leave_out(event.missing)
        self.accusations.take(event.accusations, verdict.round)
        self.leasing.clock.end_round(committed.difference(event.lost), self.round.opened_s)
        if event.went_back is not None:
            self._go_back(verdict, event.went_back)
        if self.stage is not None and not verdict.committed:
            # A batch is committed in all stages or in none: the round begins anew, without claims.
            for peer in list(self.leases.held):
                self.leases.give_back(peer)
            for member in self.membership.members.values():
                member.forget_progress()
        if self.stage is not None:
            self.stage.micro_batches = self.stage.micro_batches.next_round()
        self.setback = self.setback.passed(self.anchor_version)
        phase, closed_s = self.round.phase, self.round.closes_s
        ahead = self.run.averaging.overlap and phase in ("closing", "averaging")
        opened_s = min(closed_s, self.log.now_s) if ahead else self.log.now_s
        self.round = Round(verdict.round + 1, opened_s=opened_s, began_s=self.log.now_s)
        if phase != "waiting" and self.membership.trainers():
            self.round.phase = "training"
        if self.stopping or is_over(
            self.run.run, self.tokens_committed, self.rounds_committed, self.elapsed_s(self.log.now_s)
        ):
            self.round.phase = "ended"

    def _learn_paces(self, verdict: Verdict, lasted_s: float) -> None:
        """Update the members' paces. The duration of the run's first round is unknown."""
        assert verdict.plan is not None
        members, credited = self.membership.members, self.membership.with_credit()
        lasted_s = min(lasted_s, self.run.round.max_s)
        paces = {
            one.peer: pace_after(members[one.peer], one.weight_tokens, lasted_s, credited)
            for one in verdict.plan.members
            if lasted_s > 0.0
        }
        for peer, pace_tps in paces.items():
            members[peer].pace_tps = pace_tps

    def _leave_out(self, missing: Iterable[str]) -> None:
        """Leave members out for a while whose contributions were waited for in vain, round after round.

        They keep the samples that they hold and get no more: whoever had a bad link brings its work later. In a stage,
        which may have no other replica, they lose their place instead (``Barrier.evict_persistent_stragglers``)."""
        for peer in missing if self.stage is None else ():
            self.membership.members[peer].miss(self.round.number)

    def is_left_out(self, peer: str) -> bool:
        """Whether a member's work does not count in this round, as its earlier contributions did not come."""
        return self.round.number < self.membership.members[peer].out_until

    def counts(self, peer: str) -> bool:
        """Whether a member's reports influence others: it has credit, or nobody has."""
        credited = self.membership.with_credit()
        return not credited or peer in credited

    def _commit(self, event: ev.VerdictGiven, took_s: float) -> None:
        verdict, lost, plan = event.verdict, event.lost, event.verdict.plan
        assert plan is not None
        self.anchor_version = verdict.anchor_version
        self._forget_agreement()
        self.took_part = frozenset(one.peer for one in plan.members)
        self.tokens_committed += verdict.tokens
        self.loss = verdict.loss if verdict.loss is not None else self.loss
        ranges = {one.peer: self.round.ranges[one.peer] for one in plan.members}
        members, power = self.membership.members, power_of(self.run)
        level = level_of(plan.members, members, power)
        usual = usual_norm(plan.members, plan.rho, level)
        suspects = tuple(peer for peer in suspects_of(plan, members, power) if peer not in lost)
        gone = {peer: ranges.pop(peer) for peer in lost}
        for peer, mine in gone.items() if plan.secure is not None else ():
            self.leases.commit(peer, mine)  # they may have left masked: nobody trains on them again
        self.retrained.lose([one for mine in gone.values() for one in mine] if plan.secure is None else [])
        for planned in plan.members:
            if planned.peer in ranges:
                self.leases.commit(planned.peer, ranges[planned.peer])
                member = self.membership.members[planned.peer]
                member.tokens_committed += planned.weight_tokens
                member.rounds_committed += 1
                member.worked_version = plan.anchor_version
                member.unusual_rounds += is_unusual(planned, usual, power)
                member.last_tokens = planned.weight_tokens
                member.worked_s = self.log.now_s
        # Not for what is not in the mean, nor for what is as large as is just let through or next to nothing, nor for
        # doubted work. Of a round with a void part everybody carries something on.
        is_whole = None not in verdict.digests
        unproven = {*lost, *event.missing, *(event.carrying if is_whole else ())}
        unusual = {one.peer for one in plan.members if is_unusual(one, usual, power)}
        unproven |= unusual | {one.peer for one in plan.members if nears_bound(one, usual, power)}
        unproven |= {one.peer for one in plan.members if members[one.peer].work.is_doubted}
        earning = {one.peer: one.weight_tokens for one in plan.members if one.peer not in unproven}
        earn_credit(members, earning, max(verdict.tokens, usual_tokens(self.history.rounds)))
        strikes = self.membership.with_credit() and self.run.averaging.robust != "none"
        for peer in unusual.difference(lost) if strikes else ():
            if members[peer].is_always_unusual:
                members[peer].suspend(verdict.round)
                self.leases.give_back(peer)
        # Time beyond the round's limit was time without members.
        took_s = min(took_s, self.run.round.max_s)
        merged = tuple(merge(one for mine in ranges.values() for one in mine))
        about = level, plan.rho, self.round.median_loss, suspects
        done = CommittedRound(verdict.round, plan.state_digest, verdict.tokens, took_s, merged, *about)
        self.history.rounds.append(done)
        if self.disproved is not None and not is_pending(self.disproved, self.history):
            self.disproved = None
        assert len(self.history.rounds) == self.anchor_version
        self.membership.advance(self.anchor_version)

    def _carry(self, verdict: Verdict, carrying: tuple[str, ...]) -> None:
        """Note the work that the mean lacks: members bring it with their next contribution."""
        for planned in verdict.plan.members if verdict.plan else ():
            member = self.membership.members[planned.peer]
            left_out = planned.weight_tokens if planned.peer in carrying else 0
            member.carried_tokens = min(member.carried_tokens + left_out, _MAX_COUNT) if left_out else 0

    def is_suspended(self, peer: str) -> bool:
        """Whether a member's work does not count now, as it is suspected of having spoilt earlier rounds."""
        return self.round.number < self.membership.members[peer].suspended_until

    def _go_back(self, verdict: Verdict, to: ev.WentBack) -> None:
        """Undo rounds. Members keep the credit for their undone work; suspects are left out for a while."""
        if to.diverged:
            self.setback = self.setback.after_return(to.bad_version, bool(to.suspects))
        for peer in to.suspects:
            self.membership.members[peer].suspend(verdict.round)
            self.leases.give_back(peer)
        rounds, tokens, ranges = self.history.undo(verdict.anchor_version)
        if self.disproved is not None and verdict.anchor_version <= self.disproved.version:
            self.disproved = None
        self._forget_agreement()
        self.evaluations.undo(verdict.anchor_version)
        self.stopping = ""
        self.anchor_version, self.agreed_digest, self.took_part = verdict.anchor_version, to.digest, frozenset()
        self.tokens_committed -= tokens
        assert self.tokens_committed == verdict.tokens_total
        self.rounds_undone += rounds
        self.tokens_undone += tokens
        if self.run.averaging.secure:
            # The same work from the same anchor in another group would be known from the difference of two sums.
            for peer, planned in self.round.ranges.items():
                self.leases.commit(peer, planned)
            ranges = []
        self.leases.uncommit(ranges)
        self.retrained.undo(ranges)
        self.leasing.answered.clear()
        self.membership.go_back(self.anchor_version)

    def _forget_agreement(self) -> None:
        self.agreed_digest = self.agreement = None
        self._claims = StateClaims()

    @property
    def rounds_committed(self) -> int:
        """Number of committed rounds in the anchor, without those that were undone."""
        return len(self.history.rounds)

    # Views and status -----------------------------------------------------------------------------------

    def view(
        self,
        peer: str,
        now_s: float,
        roster_version: int = -1,
        verdict_chain: bytes | None = None,
        plan_digest: bytes | None = None,
    ) -> RunView:
        """Return what a member has to know; roster, verdict and plan only if it lacks them.

        Its fields are ours, and were checked where they were made: a plan of a thousand members takes a millisecond."""
        member = self.membership.members.get(peer)
        newest = self.verdict.chain if self.verdict else None
        closing = self.round.phase == "closing"
        roster, delta = self.membership.roster_news(roster_version)
        plan, verdict = self.round.plan, self.verdict if verdict_chain != newest else None
        stated = self._stated_plan(plan) if plan is not None else None
        on_plan = self._on_plan(verdict, plan_digest) if verdict is not None and plan_digest is not None else None
        return self._views.make(
            epoch=self.log.epoch,
            sequence=self.log.announcements,
            round=self.round.number,
            anchor_version=self.anchor_version,
            phase=self.round.phase,
            closes_in_s=max(0.0, self.round.closes_s - now_s) if closing else None,
            plan=plan if stated is not None and stated[1].plan != plan_digest else None,
            plan_digest=stated[1].plan if stated is not None else None,
            plan_signature=stated[2] if stated is not None else b"",
            expected=self.round.expected if closing else None,
            as_expected=self.round.plan is not None and self.round.expected is not None,
            secure_stage=self._secure_stage,
            divergence=self.word_on_divergence(peer) if member is not None and member.diverged else "",
            wall=self.walls().get(peer, ""),
            verdict=verdict if on_plan is None else None,
            verdict_on_plan=on_plan,
            verdict_chain=newest,
            state_digest=self.agreed_digest,
            agreement=self.agreement,
            is_disputed=self.is_disputed,
            wants_kept=any(one.disproved is not None for one in self.together),
            tokens_committed=self.tokens_committed,
            tokens_in_round=self.tokens_in_round(),
            members=len(self.membership.trainers()),
            must_resync=member is not None and self._must_resync(member),
            roster_version=self.membership.roster_version,
            roster=roster,
            roster_delta=delta,
            amendments=self.settings.made,
            stays=self.has_ended and self.wants_last_state,
            waits_for=self._told_outlook.take(now_s, self.say_outlook, 2 * self.deadlines.heartbeat_s)
            if self.stage is None
            else "",
        )

    def _on_plan(self, verdict: Verdict, plan_digest: bytes) -> VerdictOnPlan | None:
        """Return a verdict without its plan, made once; None unless this is the digest of that."""
        if verdict.plan is None:
            return None
        if self._without_plan is None or self._without_plan.bare.chain != verdict.chain:
            is_stated = self._stated is not None and self._stated[0] is verdict.plan
            digest = self._stated[1].plan if self._stated is not None and is_stated else None
            self._without_plan = VerdictOnPlan.of(verdict, digest or digest_of_plan(verdict.plan))
        return self._without_plan if self._without_plan.plan_digest == plan_digest else None

    def plan_statement(self, plan: RoundPlan) -> PlanStatement:
        """Return the host's statement of the open round's plan, made once."""
        return self._stated_plan(plan)[1]

    def _stated_plan(self, plan: RoundPlan) -> tuple[RoundPlan, PlanStatement, bytes]:
        if self._stated is None or self._stated[0] is not plan:
            statement = PlanStatement(self.name_of_round, digest_of_plan(plan))
            self._stated = plan, statement, self._sign(statement.bytes_to_sign())
        return self._stated

    def trusted_members(self) -> dict[str, Member]:
        """Return the live trainers whose claims that the run has diverged count."""
        return {peer: one for peer, one in self.membership.trainers().items() if not self.is_suspended(peer)}

    def combine_claims(self) -> CombinedClaims:
        """Combine the claims of divergence that count."""
        if all(one.diverged is None for one in self.membership.trainers().values()):
            return CombinedClaims()
        return combine_claims(
            self.trusted_members(), self.history, self.agreed_digest, ahead=self.run.averaging.overlap
        )

    def divergence_rollback(self) -> DivergenceRollback | None:
        """Return how the run leaves a version from which the members with most of the work cannot go on.

        None without such a version, without a state to go back to, and when that has been tried often enough."""
        bad = self.combine_claims().bad_version
        if bad is None:
            return None
        return divergence_rollback(bad, self.setback, self.history, self.trusted_members(), self.membership.members)

    def word_on_divergence(self, peer: str) -> DivergenceWord:
        """Answer a member that reports that its work has diverged."""
        combined = self.combine_claims()
        if peer not in combined.claims:  # or a suspect, whose claim does not count
            return "go on"
        if combined.bad_version is not None:
            return "unrecoverable" if self.divergence_rollback() is None else ""
        return "at fault" if peer in combined.at_fault else ""

    @property
    def is_disputed(self) -> bool:
        """Whether those who decide on the state differ: everybody replays it, and nothing is planned."""
        return self._claims.is_disputed

    def elapsed_s(self, now_s: float) -> float:
        """Return how long the run has lasted, without the time that the coordinator was away."""
        # The round that would come next begins at the run's end.
        until_s = max(self.started_s, self.round.opened_s) if self.has_ended else now_s
        return max(0.0, self.elapsed_before_s + until_s - self.started_s)

    def _steady_tokens_per_s(self) -> dict[str, float]:
        """Speed by member over the wall time of the newest round that it took part in, the time between steps included.

        The duration of the run's first round is unknown."""
        rounds, speeds = self.history.rounds, dict[str, float]()
        for peer, member in self.membership.members.items():
            version = member.worked_version
            if version is not None and 0 <= version < len(rounds) and rounds[version].took_s > 0.0:
                speeds[peer] = min(member.last_tokens / rounds[version].took_s, MAX_RATE)
        return speeds

    def _progress(self, now_s: float) -> RunProgress:
        latest = [one for one in self.history.rounds[-_LATEST_ROUNDS:] if one.took_s > 0.0]
        took_s = sum(one.took_s for one in latest)
        return progress_of(
            self.run.run,
            self.run.round.tokens,
            tokens=self.tokens_committed,
            rounds=self.rounds_committed,
            elapsed_s=self.elapsed_s(now_s),
            tokens_per_s=0.0 if self.has_ended or not took_s else sum(one.tokens for one in latest) / took_s,
        )

    def _must_resync(self, member: Member) -> bool:
        """Whether a member holds another state than this version's, or a version that was undone."""
        version = member.anchor_version
        other = self.agreed_digest is not None and member.state_digest not in (None, self.agreed_digest)
        other = other or self.is_disputed
        return version is not None and (version > self.anchor_version or (version == self.anchor_version and other))

    def synced(self) -> Mapping[str, Member]:
        """Return the live trainers that hold the newest state; nobody while that is disputed."""
        if self.is_disputed:
            return {}
        return self.membership.synced(self.anchor_version, self.agreed_digest)

    def walls(self) -> Mapping[str, str]:
        """Return why live trainers cannot take part, by peer: those that can meet none of whom they would have to."""
        many = len(self.membership.trainers()) > EXACT_MEMBERS
        return self._walls.take(self.log.now_s, many, lambda: self.membership.walls(self.run.averaging.group_size))

    def say_apart(self) -> str:
        """Say which members cannot meet the others, and what to do; empty when all can."""
        return say_apart(self.membership.trainers(), self.walls())

    def working(self) -> Mapping[str, Member]:
        """Return the live trainers whose work counts in this round.

        With ``overlap`` that includes those that hold the version before: they apply the last verdict at their next
        step."""
        if not self.run.averaging.overlap or self.anchor_version == 0:
            return self.synced()
        return {**self.membership.synced(self.anchor_version - 1, None), **self.synced()}

    def leased_tokens(self, peer: str) -> int:
        """Return the tokens of a member's leases: the most that it can have done."""
        return self.leases.samples_of(peer) * (self.model.tokens_per_sample if self.model else 0)

    def works(self) -> list[Work]:
        return [
            Work(one.tokens_done, one.tokens_per_s, one.step_s, one.heard_s, self.leased_tokens(peer))
            for peer, one in self.working().items()
            if not self.is_left_out(peer)
        ]

    def tokens_in_round(self) -> int:
        """Return the tokens that are done and not committed, including those done for the next round."""
        trainers = self.membership.trainers()
        return self._tokens_in_round.take(
            self.round.number,
            self.log.now_s,
            len(trainers),
            lambda: min(
                sum(
                    min(one.tokens_done + one.tokens_ahead, self.leased_tokens(peer)) for peer, one in trainers.items()
                ),
                _MAX_COUNT,
            ),
        )

    def unheard(self) -> set[str]:
        """Return members with samples that have not reported their state since the coordinator restarted."""
        members = self.membership.members
        return {peer for peer in self.leases.held if members[peer].alive and members[peer].anchor_version is None}

    def averaging(self) -> set[str]:
        """Return the plan's members that have not left since."""
        return {peer for peer in self.round.ranges if peer not in self.round.orphans}

    def is_averaging(self, peer: str) -> bool:
        """Whether this is a member of the plan that has not left since."""
        return peer in self.round.ranges and peer not in self.round.orphans

    def is_complete(self) -> bool:
        """Whether all reports, or contributions, of this phase are here."""
        if self.round.phase == "averaging":
            if len(self.round.reports) < len(self.round.ranges) - len(self.round.orphans):
                return False  # asked at each of thousands of reports
            return self.averaging() <= self.round.reports.keys()
        return self.leases.held.keys() <= self.round.ready.keys()

    def goal(self) -> Goal:
        """Return when this round has enough. The last round of a run that is limited in time closes with the run."""
        max_s = self.run.round.max_s
        if self.run.run.max_s is not None:
            left_s = self.run.run.max_s - self.elapsed_s(self.round.opened_s)
            max_s = min(max_s, max(left_s, 0.0))
        if self.run.collective is not None:
            # A call is complete with all that can take part: those of the last one may not have said yet that they
            # hold the new version.
            here = self.synced().keys() | (self.took_part & self.membership.trainers().keys())
            return Goal(sum(not self.is_left_out(peer) for peer in here) or 1, max_s, exact=False, everybody=True)
        if self.stopping and self.run.algorithm != "virtual_batch":
            return Goal(1, max_s, exact=False)  # the last round takes what is done by now
        return Goal(self.run.round.tokens, max_s, exact=self.run.algorithm == "virtual_batch")

    def goal_samples(self) -> int:
        assert self.model is not None
        return -(-self.run.round.tokens // self.model.tokens_per_sample)

    def is_late(self, now_s: float) -> bool:
        return self.run.run.max_s is not None and self.elapsed_s(now_s) >= self.run.run.max_s

    # Snapshots ------------------------------------------------------------------------------------------
    # What events change has its field in ``RunSnapshot`` and its line in both methods below;
    # ``tests/swarm/coordinator/test_snapshot.py`` compares every attribute.

    def snapshot(self) -> ev.RunSnapshot | None:
        """Return the state as one event; None while a round is about to end, and while events are not yet written."""
        return self.as_snapshot() if self.log.is_written and self.round.phase not in ("closing", "averaging") else None

    def as_snapshot(self) -> ev.RunSnapshot:
        """Return the state as one event; the round must be neither closing nor averaging."""
        assert self.round.phase not in ("closing", "averaging")
        members, replaced = self.membership.kept()
        return ev.RunSnapshot(
            epoch=self.log.epoch,
            round=self.round.number,
            phase=self.round.phase,
            model=self.model,
            anchor_version=self.anchor_version,
            agreed_digest=self.agreed_digest,
            agreement=self.agreement,
            took_part=tuple(sorted(self.took_part)),
            chain=self.chain,
            verdict=self.verdict,
            rounds_aborted=self.rounds_aborted,
            rounds_undone=self.rounds_undone,
            tokens_committed=self.tokens_committed,
            tokens_undone=self.tokens_undone,
            loss=self.loss,
            elapsed_s=self.elapsed_before_s,
            members=members,
            replaced=replaced,
            fresh=self.leases.fresh,
            pool=to_wire(self.leases.pool),
            held={peer: to_wire(ranges) for peer, ranges in self.leases.held.items()},
            answered=tuple(self.leasing.answered.values()),
            history=self.history.pack(),
            lost_again=to_wire(self.retrained.lost),
            undone_again=to_wire(self.retrained.undone),
            setback=(self.setback.bad_version, self.setback.returns, self.setback.fruitless),
            disproved=self.disproved,
            accusations=self.accusations.kept(),
            access=self.admission.access_list.kept() if self.stage is None else ev.AccessKept(),
            amendments=self.settings.made if self.stage is None else (),
            evaluations=self.evaluations.kept(),
            stopping=self.stopping,
            noticed=self.noticed,
        )

    def _restore(self, snapshot: ev.RunSnapshot) -> None:
        """Take over a snapshot in a new scope. Members that were alive count as heard now."""
        self.round = Round(snapshot.round, snapshot.phase, opened_s=self.log.now_s, began_s=self.log.now_s)
        self.model, self.elements = snapshot.model, snapshot.model.elements if snapshot.model else 0
        self.anchor_version, self.agreed_digest = snapshot.anchor_version, snapshot.agreed_digest
        self.agreement, self.took_part = snapshot.agreement, frozenset(snapshot.took_part)
        self.chain, self.verdict, self.loss = snapshot.chain, snapshot.verdict, snapshot.loss
        self.rounds_aborted, self.rounds_undone = snapshot.rounds_aborted, snapshot.rounds_undone
        self.tokens_committed, self.tokens_undone = snapshot.tokens_committed, snapshot.tokens_undone
        self.elapsed_before_s, self.started_s = snapshot.elapsed_s, self.log.now_s
        self.membership.restore(snapshot.members, snapshot.replaced, self.log.epoch, self.log.now_s)
        held = {peer: from_wire(ranges) for peer, ranges in snapshot.held.items()}
        self.leases = LeaseLedger(snapshot.fresh, from_wire(snapshot.pool), held)
        self.leasing.answered = {one.peer: one for one in snapshot.answered}
        self.history = History.unpack(snapshot.history)
        self.retrained = RetrainedSamples(from_wire(snapshot.lost_again), from_wire(snapshot.undone_again))
        self.setback = Setback(*snapshot.setback)
        self.disproved, self.stopping = snapshot.disproved, snapshot.stopping
        self.noticed = snapshot.noticed
        self.evaluations.restore(snapshot.evaluations)
        self.accusations = Accusations({(one.by, one.of): one.round for one in snapshot.accusations})
        if self.stage is None:
            self.admission.access_list.restore(snapshot.access)
            self.settings.made = snapshot.amendments

    # Requests of members -----------------------------------------------------------------------------------

    def hear(self, peer: str, now_s: float) -> None:
        """Note that a member is alive."""
        self.log.now_s = now_s
        self.membership.members[peer].heard_s = now_s

    def describe_model(self, peer: str, model: PeerToCoordinatorDescribeModel) -> None:
        """Take down the model that a member has built; all have to build the same one.

        Raises ``ModelMismatch`` or ``CorpusError`` that names the first difference."""
        if self.membership.is_observer(peer):
            raise NotAdmitted("observers have no model")
        check_model(self.run, self.model, model, None if self.stage is None else self.stage.layers)
        if adds_to(self.model, model):
            self.record(ev.ModelDescribed(model=model))

    def take_over(self, verdict: Verdict, now_s: float) -> bool:
        """Accept a verdict that this host has given (``stale_journal.check_ours``), if the journal lacks it.

        False: the journal is too old to go on from. In a stage it always is, as the verdicts of the other stages in
        that round are not known."""
        self.log.now_s = now_s
        if is_known(self, verdict):
            return True
        event = taken_over(self, verdict, now_s) if self.stage is None else None
        if event is not None:
            self.end_round(event)
        return event is not None

    def heartbeat(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, now_s: float) -> None:
        self.log.now_s = now_s
        before = self.membership.members[peer]
        received_before, done_before = before.bytes_received, before.tokens_done
        moved = self.membership.hear(peer, heartbeat, self.round.number, now_s)
        if before.tokens_done > done_before and peer in self.leases.held:  # guests could say so, too
            self.round.worked_s[peer] = now_s
        if not self.membership.is_observer(peer):
            process = self.membership.members[peer].entry.certificate.curve_key
            self.admission.sent_bytes.add(peer, process, heartbeat.bytes_sent)
        if moved and self.round.moves_left.get(peer) and peer not in self.round.reports:
            self.round.moves_left[peer] -= 1
            self.round.progress_s = now_s
        member = self.membership.members[peer]
        if moved or (member.anchor_version is None and member.bytes_received > received_before):
            self._outage.saw_progress(now_s, member, self.history)
        if member.is_trainer:
            self._claim(peer, heartbeat.anchor_version, heartbeat.state_digest)
        if self.anchor_version == 0 and not self.is_beginning_written:
            self._agree_on_beginning()
        if self.round.phase == "waiting" and self.synced():
            self.round.phase = "training"
            self.round.opened_s = self.round.began_s = now_s
            self.log.announcements += 1

    def _agree_on_beginning(self) -> None:
        """Agree on the first member's state as version 0; on another member's, if nobody holds that any more."""
        if self.agreed_digest is None or not (self.synced() or self.unheard()):
            digest = self.membership.common_digest(0)
            if digest is not None:
                self._sign_agreement(digest)

    def _claim(self, peer: str, version: int | None, digest: bytes | None) -> None:
        """Note which state a member reports, and agree on it if that is clear now."""
        if self.agreed_digest is None and version == self.anchor_version and digest is not None:
            self._claims.say(peer, digest)
            self.agree(self.log.now_s)

    def agree(self, now_s: float) -> bool:
        """Agree on this version's state if it is clear. Returns whether it is agreed.

        Also on the state with which the run has ended, by what members report before they leave."""
        if self.agreed_digest is None and self.anchor_version:
            was_disputed, overdue = self.is_disputed, self._is_overdue(now_s)
            trainers, stamp = self.membership.trainers(), self.membership.credit_stamp
            digest = self._claims.agreed(trainers, self.took_part, self.anchor_version, overdue=overdue, stamp=stamp)
            if digest is not None:
                self._sign_agreement(digest)
            if self.is_disputed != was_disputed:
                self.log.announcements += 1
        return self.agreed_digest is not None

    def cannot_agree(self, now_s: float) -> bool:
        """Whether the round goes back to training, as no agreement on the state comes from waiting."""
        return self.is_disputed or self._is_overdue(now_s)

    def _is_overdue(self, now_s: float) -> bool:
        return self.round.phase == "closing" and now_s >= self.round.closes_s + self.deadlines.ready_s

    def _sign_agreement(self, digest: bytes) -> None:
        signature = self._sign(agreement_bytes(self.anchor_version, digest, self.chain))
        made = StateAgreement(anchor_version=self.anchor_version, digest=digest, chain=self.chain, signature=signature)
        self.record(ev.StateAgreed(agreement=made))

    def ready(self, peer: str, ready: PeerToCoordinatorRoundReady, now_s: float) -> None:
        """Note a contribution that waits for the plan. Raises ``StaleWork`` if its samples are not this peer's."""
        self.hear(peer, now_s)
        member = self.membership.members[peer]
        if ready.round != self.round.number or self.round.phase != "closing" or not member.is_trainer:
            return  # if the round was reopened, this peer will have done more by its end
        ranges = from_wire(ready.ranges)
        if not is_tidy(ranges):
            raise WireError("the sample ranges of a contribution must not be empty or overlap")
        if not self.leases.holds(peer, ranges) or ready.anchor_version != self.anchor_version:
            raise StaleWork("these samples were given to others while this peer was silent: start from the anchor")
        if self.agreed_digest not in (None, ready.state_digest):
            raise StaleWork("this peer's state is not the run's: start from the anchor")
        if self.model is None or count(ranges) * self.model.tokens_per_sample != ready.weight_tokens:
            raise WireError("the weight of a contribution must be the tokens of its samples")
        if ready.first is not None and subtract(from_wire([ready.first.samples]), merge(ranges)):
            raise WireError("the first batch of a contribution must be of its samples")
        if self.run.averaging.secure and ready.norms:
            raise WireError("a masked contribution has no norms that others may know")
        if ready.norms and len(ready.norms) != claim_bytes(self.elements):
            raise WireError("a contribution's norms must be one for each range of the model")
        self._claim(peer, ready.anchor_version, ready.state_digest)
        member.tokens_done = ready.weight_tokens
        before = self.round.ready.get(peer)
        if before is None:
            self.leasing.clock.offer(peer, now_s)
            if self.counts(peer):
                self._ready_delays.saw(now_s - self.round.closes_s)
            self.round.ready_s = min(self.round.ready_s, now_s)
            self.round.readied_s[peer] = now_s
        elif before != ready:
            self.round.expected = None  # others may have fetched parts of the earlier contribution
        self.round.ready[peer] = ready

    def secure_step(self, peer: str, step: PeerToCoordinatorSecureStep, now_s: float) -> CoordinatorToPeerSecureBoard:
        """Take what a member posts in a secure round, whose signatures were checked, and return what it may see."""
        self.hear(peer, now_s)
        board = self.round.board
        if board is None or not board.is_of(step) or not self.is_averaging(peer):
            return CoordinatorToPeerSecureBoard(round=step.round, stage=0)
        if board.take(peer, step):
            self.round.progress_s = now_s
        return board.show(peer, step.wants)

    def advance_secure(self, now_s: float) -> SecureFailure | None:
        """Begin the next stage of a secure round if it is due; returns why the round cannot go on, if so."""
        board = self.round.board
        if board is None:
            return None
        stage = board.stage
        failure = board.advance(now_s, self.averaging(), self.round.progress_s)
        if board.stage != stage:
            self.round.progress_s = now_s
            self.log.announcements += 1
        return failure

    def report(self, peer: str, report: PeerToCoordinatorRoundReport, now_s: float) -> None:
        self.hear(peer, now_s)
        plan = self.round.plan
        if plan is None or report.round != self.round.number or not self.is_averaging(peer):
            return
        if len(report.digests) != len(plan.parts) or any(
            one >= len(plan.members)
            for one in (
                *report.dropped,
                *report.failed,
                *report.undelivered,
                *(one.member for one in report.deliveries),
            )
        ):
            raise WireError("the report does not fit the plan of its round")
        if peer not in self.round.reports:  # a repeated or changed report does not put off the verdict
            if self.counts(peer):
                self._report_delays.saw(now_s - self.round.reported_s if self.round.reports else 0.0)
            self.round.progress_s = self.round.reported_s = now_s
            self.round.reports_s[peer] = now_s
            if report.times is not None:
                self.membership.members[peer].times = report.times
        # Members report the same digests, thousands of them each: one copy is kept.
        known = self.round.reported_digests.setdefault(report.digests, report.digests)
        self.round.reports[peer] = report if known is report.digests else report.model_copy(update={"digests": known})

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        """Return the scope at a glance, for ``shoal status``."""
        samples = self.model.samples if self.model else None
        closing, unix_s = self.round.phase == "closing", now_s + self.log.unix_offset_s
        prices, speeds = self.run.cost.prices, self._steady_tokens_per_s()
        members = self.membership.status(
            self.anchor_version, self.agreed_digest, prices, unix_s, self.round.number, self.walls(), speeds
        )
        return CoordinatorToPeerStatus(
            run=self.run.run.name,
            run_hash=self.run.hash,
            round=self.round.number,
            phase=self.round.phase,
            closes_in_s=max(0.0, self.round.closes_s - now_s) if closing else None,
            anchor_version=self.anchor_version,
            rounds_committed=self.rounds_committed,
            rounds_aborted=self.rounds_aborted,
            rounds_undone=self.rounds_undone,
            tokens_committed=self.tokens_committed,
            tokens_in_round=self.tokens_in_round(),
            loss=self.loss,
            chain=self.chain,
            state_digest=self.agreed_digest,
            elapsed_s=self.elapsed_s(now_s),
            outlook=self.say_outlook(),
            warning=self.trend().text or warning_of(self.history),
            evaluation=self.evaluations.status(self.run.evaluation.validators),
            stopping=self.stopping,
            coverage=coverage_of(self.leases, samples) if samples else (),
            members=members,
            amendments=self.settings.made,
            progress=self._progress(now_s),
            round_tokens=self.run.round.tokens,
            timing=self.timings.newest,
            utilisation=self.timings.utilisation,
            goodput=self.timings.goodput,
            costs=run_costs(self.run.cost, members, self.tokens_committed),
        )

    def seen(self, failed: Iterable[str] = ()) -> ScopeSeen:
        """Return what was seen of the round's time, as it ends. ``failed``: members that did not deliver."""
        current, now_s = self.round, self.log.now_s
        reports_s = {peer: current.reports_s.get(peer, now_s) for peer in current.ranges}
        links = {}
        if current.plan is not None and self.model is not None:
            links = links_seen(current.plan, self._witnesses(), self._format_map())
        steps_s = [one.step_s for one in self.membership.trainers().values()]
        needs_batch = self.stage is None and self.goal().exact
        peers, relayed = {*current.worked_s, *current.readied_s, *reports_s}, self.membership.relayed()
        return ScopeSeen(
            began_s=current.began_s,
            closes_s=max(current.closes_s, current.began_s),
            planned_s=current.planned_s,
            ended_s=now_s,
            heartbeat_s=self.deadlines.heartbeat_s,
            step_s=median_low(steps_s) if steps_s else 0.0,
            members={peer: self._seen(peer, relayed) for peer in peers if peer in self.membership.members},
            worked_s=current.worked_s if needs_batch else {},
            ready_s=current.readied_s,
            reported_s=reports_s,
            links=links,
            undelivered=tuple(failed),
            stage=None if self.stage is None else self.stage.number,
            usual_exchange_s=self.timings.usual_exchange_s,
        )

    def _seen(self, peer: str, relayed: Collection[str]) -> MemberSeen:
        member, report = self.membership.members[peer], self.round.reports.get(peer)
        return MemberSeen(
            name=member.entry.name,
            heard_s=member.heard_s,
            joined_s=member.joined_s - self.log.unix_s + self.log.now_s,
            phase=member.phase,
            is_relayed=peer in relayed,
            times=report.times if report is not None else None,
            is_gone=not member.alive,
        )

    def excuse(self, stood_s: float) -> None:
        """Extend all deadlines: the coordinator stood still for so long, so nobody was late."""
        self.membership.excuse(stood_s, self.log.now_s)
        self.round.closes_s += stood_s
        self.round.progress_s += stood_s
        self.round.reported_s += stood_s
        self.round.began_s += stood_s
        self._outage.excuse(stood_s)
        if self._asked_for_kept_s is not None:
            self._asked_for_kept_s += stood_s
        self.leasing.clock.excuse(stood_s)

    # Rollback -------------------------------------------------------------------------------------------

    def look_for_holders(self, now_s: float) -> PossibleRollback | None:
        """Return where to go back to, if nobody holds the newest state and nobody is worth waiting for any more.

        A round that is closing or averaged ends by itself first."""
        self._outlook = None
        if (
            not self._is_without_state() or self.combine_claims().bad_version is not None
        ):  # members that report it have dropped the state
            self._outage.end()
            return None
        self._outlook = self._outage.look(now_s, self.history, self.agreed_digest, self.membership.members)
        is_due = self._outlook is not None and self._outlook.is_due and self.round.phase in ("waiting", "training")
        return self._outlook if is_due else None

    def go_back_to(
        self, version: int, keepers: tuple[str, ...], judgement: Judgement, diverged: DivergenceRollback | None = None
    ) -> ev.VerdictGiven:
        """Return the end of the round with which the run goes back to an earlier version.

        ``diverged``: the reason, unless the newest state is lost."""
        made, wrong = self.history.rounds[version], self.disproved
        went_back = ev.WentBack(
            from_version=self.anchor_version,
            digest=made.digest,
            vouched_round=made.round,
            keepers=keepers,
            diverged=diverged is not None,
            bad_version=diverged.bad_version if diverged else 0,
            suspects=diverged.suspects if diverged else (),
            evidence=wrong.evidence if wrong is not None and version <= wrong.version else None,
        )
        self._outage.end()
        self._outlook = None
        return self.verdict_of(judgement, went_back)

    def look_at_divergence(self) -> ev.VerdictGiven | None:
        """Return the end of the round, in whatever phase it is, if the run has diverged and can go back."""
        back = self.divergence_rollback()
        if back is None:
            return None
        reason = Judgement(reason=say_divergence_rollback(back, self.history, self.membership.members))
        return self.go_back_to(back.version, back.keepers, reason, back)

    # Wrong means ----------------------------------------------------------------------------------------

    def undoes(self, round_number: int, excess: float) -> bool:
        """Whether a proven wrong mean of that round makes the run go back: it is beyond the bound, the round is new,
        and no earlier one is about to be undone."""
        version = version_of(self.history, round_number)
        is_first = self.disproved is None or (version is not None and version < self.disproved.version)
        return version is not None and excess > 1.0 and is_first and not self.has_ended

    def disprove(self, round_number: int, maker: str, evidence: bytes, accuser: str, excess: float) -> None:
        """Record that evidence proves a mean wrong, if that makes the run go back."""
        version = version_of(self.history, round_number)
        if version is None or not self.undoes(round_number, excess):
            return
        self.record(
            ev.MeanDisproved(
                round=round_number,
                version=version,
                evidence=evidence,
                maker=maker,
                accuser=accuser,
                excess=excess,
                at_s=self.log.unix_s,
            )
        )

    def look_behind_wrong_mean(self, now_s: float) -> PossibleRollback | None:
        """Return where to go back to because of a wrong mean, between rounds, once members have said what they keep."""
        if self.disproved is None:
            self._asked_for_kept_s = None
            return None
        if self._asked_for_kept_s is None:
            self._asked_for_kept_s = now_s
        is_told = now_s >= self._asked_for_kept_s + 2 * self.deadlines.heartbeat_s
        if not is_told or self.round.phase not in ("waiting", "training"):
            return None
        others = [one.kept_versions() for one in self.together if one is not self]
        return rollback_behind(self.disproved, self.history, self.membership.trainers(), others)

    def kept_versions(self) -> set[int]:
        """Return the versions whose states members here say that they keep, as verdicts vouch for them."""
        return believed_versions(self.history, self.membership.trainers())

    def say_rollback(self, back: PossibleRollback) -> str:
        """Return the reason of the verdict with which the run goes back."""
        if self.disproved is not None and back.version <= self.disproved.version:
            return say_rollback_behind(self.disproved, back, self.history, self.membership.members)
        return say_rollback(back, self.history, len(self.membership.trainers()))

    def say_outlook(self) -> str:
        """Say for whom the run waits while nobody holds its newest state, else empty."""
        if self.has_ended:
            return ""
        if not self._is_without_state():
            return self.say_apart()
        if self.is_disputed:
            return f"the state of version {self.anchor_version} is disputed: its members replay it"
        if not self.anchor_version:
            return self.run.start.outlook if self.run.start is not None else FIRST_STATE_OUTLOOK
        return say_outlook(self.anchor_version, self.agreed_digest, self._outlook, self.membership.members)

    def _is_without_state(self) -> bool:
        """Whether members are here, and none of them holds the newest state.

        Version 0 is made by the members, unless the run file determines it."""
        is_made = self.anchor_version == 0 and not self.is_beginning_written
        trainers, synced, credited = self.membership.trainers(), self.synced(), self.membership.with_credit()
        if is_made or not trainers:
            return False
        # Or one newcomer that only claims to hold it would keep everybody waiting for ever. Where nobody with credit
        # has any state, there is none to go back to but newcomers' own.
        if any(peer in synced for peer in credited):
            return False
        return not synced or any(one.states for one in credited.values())

    # Closing --------------------------------------------------------------------------------------------

    def closing_moment(self, now_s: float) -> float | None:
        """Return the moment to announce; None while it is too early to tell.

        The work of many members is not added up again for a tenth of the time that is left: all of them together
        become faster by little in that."""
        if self.lacks_company and not self.is_late(now_s):
            return None
        about = self.round.number, self.round.opened_s
        if self._too_early[0] == about and now_s < self._too_early[1]:
            return None
        goal, works = self.goal(), self.works()
        moment = closing_moment(self.round.opened_s, goal, works, now_s, self.deadlines)
        if moment is None and len(works) > EXACT_MEMBERS and not (goal.exact or goal.everybody):
            left_s = expected_closing_s(self.round.opened_s, goal, works, now_s, self.deadlines) - now_s
            self._too_early = about, now_s + min((left_s - self.deadlines.announce_s) / 10, _MOST_EARLY_S)
        return moment

    @property
    def lacks_company(self) -> bool:
        """Whether fewer members have work than a secure round needs."""
        averaging = self.run.averaging
        return averaging.secure and sum(one.tokens > 0 for one in self.works()) < averaging.fewest_members

    def close(self, moment_s: float) -> None:
        """Announce the closing moment and the expected plan."""
        self.record(ev.RoundClosing(round=self.round.number))
        self.round.closes_s = moment_s
        self._expect()

    def is_gathered(self, now_s: float) -> bool:
        """Whether the plan waits for no more contributions.

        Members without samples are not waited for. Once half of the others are ready, the rest get as long as members
        usually take; one that takes longer brings its work to the next round."""
        return now_s >= self.round.closes_s + self._worth_waiting_s(self.awaited())

    def awaited(self) -> list[str]:
        """Return the members for whose work the plan waits, without those that were repeatedly not ready."""
        ready, working, unheard, walls = self.round.ready, self.working(), self.unheard(), self.walls()
        held = [
            one
            for one in self.leases.held
            if one not in ready
            and (one in working or one in unheard)
            and not self.is_left_out(one)
            and one not in walls
        ]
        if self.goal().exact:
            return held
        return [one for one in held if self._punctuality.is_awaited(one, self.round.number)]

    def _worth_waiting_s(self, awaited: Collection[str]) -> float:
        if self.round.ready and not awaited:
            return 0.0
        # Members with credit decide where there are any, or newcomers could keep everybody waiting.
        credited = self.membership.with_credit().keys() & {*self.round.ready, *awaited}
        ready = len(credited.intersection(self.round.ready)) if credited else len(self.round.ready)
        late = len(credited.intersection(awaited)) if credited else len(awaited)
        # An exact batch is worth the whole patience: without the straggler it begins anew.
        prompt = ready > late and not self.goal().exact
        return self._ready_delays.wait_s if prompt else self.deadlines.ready_s

    def can_reopen(self, now_s: float) -> bool:
        """Whether there is time left for samples that a complete batch lacks."""
        return now_s < self.round.opened_s + self.goal().max_s and not self.is_late(now_s)

    def proposal(self) -> ev.RoundPlanned | None:
        """Return the plan for the members that are ready; None when nobody has anything to contribute."""
        ready = {peer: one for peer, one in self.round.ready.items() if not self.is_left_out(peer)}
        self.round.expected = as_expected(self.round.expected, ready)
        plan = self.round.expected or self._plan_of(ready)
        if plan is None:
            return None
        members = self.membership.members
        plan = bounded(plan, self.run, self.history.rounds, members)
        peers = [member.peer for member in plan.members]
        counted = {peer: ready[peer].weight_tokens for peer in counting(members, peers)}
        losses = {peer: loss for peer in counted if (loss := ready[peer].loss) is not None}
        weights = median_weights(members, counted)
        ranges = tuple(to_wire(merge(from_wire(ready[peer].ranges))) for peer in peers)
        loss = weighted_mean([(loss, counted[peer]) for peer, loss in losses.items()])
        told = [(loss, weights[peer]) for peer, loss in losses.items() if peer in weights]
        median_loss = weighted_median(told) if told else None
        return ev.RoundPlanned(plan=plan, ranges=ranges, loss=loss, median_loss=median_loss)

    def _plan_of(self, ready: Mapping[str, PeerToCoordinatorRoundReady]) -> RoundPlan | None:
        self._measure()
        number, trainers, run = self.round.number, self.membership.trainers(), self.run
        rules = PlanRules(run.averaging.group_size, run.run.seed, run.max_chunk_values)
        if run.averaging.secure:
            rules = PlanRules(MOST_MEMBERS, run.run.seed, min(run.max_chunk_values, CHUNK_ELEMENTS))
            blocks, seed = -(-self.elements // scale_block(self.elements)), run.run.seed << 64 | number
            ready, scales = draw_secure(ready, counting(trainers, ready), run.averaging, blocks, seed)
        assert self.agreed_digest is not None, "agreed before anything is planned"
        state = (self.anchor_version, self.agreed_digest)
        plan = plan_round(number, state, self.elements, ready, trainers, rules)
        if plan is not None and run.averaging.secure:
            plan = as_secure(plan, run.averaging, scales)
        return self.accusations.into(plan) if plan else None

    def _measure(self) -> None:
        """Estimate every member's bandwidth."""
        trainers = self.membership.trainers()
        claims_bps = {peer: one.claimed_bps for peer, one in trainers.items()}
        believed = self._bandwidths.believed(claims_bps, counting(trainers, trainers))
        for peer, bps in believed.items():
            trainers[peer].bandwidth_bps = bps

    def _learn_bandwidths(self, plan: RoundPlan) -> None:
        reports, took_s = self.round.reports, self.round.reported_s - self.round.ready_s
        self._bandwidths.learn(plan, self._witnesses(), sent_at_least(plan, reports, self._format_map(), took_s))

    def _witnesses(self) -> Mapping[str, PeerToCoordinatorRoundReport]:
        """Return the reports that are believed on the links of others."""
        reports = self.round.reports
        counted = counting(self.membership.members, reports)
        return {peer: reports[peer] for peer in counted} if len(counted) >= _FEWEST_WITNESSES else reports

    def _format_map(self) -> FormatMap:
        shapes = [(spec.name, spec.shape) for spec in self.model.layout] if self.model else []
        return self.run.format_map(shapes)

    def _expect(self) -> None:
        """Set the plan that is expected if all members that work for the round get ready.

        Only for a flat group, as the plan of a grid is large, and not for an exact batch, as nobody knows ahead when
        that is complete."""
        if self.goal().exact or self.agreed_digest is None or self.run.averaging.secure:
            return
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
        if 1 < len(ready) <= self.run.averaging.group_size:
            self.round.expected = self._plan_of(ready)

    def lacks_samples(self, proposal: ev.RoundPlanned | None) -> bool:
        """Whether a batch that has to be exact is not whole in this plan."""
        if self.stage is not None:
            return not self.stage.is_whole(proposal)
        goal, plan = self.goal(), proposal.plan if proposal else None
        return goal.exact and (sum(one.weight_tokens for one in plan.members) if plan else 0) < goal.tokens

    def has_too_few(self, proposal: ev.RoundPlanned | None) -> bool:
        """Whether a plan has fewer members than a secure round needs."""
        averaging = self.run.averaging
        few = proposal is not None and len(proposal.plan.members) < averaging.fewest_members
        return averaging.secure and few

    def begin_averaging(self, proposal: ev.RoundPlanned) -> None:
        """Announce the plan, and note the members that were waited for in vain."""
        awaited = self.awaited()
        if not self.goal().exact:
            self._punctuality.saw(self.round.number, self.round.ready, awaited)
        self.round.readied_s.update(dict.fromkeys(awaited, self.log.now_s))
        self.record(proposal)

    def free_kept_samples(self, plan: RoundPlan | None) -> None:
        """Lose members that keep samples of an exact batch and bring nothing usable, so that others can do them; of
        those that can meet nobody only the samples."""
        fine = {peer for peer, one in self.round.ready.items() if not one.weight_tokens}
        fine |= {member.peer for member in plan.members} if plan else set()
        walls = self.walls()
        for peer in [one for one in self.leases.held if one not in fine]:
            if peer in walls:  # its work is fine, and cannot be had
                self.record(ev.SamplesReleased(peer=peer, ranges=to_wire(self.leases.held[peer])))
            else:
                self.record(ev.MemberLost(peer=peer, reason=ev.KEPT_SAMPLES))

    # Verdict ------------------------------------------------------------------------------------------------

    def judgement(self, now_s: float) -> Judgement | None:
        """Return how the round ends by what members report; None while it is worth waiting for more."""
        assert self.round.plan is not None
        live = self.averaging()
        judgement = judge(
            self.round.plan,
            self.round.reports,
            live,
            overdue=now_s > self.round.progress_s + self.deadlines.report_s,
            enough=now_s > self.round.reported_s + self._report_delays.wait_s,
            whole=self.goal().exact,
            work=credit_of(self.membership.members, live),
        )
        if judgement is None or self.round.board is None:
            return judgement
        guilty = [self.round.plan.members[one].peer for one in sorted(self.round.board.to_blame)]
        missing = [*judgement.missing, *(peer for peer in guilty if peer in live)]
        return replace(judgement, missing=tuple(dict.fromkeys(missing)))

    def verdict_of(self, judgement: Judgement, went_back: ev.WentBack | None = None) -> ev.VerdictGiven:
        """Return the verdict before it is signed.

        ``went_back``: only with a judgement that aborts the round; then the version is that of its vouched round."""
        work = credit_of(self.membership.members, self.round.reports)
        board, plan, lost = self.round.board, self.round.plan, lost_work(self.round, judgement.digests, work)
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
            makers=makers_of(plan, self.round.reports, judgement.digests) if plan and judgement.committed else (),
            tokens=tokens,
            tokens_total=total,
            spent=not judgement.committed and board is not None and board.may_be_masked,
            signed_sets=board.signed() if board is not None else None,
            loss=self.round.loss if judgement.committed else None,
            ended_s=round(self.log.unix_s, 3),
            sent_bytes=self.admission.sent_bytes.take(),
            run_hash=self.run.hash,
            stage=self.stage.number if self.stage is not None else None,
            amended=self.settings.changes(self.round.number),
            epoch=self.log.epoch,
            previous_chain=self.chain,
            chain=bytes(32),
            signature=b"",
        )
        return ev.VerdictGiven(
            verdict=unsigned,
            elapsed_s=self.elapsed_s(self.log.now_s),
            lost=lost,
            failed=judgement.failed,
            carrying=self._carrying(judgement),
            missing=judgement.missing,
            accusations=accusations_of(self.round.number, judgement.accused_by),
            went_back=went_back,
            energy_j=self.timed.open_energy_j() if self.timed is not None else {},
        )

    def left_out_of(self, judgement: Judgement) -> tuple[str, ...]:
        """Return members whose contribution did not get into every chunk, as most of the credit reports."""
        work = credit_of(self.membership.members, self.round.reports)
        return left_out(self.round, judgement.digests, work)

    def _carrying(self, judgement: Judgement) -> tuple[str, ...]:
        """Return members that keep a part of their contribution: all for a void part, else those that a chunk lacks."""
        plan = self.round.plan
        if plan is None or not judgement.committed:
            return ()
        void = None in judgement.digests
        peers = [one.peer for one in plan.members] if void else self.left_out_of(judgement)
        return tuple(peer for peer in peers if peer not in self.round.orphans)

    def give_verdict(self, unsigned: ev.VerdictGiven) -> None:
        """Sign the verdict and end the round."""
        if self.round.plan is not None:
            self._learn_bandwidths(self.round.plan)
        chain = chain_hash(unsigned.verdict)
        signed = unsigned.verdict.model_copy(update={"chain": chain, "signature": self._sign(signed_bytes(chain))})
        self.end_round(unsigned.model_copy(update={"verdict": signed}))
        if unsigned.went_back is not None:
            self._sign_agreement(unsigned.went_back.digest)

    def end_round(self, event: ev.VerdictGiven) -> None:
        covered, before = self._covered(), len(self.history.rounds)
        ranges = {peer: mine for peer, mine in self.round.ranges.items() if peer not in event.lost}
        carrying = frozenset(peer for peer in ranges if self.membership.members[peer].carried_tokens)
        first = {peer: ready.first for peer, ready in self.round.ready.items() if ready.first is not None}
        self.record(event)
        if event.verdict.committed:
            self.review.add(event.verdict, ranges, carrying, first)
        self._tell_covered(covered)
        if len(self.history.rounds) > before:
            newest = self.history.rounds[-1]
            usual = usual_loss(self.history.rounds[:-1], newest.loss)
            if usual is not None and newest.loss is not None:
                self.record(ev.LossRose(round=newest.round, loss=newest.loss, usual=usual))
        if event.verdict.committed:
            self.notice_trend()
        for peer in event.missing:
            if self.goal().exact and self.is_left_out(peer) and peer in self.leases.held and not self.has_ended:
                self.record(ev.MemberLost(peer=peer, reason="left out for a while"))  # others do its samples

    def trend(self) -> Trend:
        """Return what is wrong with the run's losses."""
        book = self.evaluations
        return trend_of([one.loss for one in self.history.rounds], book.losses(), is_claimed=book.witnesses < 2)

    def notice_trend(self) -> None:
        """Record for people that the run's losses begin to go wrong, or no longer do."""
        trend = self.trend()
        if trend.kind != self.noticed:
            self.record(ev.TrendNoticed(round=self.round.number, kind=trend.kind, text=trend.text))

    def look_whether_to_stop(self) -> None:
        """Decide that the open round is the last one, if the held-out figures ask for that."""
        stop = self.run.run.stop_when
        if stop is None or self.stopping or self.has_ended:
            return
        reason = stop_reason(stop, self.evaluations.figures(self.run.evaluation.validators))
        if reason:
            self.record(ev.StopDecided(round=self.round.number, reason=reason, at_s=self.log.unix_s))

    def _covered(self) -> int:
        return epochs_covered(self.leases, self.model.samples) if self.model and self.model.samples else 0

    def _tell_covered(self, first: int) -> None:
        """Record which epochs this verdict has completed; ``first`` were covered before."""
        stop = self._covered()
        if stop > first:
            samples = self.model.samples if self.model else None
            assert samples is not None
            lost, undone = self.retrained.within(first * samples, stop * samples)
            self.record(ev.EpochsCovered(first=first, stop=stop, samples=samples, lost=lost, undone=undone))
