"""Which layers make a stage and who holds which stages: what the planner is told and what it answers (pure)."""

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
    """Free and usable."""
    layer_s: tuple[float, ...]
    """Seconds of forward and backward of one micro-batch, by layer."""
    bandwidth_bps: float
    """What its link carries, in each direction."""
    rtt_s: float = 0.0


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


@dataclass(frozen=True)
class Infeasible:
    """No plan: a sentence for people, with the stage that nobody can hold and the memory that it takes."""

    reason: str
