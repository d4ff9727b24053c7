"""One stage of a pipeline: the scope whose replicas average with each other, and their claims of micro-batches.

Its rounds end together with those of all other stages (``barrier.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.micro_batch_ledger import Batch
from shoal.swarm.coordinator.round_scope import RoundScope, Sign
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorClaim,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorRelease,
)
from shoal.swarm.protocol.pins import PinnedLayer
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.verdict_chain import genesis
from shoal.swarm.sample_ranges import (
    Ranges,
    covers,
    from_wire,
    is_tidy,
    merge,
    overlap,
    subtract,
    to_wire,
)


class StageScope(RoundScope):
    """Leases are claims: whoever is the first to claim a sample of the round's batch has it, until it gives it back,
    dies, or the round ends. An aborted round leaves nobody anything."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int, stage: int) -> None:
        super().__init__(run, sign, now_s, epoch)
        self.stage = stage
        self.layers: tuple[PinnedLayer, ...] = ()
        """As the run file pins them, if it does."""
        self.chain = genesis(run.hash, self.scope)
        self.keep: Callable[[ev.InScope], None] = lambda event: None
        """Takes its events, in the order of those of all scopes."""

    @property
    def scope(self) -> int:
        return self.stage + 1

    @property
    def label(self) -> str:
        return f"stage {self.stage}: "

    def lacks_samples(self, proposal: ev.RoundPlanned | None) -> bool:
        """Whether the plan is not of exactly this round's batch."""
        batch = self.batch()
        if batch is None or proposal is None:
            return True
        return merge(one for ranges in proposal.ranges for one in from_wire(ranges)) != batch.ranges

    def _keep(self, event: ev.JournalEvent) -> None:
        self.keep(ev.InScope(scope=self.scope, event=event))

    def _check_pins(self, model: PeerToCoordinatorDescribeModel) -> None:
        if self.run.pins is not None and self.layers:
            self.run.pins.check_stage(model, self.layers)

    def is_batch_done(self) -> bool:
        """Whether all of this round's batch was claimed here and, as its replicas say, is done."""
        if self.round.phase != "training" or self.model is None or self.leases.outstanding() < self.goal_samples():
            return False
        return sum(work.tokens for work in self.works()) >= self.goal().tokens

    # Claims ---------------------------------------------------------------------------------------------

    def batch(self) -> Batch | None:
        """The samples of this round; None before anybody has said how many tokens one is."""
        if self.model is None:
            return None
        assert self.run.pipeline is not None
        samples = self.goal_samples()
        start = self.anchor_version * samples
        return Batch(start, start + samples, self.run.pipeline.micro_batch)

    def claim(self, peer: str, claim: PeerToCoordinatorClaim, now_s: float) -> Ranges:
        """Those of the claimed ranges that are this peer's, each as a whole; the same again gets the same answer.

        Raises ``WireError`` for ranges that overlap or are of no micro-batch of this round."""
        self.now_s = now_s
        member = self.membership.members[peer]
        member.heard_s = now_s
        batch, ranges = self.batch(), from_wire(claim.ranges)
        if batch is None or claim.round != self.round.number or peer in self.round.orphans:
            return []
        if not is_tidy(ranges) or not covers(batch.ranges, merge(ranges)):
            raise WireError("claimed samples must be of this round's batch, each named once")
        mine = self.leases.held.get(peer, [])
        others = merge(one for holder, held in self.leases.held.items() if holder != peer for one in held)
        is_open = self.round.phase == "training" and peer in self.working()
        granted = [one for one in ranges if covers(mine, [one]) or (is_open and not overlap([one], others))]
        fresh = subtract(merge(granted), mine)
        if fresh:
            self.record(ev.SamplesClaimed(peer=peer, ranges=to_wire(fresh)))
        return granted

    def release(self, peer: str, release: PeerToCoordinatorRelease, now_s: float) -> None:
        """What it claimed will not be done there. Once a plan counts on it, it is too late."""
        self.now_s = now_s
        self.membership.members[peer].heard_s = now_s
        if release.round != self.round.number or self.round.phase == "averaging":
            return
        ranges = from_wire(release.ranges)
        if not is_tidy(ranges):
            raise WireError("the sample ranges of a release must not be empty or overlap")
        freed = overlap(merge(ranges), self.leases.held.get(peer, []))
        if freed:
            self.record(ev.SamplesReleased(peer=peer, ranges=to_wire(freed)))

    def unclaimed(self, batch: Batch) -> Ranges:
        """What of the batch is no live replica's."""
        return subtract(batch.ranges, merge(one for held in self.leases.held.values() for one in held))

    def queue(self) -> int:
        """Samples that were claimed and, as far as their replicas have told, are not done."""
        tokens = sum(work.leased_tokens - work.tokens for work in self.works())
        return tokens // self.model.tokens_per_sample if self.model else 0

    # Rounds ---------------------------------------------------------------------------------------------

    def _leave_out(self, missing: Iterable[str]) -> None:
        """Leave out nobody: a stage may have no other replica.

        Who is in no mean loses its place (``Barrier.evict_persistent_stragglers``)."""

    def _end_round(self, event: ev.VerdictGiven) -> None:
        super()._end_round(event)
        if not event.verdict.committed:  # what is committed in one stage has to be in all: every round begins anew
            for peer in list(self.leases.held):
                self.leases.give_back(peer)
            for member in self.membership.members.values():
                member.forget_progress()
