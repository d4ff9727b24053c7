"""One run's coordinator as a pure state machine: events and moments in, facts and views out.

Every decision is a fact: it is applied to the state at once and collected for the journal, which ``service.py``
writes before it tells anybody. Replaying the facts after a restart gives the same state again.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.swarm.coordinator import facts as f
from shoal.swarm.coordinator.leases import Ranges, count, from_wire, merge, to_wire
from shoal.swarm.coordinator.rounds import Judgement, closing_moment, judge, plan_round
from shoal.swarm.coordinator.state import RunState
from shoal.swarm.errors import CorpusError, ModelMismatch, NotAdmitted, RunEnded, StaleWork, WireError
from shoal.swarm.messages import (
    DeviceInfo,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    RosterEntry,
    TensorSpec,
    Verdict,
)
from shoal.swarm.run_file import RunFile
from shoal.swarm.verdicts import chain_hash, signed_bytes

Sign = Callable[[bytes], bytes]


class RunMachine(RunState):
    """The decisions. Methods named for events may raise a typed error for the peer that caused it."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float) -> None:
        super().__init__(run, now_s)
        self._sign = sign

    # Events ---------------------------------------------------------------------------------------------

    def join(self, entry: RosterEntry, device: DeviceInfo, now_s: float) -> None:
        """Admit a member. The same identity with another key is a new process: the old one's work is free again."""
        self.now_s = now_s
        if self.round.phase == "ended" and entry.role == "trainer":
            raise RunEnded(f"the run {self.run.run.name} is over; `shoal export` still gives its model")
        known = self.membership.members.get(entry.peer)
        if known is not None and known.alive:
            if known.entry.certificate.curve_key == entry.certificate.curve_key:
                known.heard_s = now_s
                return
            self.record(f.MemberLost(peer=entry.peer, reason="joined again"))
        self.record(f.MemberJoined(entry=entry, device=device))

    def describe_model(self, model: PeerToCoordinatorDescribeModel) -> None:
        """Raises ``ModelMismatch`` or ``CorpusError`` naming the first difference to the run's first peer."""
        if self.model is None:
            self.record(f.ModelDescribed(model=model))
            return
        difference = first_difference(self.model.layout, model.layout)
        if difference:
            raise ModelMismatch(f"this model is not the run's: {difference}")
        if self.model.tokens_per_sample != model.tokens_per_sample:
            raise ModelMismatch(
                f"this model takes {model.tokens_per_sample} tokens a sample, the run's {self.model.tokens_per_sample}"
            )
        if self.model.corpus_digest is None and model.corpus_digest is not None:
            self.record(f.ModelDescribed(model=model))
        if model.corpus_digest not in (None, self.model.corpus_digest):
            raise CorpusError(
                f"this machine's data differs from the run's.\n  here:    {model.corpus_about}\n"
                f"  the run: {self.model.corpus_about}\n"
                "Use the same Python version as the others, or ask the host for a run on the same files "
                '(data.source = "text:GLOB" or "tokens:FILE")'
            )

    def leave(self, peer: str, reason: str, now_s: float) -> None:
        self.now_s = now_s
        if self.membership.members[peer].alive:
            self.record(f.MemberLost(peer=peer, reason=reason or "left"))

    def require_member(self, curve_key: bytes) -> str:
        """The live member that holds this key. Raises ``NotAdmitted``."""
        for peer, member in self.membership.members.items():
            if member.alive and member.entry.certificate.curve_key == curve_key:
                return peer
        raise NotAdmitted("not a member of this run (any more): join again")

    def heartbeat(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, now_s: float) -> None:
        self.now_s = now_s
        if self.membership.hear(peer, heartbeat, self.round.number, now_s):
            self.round.progress_s = now_s
        if self.anchor_version == 0 and self.agreed_digest is None:
            digest = self.membership.common_digest(0)
            if digest is not None:
                self.record(f.StateAgreed(anchor_version=0, digest=digest))
        if self.round.phase == "waiting" and self.synced():
            self.round.phase = "training"
            self.round.opened_s = now_s
            self.announcements += 1

    def request_lease(self, peer: str, ask: PeerToCoordinatorRequestLease, now_s: float) -> Ranges:
        """Samples for this peer; none when the round has all it needs or is not training."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        if ask.round != self.round.number:
            return []
        member.tokens_done = ask.tokens_done
        if self.round.phase not in ("training", "waiting") or peer not in self.synced():
            return []
        samples = ask.samples
        if self.goal().exact:
            # Guided self-scheduling (Polychronopoulos & Kuck 1987): ever smaller, so that all finish together.
            left = max(0, self.goal_samples() - self.leases.outstanding())
            fair = -(-left // (2 * len(self.synced())))
            samples = min(left, max(self.run.inner.batch_samples, min(samples, fair)))
        if samples == 0:
            return []
        ranges = self.leases.choose(samples)
        self.record(f.LeaseGranted(peer=peer, ranges=to_wire(ranges)))
        return ranges

    def ready(self, peer: str, ready: PeerToCoordinatorRoundReady, now_s: float) -> None:
        """A contribution is waiting. Raises ``StaleWork`` when its samples are not this peer's (any more)."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        if ready.round != self.round.number or self.round.phase not in ("training", "closing"):
            return
        ranges = from_wire(ready.ranges)
        if not self.leases.holds(peer, ranges) or ready.anchor_version != self.anchor_version:
            raise StaleWork("these samples were given to others while this peer was silent; start from the anchor")
        if self.model is None or count(ranges) * self.model.tokens_per_sample != ready.weight_tokens:
            raise WireError("the weight of a contribution must be the tokens of its samples")
        member.tokens_done = ready.weight_tokens
        self.round.ready[peer] = ready

    def report(self, peer: str, report: PeerToCoordinatorRoundReport, now_s: float) -> None:
        self.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        plan = self.round.plan
        if plan is None or report.round != self.round.number or peer not in self.round.ranges:
            return
        if len(report.digests) != len(plan.parts) or any(one >= len(plan.members) for one in report.dropped):
            raise WireError("the report does not fit the plan of its round")
        self.round.reports[peer] = report
        self.round.progress_s = now_s

    def tick(self, now_s: float) -> None:
        """Whatever time decides: silence, closing, planning, verdict."""
        self.now_s = now_s
        for peer in self.membership.silent(now_s, self.deadlines.dead_s):
            self.record(f.MemberLost(peer=peer, reason="silent"))
        match self.round.phase:
            case "training":
                self._tick_training(now_s)
            case "closing":
                self._tick_closing(now_s)
            case "averaging":
                self._tick_averaging(now_s)

    def _tick_training(self, now_s: float) -> None:
        members = self.synced()
        if not members:
            if not self.membership.trainers():
                self.round.phase = "waiting"
                self.announcements += 1
            return
        moment = closing_moment(self.round.opened_s, self.goal(), list(members.values()), now_s, self.deadlines)
        if moment is not None:
            self.record(f.RoundClosing(round=self.round.number))
            self.round.closes_s = moment

    def _tick_closing(self, now_s: float) -> None:
        ready = self.round.ready
        awaited = [peer for peer in self.synced() if peer not in ready]
        if not self.membership.trainers():
            self._reopen()
            self.round.phase = "waiting"
        elif now_s >= self.round.closes_s and not awaited and ready:
            self._plan(now_s)
        elif now_s >= self.round.closes_s + self.deadlines.ready_s:
            if ready:
                self._plan(now_s)
            else:
                self._reopen()

    def _plan(self, now_s: float) -> None:
        ready = self.round.ready
        goal = self.goal()
        missing = sum(one.weight_tokens for one in ready.values()) < goal.tokens
        if goal.exact and missing and now_s < self.round.opened_s + goal.max_s and not self.is_late(now_s):
            self._reopen()
            return
        assert self.model is not None
        elements = sum(spec.elements for spec in self.model.layout)
        members = self.membership.trainers()
        plan = plan_round(self.round.number, self.anchor_version, elements, ready, members)
        if plan is None:
            self._give_verdict(Judgement(reason="nobody had anything to contribute"), now_s)
            return
        peers = [member.peer for member in plan.members]
        losses = [(ready[peer].loss, ready[peer].weight_tokens) for peer in peers]
        known = [(loss, weight) for loss, weight in losses if loss is not None]
        total = sum(weight for _, weight in known)
        loss = sum(loss * weight for loss, weight in known) / total if total else None
        ranges = tuple(to_wire(merge(from_wire(ready[peer].ranges))) for peer in peers)
        self.record(f.RoundPlanned(plan=plan, ranges=ranges, loss=loss))

    def _reopen(self) -> None:
        self.record(f.RoundReopened(round=self.round.number))
        self.round.opened_s = self.now_s

    def _tick_averaging(self, now_s: float) -> None:
        assert self.round.plan is not None
        overdue = now_s > self.round.progress_s + self.deadlines.report_s
        judgement = judge(self.round.plan, self.round.reports, self.membership.trainers(), overdue=overdue)
        if judgement is not None:
            self._give_verdict(judgement, now_s)

    def _give_verdict(self, judgement: Judgement, now_s: float) -> None:
        plan, lost = self.round.plan, self._lost_work()
        weights = {member.peer: member.weight_tokens for member in plan.members} if plan else {}
        tokens = sum(weight for peer, weight in weights.items() if peer not in lost)
        unsigned = Verdict(
            round=self.round.number,
            committed=judgement.committed,
            reason=judgement.reason[:2000],
            anchor_version=self.anchor_version + judgement.committed,
            plan=plan,
            digests=judgement.digests,
            tokens=tokens if judgement.committed else 0,
            tokens_total=self.tokens_committed + (tokens if judgement.committed else 0),
            loss=self.round.loss if judgement.committed else None,
            previous_chain=self.chain,
            chain=bytes(32),
            signature=b"",
        )
        chain = chain_hash(unsigned)
        signed = unsigned.model_copy(update={"chain": chain, "signature": self._sign(signed_bytes(chain))})
        self.record(f.VerdictGiven(verdict=signed, elapsed_s=self.elapsed_s(now_s), lost=lost))
        held = {peer: to_wire(ranges) for peer, ranges in self.leases.held.items()}
        ledger = f.LeasesHeld(fresh=self.leases.fresh, pool=to_wire(self.leases.pool), held=held)
        self.record(ledger)

    def _lost_work(self) -> tuple[str, ...]:
        """Dead members whose contribution did not get into every chunk: others train on their samples again."""
        if self.round.plan is None:
            return ()
        dropped = {index for report in self.round.reports.values() for index in report.dropped}
        peers = [self.round.plan.members[index].peer for index in sorted(dropped)]
        return tuple(peer for peer in peers if peer in self.round.orphans)


def first_difference(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> str:
    """A sentence on the first tensor that differs; empty when none does."""
    for index, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        if theirs != ours:
            return (
                f"parameter {index} is {ours.name} {list(ours.shape)} {ours.dtype} here, "
                f"{theirs.name} {list(theirs.shape)} {theirs.dtype} in the run"
            )
    if len(expected) != len(found):
        return f"it has {len(found)} parameters here, {len(expected)} in the run"
    return ""
