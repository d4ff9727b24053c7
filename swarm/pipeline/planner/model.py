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

from shoal.swarm.memory_account import MemoryDemand

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer, at the run's micro-batch."""

    parameters_bytes: int
    """Size of its parameters in float32."""
    activation_bytes: int
    """Size of one micro-batch's output, as sent."""
    kept_bytes: int
    """Size of what autograd keeps of one micro-batch between forward and backward."""


@dataclass(frozen=True)
class PeerCapability:
    """Capability of a peer, as it has measured itself."""

    peer: str
    host_bytes: int
    """Memory of the machine for the run in all: what is free, and what the run already uses."""
    layer_s: tuple[float, ...]
    """``(layers,)``: seconds of forward and backward of one micro-batch."""
    bandwidth_bps: float
    """Throughput of its link, in each direction."""
    rtt_s: float = 0.0
    """Round trip to its neighbours."""
    device_bytes: int | None = None
    """The same of a GPU's own memory; None for a device that computes in the machine's memory, as CPU and MPS do."""
    network: str = ""
    """Network that it comes from, as the coordinator sees it; "" if that is not known."""
    is_dialed: bool = True
    """Whether others can open connections to it."""
    unmet: frozenset[str] = frozenset()
    """Peers to which it could make no connection, as it says."""


@dataclass(frozen=True)
class StagePlan:
    """Cut of the model into stages, and the span that each peer holds."""

    boundaries: tuple[int, ...]
    """``(stages + 1,)``: the first layer of each stage, then the number of layers."""
    spans: Mapping[str, tuple[int, int]]
    """By peer: its first and last stage, inclusive. Peers without a span are absent."""
    recomputes: frozenset[str] = frozenset()
    """Peers that keep only their stages' inputs and compute forward again for the backward."""

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    def holders(self, stage: int) -> list[str]:
        """Replicas of a stage, sorted by id."""
        return sorted(peer for peer, (first, last) in self.spans.items() if first <= stage <= last)


@dataclass(frozen=True)
class StageMemory:
    """Memory that stages take of one peer, and how much of it that peer has.

    ``host``, ``device``: ``(stages,)`` bytes in the machine's memory and in a GPU's own, None where there is none."""

    host: Floats
    device: Floats | None
    host_limit: float
    device_limit: float | None

    def scarcest(self) -> Floats:
        """``(stages,)``: need of the scarcer memory, as a multiple of what there is of it; in bytes without a limit."""
        if not self.host_limit:
            return self.host
        host: Floats = self.host / self.host_limit
        if self.device is None or not self.device_limit:
            return host
        scarcest: Floats = np.maximum(host, self.device / self.device_limit)
        return scarcest

    def of(self, stage: int) -> tuple[str, float, float]:
        """Return the name of the memory that is scarcer for a stage, the bytes that the stage takes of it, and the
        limit."""
        if self.device is not None and self.device_limit is not None:
            if self.device[stage] * self.host_limit >= self.host[stage] * self.device_limit:
                return "GPU memory", float(self.device[stage]), self.device_limit
            return "host memory", float(self.host[stage]), self.host_limit
        return "memory", float(self.host[stage]), self.host_limit


@dataclass(frozen=True)
class Infeasible:
    """Reason why there is no plan, for people: the stage that nobody can hold and the memory that it takes."""

    reason: str


RECOMPUTE_TIME = 4 / 3
"""Time with recomputation: forward takes about half of backward (Chen et al. 2016, arXiv:1604.06174)."""


@dataclass(frozen=True)
class SpanTable:
    """Rate of every peer in every span of one cut."""

    boundaries: tuple[int, ...]
    first: Indices
    """``(spans,)``: first stages; spans are ordered by first, then last stage."""
    last: Indices
    rates: Floats
    """``(peers, spans)``: micro-batches a second; 0 where the span does not fit into the peer's memory."""
    recomputes: Flags
    """``(peers, spans)``: whether the span fits only if forward is computed again."""

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    def index_of(self, span: tuple[int, int]) -> int:
        """Index of a span in the table."""
        first, last = span
        return first * self.stages - first * (first - 1) // 2 + last - first

    def load(self, choice: Indices) -> Floats:
        """``(stages,)``: sums of the replicas' rates, for ``choice`` ``(peers,)`` of span indices, -1 for none."""
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
        # Without this, rates that cancel out might leave a tiny remainder instead of zero.
        return np.where(np.cumsum(counts)[:-1] > 0, np.cumsum(steps)[:-1], 0.0)

    def rate(self, choice: Indices) -> float:
        """Rate of the slowest stage."""
        return float(self.load(choice).min())


class PlanningProblem:
    """Layers and peers to plan for, as arrays; peers are ordered by id, so that equal inputs give equal plans."""

    def __init__(
        self, layers: Sequence[LayerCost], peers: Sequence[PeerCapability], max_in_flight: int, demand: MemoryDemand
    ) -> None:
        """``demand``: memory that a stage takes for each parameter.

        Raises ``ValueError`` for inputs that fit no plan at all: no layers, lengths that differ, a peer twice."""
        if not layers:
            raise ValueError("a pipeline needs at least one layer")
        if max_in_flight < 1:
            raise ValueError("max_in_flight is 1 or more")
        self.peers = sorted(peers, key=lambda one: one.peer)
        if len({one.peer for one in peers}) < len(peers):
            raise ValueError("a peer stands twice in the list")
        for one in self.peers:
            if len(one.layer_s) != len(layers) or min(one.layer_s) < 0 or one.bandwidth_bps <= 0:
                raise ValueError(f"{one.peer}: expected seconds of {len(layers)} layers and a bandwidth above 0")
        self.layers = len(layers)
        self.in_flight = max_in_flight
        self.networks = [one.network for one in self.peers]
        self._costs, self._demand = layers, demand
        self._parameters = _sums([[one.parameters_bytes for one in layers]])[0]
        self._kept = _sums([[one.kept_bytes for one in layers]])[0]
        self._seconds = _sums([one.layer_s for one in self.peers]) if self.peers else np.zeros((0, self.layers + 1))
        # (layers + 1,): bytes that cross the boundary before each layer. Samples and the loss are negligible.
        self._crossing = np.array([0, *(one.activation_bytes for one in layers[:-1]), 0], dtype=np.float64)
        # (peers,): a device in the machine's memory has no limit of its own, and takes from that of the host.
        self._host = np.array([one.host_bytes for one in self.peers], dtype=np.float64)
        self._device = np.array(
            [np.inf if one.device_bytes is None else one.device_bytes for one in self.peers], dtype=np.float64
        )
        self._is_shared = np.isinf(self._device)
        # (peers,): bytes for each byte of the parameters in float32.
        self._host_copies = np.where(self._is_shared, demand.shared, demand.host)
        self._device_copies = np.where(self._is_shared, 0.0, demand.device)
        self._bandwidth = np.array([one.bandwidth_bps for one in self.peers], dtype=np.float64)
        self._rtt_s = np.array([one.rtt_s for one in self.peers], dtype=np.float64)
        # The peer with room for the most parameters, to say what a stage takes.
        room = np.minimum(self._host / self._host_copies, self._device / np.maximum(self._device_copies, 1e-9))
        self._roomiest = int(np.argmax(room)) if self.peers else None
        # Time at other peers, supposed to be median ones: (layers + 1,) sums, and for each boundary.
        usual_s = np.median(np.diff(self._seconds), axis=0) if self.peers else np.zeros(self.layers)
        self._usual_s = _sums([usual_s])[0]
        usual_bps, usual_rtt_s = (
            float(np.median(one)) if self.peers else 1.0 for one in (self._bandwidth, self._rtt_s)
        )
        self._usual_hop_s = 2 * 8 * self._crossing / usual_bps + usual_rtt_s

    def of_peers(self, peers: Sequence[PeerCapability]) -> PlanningProblem:
        """Return the same problem with other peers."""
        return PlanningProblem(self._costs, peers, self.in_flight, self._demand)

    def stages(self, starts: Indices, stops: Indices) -> tuple[Floats, Flags]:
        """``rates`` and ``recomputes`` as in ``SpanTable``, for single stages of the layers [start, stop).

        All layers after each count as one stage.
        """
        return self._rates(starts, stops, self._again_bytes(starts, stops), self._usual_s[-1] - self._usual_s[stops])

    def table(self, boundaries: Sequence[int]) -> SpanTable:
        """Table of all spans of a cut."""
        cut = np.array(boundaries, dtype=np.int64)
        count = len(cut) - 1
        first, last = (index.astype(np.int64) for index in np.triu_indices(count))
        again_bytes = self._span_again_bytes(cut, first, last)
        rates, recomputes = self._rates(cut[first], cut[last + 1], again_bytes, self._away_s(cut)[last + 1])
        return SpanTable(tuple(int(one) for one in cut), first, last, rates, recomputes)

    def least_memory(self, starts: Indices, stops: Indices) -> StageMemory:
        """Least memory for stages of the layers [start, stop), with or without recomputation.

        Of the peer with room for the most parameters; without peers, only the parameters count as state.
        """
        again = np.minimum(self._again_bytes(starts, stops), self._plain_bytes(starts, stops))
        parameters, sent = self._parameters[stops] - self._parameters[starts], self._sent_bytes(starts, stops)
        row = self._roomiest
        if row is None:
            return StageMemory(parameters + sent + again, None, 0.0, None)
        host = self._host_copies[row] * parameters + sent
        if self._is_shared[row]:
            return StageMemory(host + again, None, float(self._host[row]), None)
        device = self._device_copies[row] * parameters + again
        return StageMemory(host, device, float(self._host[row]), float(self._device[row]))

    def _sent_bytes(self, starts: Indices, stops: Indices) -> Floats:
        """Bytes of outputs and gradients kept until a neighbour has them for good."""
        sent: Floats = self.in_flight * (self._crossing[starts] + self._crossing[stops])
        return sent

    def _plain_bytes(self, starts: Indices, stops: Indices) -> Floats:
        kept: Floats = self.in_flight * (self._kept[stops] - self._kept[starts])
        return kept

    def _again_bytes(self, starts: Indices, stops: Indices) -> Floats:
        """Bytes with recomputation: every micro-batch's input, and autograd's of the one being computed."""
        kept: Floats = self.in_flight * self._crossing[starts] + (self._kept[stops] - self._kept[starts])
        return kept

    def _span_again_bytes(self, cut: Indices, first: Indices, last: Indices) -> Floats:
        """Bytes with recomputation of spans: the inputs of all their stages, and autograd's of the largest stage."""
        inputs = _sums([self._crossing[cut[:-1]]])[0]
        kept = self._kept[cut[1:]] - self._kept[cut[:-1]]
        largest = np.concatenate([np.maximum.accumulate(kept[start:]) for start in range(len(kept))])
        again: Floats = self.in_flight * (inputs[last + 1] - inputs[first]) + largest
        return again

    def _away_s(self, cut: Indices) -> Floats:
        """``(stages + 1,)``: least time from an output's arrival at each boundary to its gradient's departure."""
        hops_s = np.concatenate([[0.0], self._usual_hop_s[cut[1:-1]], [0.0]])
        passed_s = np.cumsum(hops_s)
        away_s: Floats = self._usual_s[-1] - self._usual_s[cut] + passed_s[-1] - passed_s
        return away_s

    def _rates(self, starts: Indices, stops: Indices, again_bytes: Floats, away_s: Floats) -> tuple[Floats, Flags]:
        """``rates`` and ``recomputes``; ``away_s``: time from an output to its gradient, own link excluded."""
        parameters, shared = self._parameters[stops] - self._parameters[starts], self._is_shared[:, None]
        host = self._host_copies[:, None] * parameters + self._sent_bytes(starts, stops)
        device = self._device_copies[:, None] * parameters

        def fits(activations: Floats) -> Flags:
            """Activations are where the device computes."""
            on_host = host + np.where(shared, activations, 0.0) <= self._host[:, None]
            held: Flags = on_host & (device + np.where(shared, 0.0, activations) <= self._device[:, None])
            return held

        plain = fits(self._plain_bytes(starts, stops))
        again = ~plain & fits(again_bytes)
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


def _sums(rows: Sequence[Sequence[float]] | Sequence[Floats]) -> Floats:
    """``(rows, n + 1)``: sums of the first 0 to n values of each row."""
    values = np.array(rows, dtype=np.float64)
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
