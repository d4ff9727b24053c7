"""Stage of a pipeline, beside its rounds: the batch, the replicas' claims on it, and who drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.coordinator.events import RoundPlanned, SamplesClaimed, SamplesReleased
from shoal.swarm.coordinator.micro_batch_ledger import Batch, MicroBatchLedger
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.messages import PeerToCoordinatorClaim, PeerToCoordinatorRelease
from shoal.swarm.protocol.pins import PinnedLayer
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

if TYPE_CHECKING:
    from shoal.swarm.coordinator.round_scope import RoundScope


class Stage:
    """Part of a stage's scope that plain runs do not have: layers, claims of samples, and micro-batches.

    Leases are claims here: the first replica to claim a sample of the round's batch has it until it releases it, dies,
    or the round ends. ``layers``: as the run file pins them, else none. ``micro_batches``: of the
    first stage, whose replicas drive them."""

    def __init__(self, scope: RoundScope, number: int, layers: Sequence[PinnedLayer]) -> None:
        self.number = number
        self.layers = layers
        self.micro_batches = MicroBatchLedger()
        self._scope = scope

    def batch(self) -> Batch | None:
        """Return the samples of this round; None before a replica has described the model."""
        scope = self._scope
        if scope.model is None:
            return None
        assert scope.run.pipeline is not None
        samples = scope.goal_samples()
        start = scope.anchor_version * samples
        return Batch(start, start + samples, scope.run.pipeline.micro_batch)

    def is_whole(self, proposal: RoundPlanned | None) -> bool:
        """Whether the plan is of exactly this round's batch."""
        batch = self.batch()
        if batch is None or proposal is None:
            return False
        return merge(one for ranges in proposal.ranges for one in from_wire(ranges)) == batch.ranges

    def is_batch_done(self) -> bool:
        """Whether replicas have claimed all of the batch and report it as done."""
        scope = self._scope
        if scope.round.phase != "training" or scope.model is None:
            return False
        if scope.leases.outstanding() < scope.goal_samples():
            return False
        return sum(work.tokens for work in scope.works()) >= scope.goal().tokens

    def claim(self, peer: str, claim: PeerToCoordinatorClaim, now_s: float) -> Ranges:
        """Return those of the claimed ranges that are this peer's, each as a whole. A repeated claim gets the same
        answer. Raises ``WireError`` for ranges that overlap or are of no micro-batch of this round."""
        scope = self._scope
        scope.hear(peer, now_s)
        batch, ranges = self.batch(), from_wire(claim.ranges)
        if batch is None or claim.round != scope.round.number or peer in scope.round.orphans:
            return []
        if not is_tidy(ranges) or not covers(batch.ranges, merge(ranges)):
            raise WireError("claimed samples must be of this round's batch, each named once")
        mine = scope.leases.held.get(peer, [])
        others = merge(one for holder, held in scope.leases.held.items() if holder != peer for one in held)
        is_open = scope.round.phase == "training" and peer in scope.working()
        granted = [one for one in ranges if covers(mine, [one]) or (is_open and not overlap([one], others))]
        fresh = subtract(merge(granted), mine)
        if fresh:
            scope.record(SamplesClaimed(peer=peer, ranges=to_wire(fresh)))
        return granted

    def release(self, peer: str, release: PeerToCoordinatorRelease, now_s: float) -> None:
        """Give up claims on samples that this peer will not do. Nothing happens once the round is averaged."""
        scope = self._scope
        scope.hear(peer, now_s)
        if release.round != scope.round.number or scope.round.phase == "averaging":
            return
        ranges = from_wire(release.ranges)
        if not is_tidy(ranges):
            raise WireError("the sample ranges of a release must not be empty or overlap")
        freed = overlap(merge(ranges), scope.leases.held.get(peer, []))
        if freed:
            scope.record(SamplesReleased(peer=peer, ranges=to_wire(freed)))

    def unclaimed(self, batch: Batch) -> Ranges:
        """Return the samples of the batch that no live replica has claimed."""
        return subtract(batch.ranges, merge(one for held in self._scope.leases.held.values() for one in held))

    def queue(self) -> int:
        """Return how many samples are claimed and not reported as done."""
        model = self._scope.model
        tokens = sum(work.leased_tokens - work.tokens for work in self._scope.works())
        return tokens // model.tokens_per_sample if model else 0
