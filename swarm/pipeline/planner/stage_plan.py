"""What the planner is told of layers and peers, and the plan that it answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
