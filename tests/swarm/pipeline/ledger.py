"""A coordinator of simulated pipelines: who lives, who drives which samples, whose claims they are in each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shoal.swarm.coordinator.micro_batch_ledger import fair_samples
from shoal.swarm.pipeline.engine.effects import AskToDrive, Claim, Release
from shoal.swarm.sample_ranges import Ranges, merge

if TYPE_CHECKING:
    from tests.swarm.pipeline.simulator import SimulatedPeer, Simulation


def as_ranges(samples: list[int]) -> Ranges:
    return merge((sample, sample + 1) for sample in samples)


class Ledger:
    """Sample by sample, so that nothing depends on how ranges are cut."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.round = 0
        self.is_closing = False
        self.averaging_since_s: float | None = None
        self.live: dict[str, SimulatedPeer] = {}
        self.heard_s: dict[str, float] = {}
        self.ready: dict[str, dict[int, Ranges]] = {}
        self.reopened = 0
        self.finished: Counter[str] = Counter()
        self._open_round()

    def begin(self) -> None:
        self.simulation.after(self.world.heartbeat_s / 5, self._tick)

    def outlook(self) -> str:
        missing = {stage: as_ranges(self._missing(stage)) for stage in range(self.world.stages)}
        return f"round {self.round}, live {sorted(self.live)}, driven {self.driven}, missing {missing}"

    def _open_round(self) -> None:
        batch = self.world.batch
        self.batch = range(self.round * batch, (self.round + 1) * batch)
        self.finished = Counter({peer: samples // 2 for peer, samples in self.finished.items()})
        self.fresh = self.batch.start
        self.driven: dict[int, str] = {}
        self.claimed: dict[int, dict[int, str]] = {stage: {} for stage in range(self.world.stages)}
        self.counted: dict[str, dict[int, Ranges]] = {}
        self.ready.clear()
        self.is_closing, self.averaging_since_s = False, None

    # Events ---------------------------------------------------------------------------------------------------

    def hear(self, peer: SimulatedPeer, kind: str, content: Any) -> None:
        if kind == "join":
            self._admit(peer)
        elif self.live.get(peer.name) is not peer:
            self._answer_stranger(peer, kind, content)
            return
        self.heard_s[peer.name] = self.simulation.now_s
        match kind:
            case "heartbeat":
                self._heartbeat(peer, content)
            case "Claim":
                self._claim(peer, content)
            case "Release":
                self._release(peer, content)
            case "AskToDrive":
                self._drive(peer, content)

    def _admit(self, peer: SimulatedPeer) -> None:
        """A new one; or one that was lost, and has dropped all that it had."""
        if peer.name in self.live:
            self.lose(peer.name)
        self.live[peer.name] = peer
        self._tell_replicas()
        self.simulation.from_coordinator(peer, "round_opened", self.round)
        if self.is_closing:
            self.simulation.from_coordinator(peer, "round_closing")

    def _answer_stranger(self, peer: SimulatedPeer, kind: str, ask: Any) -> None:
        """One that was lost and does not know it yet: nothing is its."""
        match kind:
            case "heartbeat":
                self.simulation.tell_lost(peer)
            case "Claim":
                self.simulation.from_coordinator(peer, "claim_answered", ask, [])
            case "AskToDrive":
                self.simulation.from_coordinator(peer, "driving_granted", ask, [])

    def _heartbeat(self, peer: SimulatedPeer, counted: dict[int, Ranges]) -> None:
        self.counted[peer.name] = counted
        if self.is_closing:
            self.ready[peer.name] = counted

    def _claim(self, peer: SimulatedPeer, claim: Claim) -> None:
        owners, micro_batch = self.claimed[claim.stage], claim.micro_batch
        granted = []
        if micro_batch.round == self.round:
            for sample in range(micro_batch.start, micro_batch.stop):
                if owners.setdefault(sample, peer.name) == peer.name:
                    granted.append(sample)
        self.simulation.from_coordinator(peer, "claim_answered", claim, as_ranges(granted))

    def _release(self, peer: SimulatedPeer, release: Release) -> None:
        if release.round == self.round:
            for start, stop in release.ranges:
                for sample in range(start, stop):
                    assert self.claimed[release.stage].pop(sample) == peer.name, "released what it did not have"

    def _drive(self, peer: SimulatedPeer, ask: AskToDrive) -> None:
        """New samples while there are any, else what a stage misses and nobody drives."""
        granted: list[int] = []
        if ask.round == self.round:
            for start, stop in ask.done:
                for sample in range(start, stop):
                    if self.driven.get(sample) == peer.name:
                        del self.driven[sample]
                        self.finished[peer.name] += 1
            granted = self._lease(min(ask.samples, self.world.lease_samples, self._fair(peer.name)))
            self.driven |= dict.fromkeys(granted, peer.name)
        self.simulation.from_coordinator(peer, "driving_granted", ask, as_ranges(granted))

    def _fair(self, peer: str) -> int:
        """As the coordinator has it."""
        fresh = self.batch.stop - self.fresh
        if not fresh or not self.finished[peer]:
            return self.world.batch
        mine = sum(driver == peer for driver in self.driven.values())
        return max(0, fair_samples(self.finished, peer, fresh + len(self.driven), self.world.micro_batch) - mine)

    def _lease(self, samples: int) -> list[int]:
        """Whole micro-batches: on the multiples of their size, cut only by the ends of the batch."""
        size = self.world.micro_batch
        wanted = self._cells(range(self.fresh, self.batch.stop))
        if not wanted:
            missing = {sample for stage in self.claimed for sample in self._missing(stage)}
            wanted = self._cells(sorted(missing))
            wanted = [cell for cell in wanted if not self.driven.keys() & set(self._samples(cell))]
        granted = [sample for cell in wanted[: samples // size] for sample in self._samples(cell)]
        self.fresh = max([self.fresh, *(sample + 1 for sample in granted)])
        return granted

    def _cells(self, samples: Iterable[int]) -> list[int]:
        return sorted({sample // self.world.micro_batch for sample in samples})

    def _samples(self, cell: int) -> range:
        size = self.world.micro_batch
        return range(max(self.batch.start, cell * size), min(self.batch.stop, (cell + 1) * size))

    def _missing(self, stage: int) -> list[int]:
        return [sample for sample in range(self.batch.start, self.fresh) if sample not in self.claimed[stage]]

    # Time -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_s = self.simulation.now_s
        for name in [name for name in self.live if now_s - self.heard_s[name] > self.world.patience_s]:
            self.lose(name)
        if not self.is_closing:
            if self._is_complete(self.counted):
                self.is_closing = True
                self._tell_all("round_closing")
        elif self.ready.keys() >= self.live.keys():
            self._close(now_s)
        self.simulation.after(self.world.heartbeat_s / 5, self._tick)

    def lose(self, name: str) -> None:
        """Its claims, done or not, and what it drives are for others."""
        del self.live[name]
        self.finished.pop(name, None)
        self.counted.pop(name, None)
        self.ready.pop(name, None)
        self.driven = {sample: peer for sample, peer in self.driven.items() if peer != name}
        for stage, owners in self.claimed.items():
            self.claimed[stage] = {sample: peer for sample, peer in owners.items() if peer != name}
        self._tell_all("replica_gone", name)
        self._tell_replicas()
        if self.is_closing and not self._is_complete(self.counted):
            self.reopened += 1
            self.is_closing, self.averaging_since_s = False, None
            self.ready.clear()
            self._tell_all("round_opened", self.round)

    def _close(self, now_s: float) -> None:
        """The averaging takes its time, and everybody who is in it."""
        if not self._is_complete(self.ready) or self.averaging_since_s is None:
            self.averaging_since_s = now_s
        elif now_s >= self.averaging_since_s + self.world.averaging_s and not any(
            peer.is_dead or peer.is_frozen for peer in self.live.values()
        ):
            self._commit()

    def _commit(self) -> None:
        check_exactly_once(self.live.values(), self.batch, self.world.stages)
        self.simulation.commits.append(self.simulation.now_s)
        self.round += 1
        self._open_round()
        self._tell_all("round_over")
        self._tell_all("round_opened", self.round)

    def _is_complete(self, reported: dict[str, dict[int, Ranges]]) -> bool:
        for stage in range(self.world.stages):
            ranges = [one for counted in reported.values() for one in counted.get(stage, [])]
            if merge(ranges) != [(self.batch.start, self.batch.stop)]:
                return False
        return True

    def _tell_all(self, method: str, *arguments: Any) -> None:
        for peer in self.live.values():
            self.simulation.from_coordinator(peer, method, *arguments)

    def _tell_replicas(self) -> None:
        for stage in range(self.world.stages):
            rates = {name: self._planned_rate(peer) for name, peer in self.live.items() if stage in peer.span}
            self._tell_all("replicas_changed", stage, rates)

    def _planned_rate(self, peer: SimulatedPeer) -> float | None:
        """Micro-batches a second; None where nothing is known, which is what a prediction of 0 stands for."""
        speed = self.world.speed_of(peer.name)
        micro_batch_s = len(peer.span) * (speed.forward_s + speed.backward_s)
        return self.world.predictions.get(peer.name, 1.0) / micro_batch_s or None


def check_exactly_once(peers: Any, batch: range, stages: int) -> None:
    """Every sample of the batch is in every stage's gradient, over its live replicas, once; and nothing else is."""
    for stage in range(stages):
        total: dict[int, int] = {}
        for peer in peers:
            for sample, times in peer.accumulated.get(stage, {}).items():
                total[sample] = total.get(sample, 0) + times
        wrong = {sample: total.get(sample, 0) for sample in set(batch) | set(total) if total.get(sample, 0) != 1}
        assert set(total) <= set(batch), f"stage {stage}: samples of other rounds counted"
        assert not wrong, f"stage {stage}: counted so often: {wrong}"
