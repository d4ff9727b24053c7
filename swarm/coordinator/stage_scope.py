"""One stage of a pipeline: the scope whose replicas average with each other, and its ledger of micro-batches.

Its rounds end together with those of all other stages (``barrier.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.swarm.coordinator import events as f
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
    count,
    covers,
    from_wire,
    is_tidy,
    merge,
    overlap,
    subtract,
    to_wire,
    union,
)

# Micro-batches of a round -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The samples ``start <= s < stop`` of a round, in micro-batches of ``micro`` samples; the last one may be smaller.

    Of anchor version v it is the v-th batch of the run's sequence of samples: what is behind the anchor is all before
    it, whatever was aborted or undone on the way."""

    start: int
    stop: int
    micro: int

    @property
    def ranges(self) -> Ranges:
        return [(self.start, self.stop)]

    def cells(self, ranges: Ranges) -> Ranges:
        """The micro-batches that ``ranges`` (merged, of this batch) lie in."""
        cells: Ranges = []
        for start, stop in ranges:
            at = start - (start - self.start) % self.micro
            if cells:
                at = max(at, cells[-1][1])
            cells += [(one, min(one + self.micro, self.stop)) for one in range(at, stop, self.micro)]
        return cells


def fair_samples(finished: Mapping[str, int], peer: str, left: int, micro: int) -> int:
    """Whole micro-batches, one at least. ``finished``: samples, by driver; ``left``: those that are not."""
    share = finished[peer] / sum(finished.values())
    return max(1, math.ceil(share * left / micro)) * micro


@dataclass
class Drives:
    """Of one round. ``driven``: what has been given to anybody to drive; ``in_flight``: by driver, what it has not said
    to be done since. Two drivers may have the same: the second one was asked as the first stood still. ``finished``:
    how many samples each driver has said to be done, in this round and lately."""

    driven: Ranges = field(default_factory=list)
    in_flight: dict[str, Ranges] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)

    def next_round(self) -> Drives:
        """Nothing is driven yet; how fast everybody was counts half as much as how fast it will be."""
        return Drives(finished={peer: samples // 2 for peer, samples in self.finished.items()})

    def take(self, peer: str, ranges: Ranges, done: Ranges) -> None:
        """``peer`` drives ``ranges`` now, and ``done`` no longer."""
        left = union(subtract(self.in_flight.pop(peer, []), merge(done)), merge(ranges))
        if left:
            self.in_flight[peer] = left
        if done:
            self.finished[peer] = self.finished.get(peer, 0) + count(done)
        self.driven = union(self.driven, merge(ranges))

    def lose(self, peer: str) -> None:
        """It drives nothing any more."""
        self.in_flight.pop(peer, None)
        self.finished.pop(peer, None)

    def fair_samples(self, peer: str, batch: Batch) -> int | None:
        """The most that a driver should have under way: its part, as fast as it has been, of what is left of the batch,
        or the others would wait for it in the end. None while there is nothing to tell by, and once all was given."""
        fresh = count(subtract(batch.ranges, self.driven))
        if not fresh or not self.finished.get(peer):
            return None
        left = fresh + sum(count(ranges) for ranges in self.in_flight.values())
        return fair_samples(self.finished, peer, left, batch.micro)

    def choose(self, batch: Batch, missing: Ranges, stalled: Sequence[str], samples: int) -> Ranges:
        """The next micro-batches to drive, of about so many samples: those that nobody has driven yet; then those that
        some stage misses and nobody is at, but for the ``stalled``. One range each.

        ``missing`` (merged, of the batch): what some stage has no claim on."""
        chosen = self._first(batch, subtract(batch.ranges, self.driven), samples)
        if not chosen:
            flying: Ranges = []
            for peer, ranges in self.in_flight.items():
                if peer not in stalled:
                    flying = union(flying, ranges)
            chosen = self._first(batch, subtract(missing, merge(batch.cells(flying))), samples)
        return chosen

    @staticmethod
    def _first(batch: Batch, ranges: Ranges, samples: int) -> Ranges:
        cells = batch.cells(ranges)
        return cells[: -(-samples // batch.micro)]


# One stage --------------------------------------------------------------------------------------------------


class StageScope(RoundScope):
    """Leases are claims: whoever is the first to claim a sample of the round's batch has it, until it gives it back,
    dies, or the round ends. An aborted round leaves nobody anything."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int, stage: int) -> None:
        super().__init__(run, sign, now_s, epoch)
        self.stage = stage
        self.layers: tuple[PinnedLayer, ...] = ()
        """As the run file pins them, if it does."""
        self.chain = genesis(run.hash, self.scope)
        self.keep: Callable[[f.InScope], None] = lambda fact: None
        """Takes its facts, in the order of those of all scopes."""

    @property
    def scope(self) -> int:
        return self.stage + 1

    @property
    def label(self) -> str:
        return f"stage {self.stage}: "

    def lacks_samples(self, proposal: f.RoundPlanned | None) -> bool:
        """Whether the plan is not of exactly this round's batch."""
        batch = self.batch()
        if batch is None or proposal is None:
            return True
        return merge(one for ranges in proposal.ranges for one in from_wire(ranges)) != batch.ranges

    def _keep(self, fact: f.Fact) -> None:
        self.keep(f.InScope(scope=self.scope, fact=fact))

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
            self.record(f.SamplesClaimed(peer=peer, ranges=to_wire(fresh)))
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
            self.record(f.SamplesReleased(peer=peer, ranges=to_wire(freed)))

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

    def _end_round(self, fact: f.VerdictGiven) -> None:
        super()._end_round(fact)
        if not fact.verdict.committed:  # what is committed in one stage has to be in all: every round begins anew
            for peer in list(self.leases.held):
                self.leases.give_back(peer)
            for member in self.membership.members.values():
                member.forget_progress()
