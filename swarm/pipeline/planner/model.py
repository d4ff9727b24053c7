"""Model of a plan's speed: layer costs, peer capabilities, and the rate and memory of every span of stages.

A *cut* splits the layers into consecutive stages. A *span* is the run of consecutive stages that one peer holds; peers
with the same stage are its replicas. The rate of a stage is the sum of its replicas' rates, in micro-batches a second;
the rate of a plan is that of its slowest stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes, at the run's micro-batch."""

    parameters_bytes: int
    """Of its parameters in float32."""
    activation_bytes: int
    """Of the output of one micro-batch, as sent."""
    kept_bytes: int
    """What autograd keeps of one micro-batch between forward and backward."""


@dataclass(frozen=True)
class PeerCapability:
    """What a peer has measured of itself."""

    peer: str
    memory_bytes: int
    """What it can give to the run in all: free, and what the run has of it already."""
    layer_s: tuple[float, ...]
    """``(layers,)``: seconds of forward and backward of one micro-batch."""
    bandwidth_bps: float
    """What its link carries, in each direction."""
    rtt_s: float = 0.0
    """To its neighbours: a request and its answer."""
    holds_all: bool = False
    """Whether its memory is the machine's, in which all copies of the state are, or that of a device of its own, with
    those that it computes with."""


@dataclass(frozen=True)
class StagePlan:
    """Where the model is cut, and who holds what."""

    boundaries: tuple[int, ...]
    """``(stages + 1,)``: the first layer of each stage, then the number of layers."""
    spans: Mapping[str, tuple[int, int]]
    """By peer: its first and its last stage, inclusive. Peers without a place are absent."""
    recomputes: frozenset[str] = frozenset()
    """Peers of the plan that keep only the inputs of their stages, and compute forward again for the backward."""

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    def holders(self, stage: int) -> list[str]:
        """The replicas of a stage, by id."""
        return sorted(peer for peer, (first, last) in self.spans.items() if first <= stage <= last)


@dataclass(frozen=True)
class Infeasible:
    """No plan: a sentence for people, with the stage that nobody can hold and the memory that it takes."""

    reason: str


Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

AVERAGER_COPIES = 3.2
"""What the averager adds at most, in contributions: the README's figure for a round of int8, "in all"."""
_DEVICE_COPIES = 3.0 + AVERAGER_COPIES
"""Of the parameters, without optimizer values: more than parameters, gradients and their sum, which a GPU has."""
_ALL_COPIES, _VERSIONS = 12.3, 3.7
"""In the machine's memory, by ``benchmarks/pipeline_memory.py``: of the parameters, those of the work and of the
averaging; and of the state (parameters and optimizer values), of which some versions are there at a time: the present
one, the next one, and those that are served or being written as checkpoints."""
RECOMPUTE_TIME = 4 / 3
"""Forward takes about half of backward (Chen et al. 2016, arXiv:1604.06174), so once more is a third on top."""


@dataclass(frozen=True)
class SpanTable:
    """Every span of one cut: what each peer would give there."""

    boundaries: tuple[int, ...]
    first: Indices
    """``(spans,)`` first stages; spans are ordered by first, then last stage."""
    last: Indices
    rates: Floats
    """``(peers, spans)`` micro-batches a second; 0 where the span does not fit into the peer's memory."""
    recomputes: Flags
    """``(peers, spans)``: fits only if forward is computed again."""

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    def index_of(self, span: tuple[int, int]) -> int:
        """Where a span stands in the table."""
        first, last = span
        return first * self.stages - first * (first - 1) // 2 + last - first

    def load(self, choice: Indices) -> Floats:
        """``(stages,)``: the sum of the replicas' rates, for ``choice`` ``(peers,)`` of spans, -1 for none."""
        steps = np.zeros(self.stages + 1)
        placed = np.flatnonzero(choice >= 0)
        chosen = choice[placed]
        rates = self.rates[placed, chosen]
        np.add.at(steps, self.first[chosen], rates)
        np.subtract.at(steps, self.last[chosen] + 1, rates)
        counts = np.zeros(self.stages + 1, dtype=np.int64)
        useful = rates > 0
        np.add.at(counts, self.first[chosen][useful], 1)
        np.subtract.at(counts, self.last[chosen][useful] + 1, 1)
        # What cancels out is not always exactly zero.
        return np.where(np.cumsum(counts)[:-1] > 0, np.cumsum(steps)[:-1], 0.0)

    def rate(self, choice: Indices) -> float:
        """Of the slowest stage."""
        return float(self.load(choice).min())


class PlanningProblem:
    """Layers and peers as arrays. Peers are ordered by id, so that equal inputs give equal plans."""

    def __init__(
        self, layers: Sequence[LayerCost], peers: Sequence[PeerCapability], max_in_flight: int, optimizer_values: int
    ) -> None:
        """Raises ``ValueError`` for inputs that fit no plan at all: no layers, lengths that differ, a peer twice."""
        if not layers:
            raise ValueError("a pipeline needs at least one layer")
        if max_in_flight < 1 or optimizer_values < 0:
            raise ValueError("max_in_flight is 1 or more, optimizer_values 0 or more")
        self.peers = sorted(peers, key=lambda one: one.peer)
        if len({one.peer for one in peers}) < len(peers):
            raise ValueError("a peer stands twice in the list")
        for one in self.peers:
            if len(one.layer_s) != len(layers) or min(one.layer_s) < 0 or one.bandwidth_bps <= 0:
                raise ValueError(f"{one.peer}: expected seconds of {len(layers)} layers and a bandwidth above 0")
        self.layers = len(layers)
        self.in_flight = max_in_flight
        self._parameters = _sums([[one.parameters_bytes for one in layers]])[0]
        self._kept = _sums([[one.kept_bytes for one in layers]])[0]
        self._seconds = _sums([one.layer_s for one in self.peers]) if self.peers else np.zeros((0, self.layers + 1))
        # (layers + 1,): what crosses the boundary before each layer. Samples and the loss are next to nothing.
        self._crossing = np.array([0, *(one.activation_bytes for one in layers[:-1]), 0], dtype=np.float64)
        self._memory = np.array([one.memory_bytes for one in self.peers], dtype=np.float64)
        self._bandwidth = np.array([one.bandwidth_bps for one in self.peers], dtype=np.float64)
        self._rtt_s = np.array([one.rtt_s for one in self.peers], dtype=np.float64)
        # (peers,): of the parameters.
        self._copies = np.array([state_copies(optimizer_values, one.holds_all) for one in self.peers], dtype=np.float64)
        # Whoever has room for the most parameters, to say what a stage takes.
        self._roomiest = int(np.argmax(self._memory / self._copies)) if self.peers else None
        # What it takes elsewhere, as far as it matters which peer it is: (layers + 1,) sums, and for each boundary.
        usual_s = np.median(np.diff(self._seconds), axis=0) if self.peers else np.zeros(self.layers)
        self._usual_s = _sums([usual_s])[0]
        usual_bps, usual_rtt_s = (
            float(np.median(one)) if self.peers else 1.0 for one in (self._bandwidth, self._rtt_s)
        )
        self._usual_hop_s = 2 * 8 * self._crossing / usual_bps + usual_rtt_s

    def stages(self, starts: Indices, stops: Indices) -> tuple[Floats, Flags]:
        """As ``SpanTable.rates`` and ``recomputes``, for single stages of the layers [start, stop), with all layers
        after them in one stage."""
        return self._rates(starts, stops, self._again_bytes(starts, stops), self._usual_s[-1] - self._usual_s[stops])

    def table(self, boundaries: Sequence[int]) -> SpanTable:
        """Of all spans of a cut."""
        cut = np.array(boundaries, dtype=np.int64)
        count = len(cut) - 1
        first, last = (index.astype(np.int64) for index in np.triu_indices(count))
        again_bytes = self._span_again_bytes(cut, first, last)
        rates, recomputes = self._rates(cut[first], cut[last + 1], again_bytes, self._away_s(cut)[last + 1])
        return SpanTable(tuple(int(one) for one in cut), first, last, rates, recomputes)

    def least_bytes(self, starts: Indices, stops: Indices) -> Floats:
        """The memory that the stages of the layers [start, stop) take at least, with or without recomputation, of the
        peer with room for the most parameters; without peers, only the parameters count as state."""
        again = np.minimum(self._again_bytes(starts, stops), self._plain_bytes(starts, stops))
        copies = 1.0 if self._roomiest is None else self._copies[self._roomiest]
        parameters = self._parameters[stops] - self._parameters[starts]
        least: Floats = copies * parameters + self._sent_bytes(starts, stops) + again
        return least

    def most_memory(self) -> float:
        """Of the peer with room for the most parameters; 0 without one."""
        return 0.0 if self._roomiest is None else float(self._memory[self._roomiest])

    def _sent_bytes(self, starts: Indices, stops: Indices) -> Floats:
        """What is kept as sent until a neighbour has it for good: outputs and gradients."""
        sent: Floats = self.in_flight * (self._crossing[starts] + self._crossing[stops])
        return sent

    def _plain_bytes(self, starts: Indices, stops: Indices) -> Floats:
        kept: Floats = self.in_flight * (self._kept[stops] - self._kept[starts])
        return kept

    def _again_bytes(self, starts: Indices, stops: Indices) -> Floats:
        """With recomputation: each micro-batch's input, and what autograd keeps of the one at work."""
        kept: Floats = self.in_flight * self._crossing[starts] + (self._kept[stops] - self._kept[starts])
        return kept

    def _span_again_bytes(self, cut: Indices, first: Indices, last: Indices) -> Floats:
        """As above, stage after stage: the inputs of all of them, and the largest one at work."""
        inputs = _sums([self._crossing[cut[:-1]]])[0]
        kept = self._kept[cut[1:]] - self._kept[cut[:-1]]
        largest = np.concatenate([np.maximum.accumulate(kept[start:]) for start in range(len(kept))])
        again: Floats = self.in_flight * (inputs[last + 1] - inputs[first]) + largest
        return again

    def _away_s(self, cut: Indices) -> Floats:
        """``(stages + 1,)``: once an output has come to where a stage begins, or the model ends, the time until its
        gradient goes back from there, at the least."""
        hops_s = np.concatenate([[0.0], self._usual_hop_s[cut[1:-1]], [0.0]])
        passed_s = np.cumsum(hops_s)
        away_s: Floats = self._usual_s[-1] - self._usual_s[cut] + passed_s[-1] - passed_s
        return away_s

    def _rates(self, starts: Indices, stops: Indices, again_bytes: Floats, away_s: Floats) -> tuple[Floats, Flags]:
        """``away_s``: between what goes out at the end of each and its gradient, besides its own link."""
        fixed = self._copies[:, None] * (self._parameters[stops] - self._parameters[starts])
        fixed += self._sent_bytes(starts, stops)
        plain = self._memory[:, None] >= fixed + self._plain_bytes(starts, stops)
        again = ~plain & (self._memory[:, None] >= fixed + again_bytes)
        compute_s = self._seconds[:, stops] - self._seconds[:, starts]
        compute_s[again] *= RECOMPUTE_TIME
        # Each way: activations in and gradients out at the one side, gradients in and activations out at the other.
        one_way_s = 8 * (self._crossing[starts] + self._crossing[stops]) / self._bandwidth[:, None]
        sides = (starts > 0).astype(np.float64) + (stops < self.layers)
        # Little's law: so many micro-batches at a time, each of which is held until its gradient is back.
        stay_s = compute_s + 2 * one_way_s + sides * self._rtt_s[:, None] + away_s
        micro_batch_s = np.maximum(np.maximum(compute_s, one_way_s), stay_s / self.in_flight)
        rates = np.where(plain | again, 1 / np.maximum(micro_batch_s, 1e-9), 0.0)
        return rates, again


def state_copies(optimizer_values: int, holds_all: bool) -> float:
    """How many times the parameters in float32 are in a peer's memory, with all that belongs to them.

    ``optimizer_values``: that the outer optimizer keeps for each; ``holds_all``: as ``PeerCapability`` has it.
    """
    if holds_all:
        return _ALL_COPIES + _VERSIONS * (1 + optimizer_values)
    return _DEVICE_COPIES + optimizer_values


def _sums(rows: Sequence[Sequence[float]] | Sequence[Floats]) -> Floats:
    """``(rows, n + 1)``: sums of the first 0 to n values."""
    values = np.array(rows, dtype=np.float64)
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
